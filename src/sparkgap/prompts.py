"""The forms in which prompts and their parameters are given."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeAlias

from sparkgap.config import SamplingParams
from sparkgap.errors import ConfigError, PromptError

Prompt: TypeAlias = str | Seq[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""

Message: TypeAlias = Mapping[str, Any]
"""One chat message with `role` and `content`."""


def as_prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list.

    Raises:
        PromptError: they are neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise PromptError(f"prompts must be text, token ids, a mapping or a list of them, got {prompts!r}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item] # token ids of one prompt
    return list(prompts)  # type: ignore[arg-type]


def as_params(params: SamplingParams | Seq[SamplingParams] | None, number: int) -> list[SamplingParams]:
    """The parameters of each of `number` prompts; None gives the defaults.

    Raises:
        ConfigError: they are not parameters, or not one for all or for each.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if not isinstance(params, Seq) or not all(isinstance(item, SamplingParams) for item in params):
        raise ConfigError(f"sampling_params must be SamplingParams or a list of them, got {params!r}")
    if len(params) != number:
        raise ConfigError(f"there are {number} prompts and {len(params)} sampling_params; give one, or one for each")
    return list(params)


def prompt_content(prompt: Prompt) -> str | Seq[int]:
    """Text or token ids of a prompt in any of its forms.

    Raises:
        PromptError: it has none of them.
    """
    if isinstance(prompt, Mapping):
        known = [name for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
        if not known:
            raise PromptError("a prompt given as a mapping must have prompt or prompt_token_ids")
        prompt = prompt[known[0]]
    if isinstance(prompt, str) or (isinstance(prompt, Seq) and not isinstance(prompt, bytes)):
        return prompt
    raise PromptError(f"a prompt must be text, token ids or a mapping with one of them, got {prompt!r}")
