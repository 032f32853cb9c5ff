"""How a conversation is laid out in tokens, taken from the target's chat template."""

from dataclasses import dataclass

from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.errors import ConfigError

_MARK = "SPARKGAPUSERTURN"


@dataclass(frozen=True)
class TurnTemplate:
    """The fixed parts of a conversation of one user turn and one answer.

    Attributes:
        opening: everything before the user's text.
        middle: from the end of the user's text to the start of the answer.
        turn_ends: tokens that end the user's text when the target writes it.
        end_tokens: tokens that end an answer.
    """

    opening: list[int]
    middle: list[int]
    turn_ends: frozenset[int]
    end_tokens: frozenset[int]


def turn_template(checkpoint: Checkpoint) -> TurnTemplate:
    """The layout of `checkpoint`'s chat template.

    Raises:
        ConfigError: the template does not contain the user's text once, or nothing marks its end.
        PromptError: there is no chat template.
    """
    tokenizer = checkpoint.tokenizer
    text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
    parts = text.split(_MARK)
    if len(parts) != 2:
        raise ConfigError(
            f"the chat template of {checkpoint.name} writes the user's text {len(parts) - 1} times; conversations "
            "can be sampled only where it is written once"
        )
    opening, middle = (tokenizer.encode(part, add_special_tokens=False) for part in parts)
    if not opening or not middle:
        raise ConfigError(f"the chat template of {checkpoint.name} puts nothing before or after the user's text")
    ends = frozenset(checkpoint.eos_token_ids)
    return TurnTemplate(opening, middle, ends | {middle[0]}, ends)
