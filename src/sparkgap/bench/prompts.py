"""What a bench asks: prompts from a file or built in, and their tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkgap.bench.builtin_prompts import BUILTIN_PROMPTS, SHORT_BEGINNINGS
from sparkgap.errors import PromptError

if TYPE_CHECKING:
    from sparkgap.api import LLM


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt.

    Attributes:
        id: what reports call it.
        text: the prompt.
        category: reports are grouped by it; None for no group.
    """

    id: str
    text: str
    category: str | None = None


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as a model reads it.

    Attributes:
        prompt: where it comes from.
        token_ids: with the chat template's tokens, where it is used.
    """

    prompt: BenchPrompt
    token_ids: list[int]


def builtin_prompts() -> list[BenchPrompt]:
    """The built-in prompts, categories in turn, so that a limit takes of each."""
    numbers = range(max(len(texts) for texts in BUILTIN_PROMPTS.values()))
    return [
        BenchPrompt(f"{category}-{number}", texts[number], category)
        for number in numbers
        for category, texts in BUILTIN_PROMPTS.items()
        if number < len(texts)
    ]


def builtin_beginnings() -> list[BenchPrompt]:
    """Short texts to continue."""
    return [BenchPrompt(f"text-{number}", text) for number, text in enumerate(SHORT_BEGINNINGS)]


def read_prompts(file: Path) -> list[BenchPrompt]:
    """Prompts of a file: JSONL with `prompt` and optional `id` and `category`, or plain text with one a line.

    It is JSONL when its name ends in `.jsonl` or its first line begins with a brace.

    Raises:
        PromptError: the file cannot be read, is not UTF-8, has a line that is no such object, or has no prompt.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"cannot read prompts file {file}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise PromptError(f"prompts file {file} is not valid UTF-8; convert it to UTF-8") from error
    is_jsonl = file.suffix == ".jsonl" or text.lstrip().startswith("{")
    # splitlines() would also break at characters that JSON strings and sentences may hold.
    numbered = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise PromptError(f"prompts file {file} has no prompt")
    if not is_jsonl:
        return [BenchPrompt(f"line {number}", line) for number, line in numbered]
    return [_from_json(line, f"prompts file {file}, line {number}", f"line {number}") for number, line in numbered]


def spread(prompts: Sequence[BenchPrompt], limit: int | None) -> list[BenchPrompt]:
    """`limit` of some prompts, in order and at even distances from the first on; all where there are no more."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def _from_json(line: str, where: str, default_id: str) -> BenchPrompt:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"]:
        raise PromptError(f"{where} must be an object with a text under prompt")
    category = entry.get("category")
    if category is not None and not isinstance(category, str):
        raise PromptError(f"{where}: category must be a text, got {category!r}")
    return BenchPrompt(str(entry.get("id", default_id)), entry["prompt"], category)


def encode_prompts(
    llm: "LLM", prompts: Sequence[BenchPrompt], *, raw: bool, fewest_output_tokens: int = 1
) -> list[EncodedPrompt]:
    """Tokens of each prompt: as a user message where the model has a chat template, unless `raw`.

    Args:
        llm: reads them.
        prompts: what is encoded.
        raw: without the chat template.
        fewest_output_tokens: room that each must leave in the context.

    Raises:
        PromptError: the template refuses a prompt, or it leaves no room for an answer; the message names it.
    """
    tokenizer, longest = llm.tokenizer, llm.info()["max_model_len"]
    as_chat = tokenizer.chat_template is not None and not raw
    encoded = []
    for prompt in prompts:
        if as_chat:
            token_ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        else:
            token_ids = tokenizer.encode(prompt.text)
        if not 0 < len(token_ids) <= longest - fewest_output_tokens:
            room = "an answer" if fewest_output_tokens == 1 else f"{fewest_output_tokens} tokens of an answer"
            raise PromptError(
                f"prompt {prompt.id} has {len(token_ids)} tokens, which must be at least 1 and leave room for {room} "
                f"in max_model_len {longest}"
            )
        encoded.append(EncodedPrompt(prompt, token_ids))
    return encoded


def batches(prompts: Sequence[EncodedPrompt], size: int) -> Iterator[list[EncodedPrompt]]:
    """Groups of `size` in order; the last may be smaller."""
    for start in range(0, len(prompts), size):
        yield list(prompts[start : start + size])
