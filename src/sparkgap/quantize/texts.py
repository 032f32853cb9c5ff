"""Texts that activations are calibrated on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparkgap.api import LLM
from sparkgap.bench.prompts import builtin_prompts
from sparkgap.config import SamplingParams
from sparkgap.engine.scoring import windows_of
from sparkgap.errors import PromptError

DEFAULT = "default"
"""The model's own answers to built-in prompts."""

_ANSWER_TOKENS = 192
_TEMPERATURE = 0.8
_ANSWERS_AT_ONCE = 8


def own_answers(
    llm: LLM, num_tokens: int, seed: int, advance: Callable[[int], None] = lambda number: None
) -> list[list[int]]:
    """Conversations of the model itself, prompt and answer, until there are `num_tokens` tokens.

    Prompts are the built-in ones, again with other answers as often as it takes; a model without a chat template
    continues them.

    Args:
        llm: answers.
        num_tokens: tokens of prompts and answers.
        seed: of the answers.
        advance: told how many of the tokens are new; `num_tokens` in all.
    """
    prompts = builtin_prompts()
    tokenizer = llm.tokenizer
    encoded = [
        tokenizer.encode(prompt.text)
        if tokenizer.chat_template is None
        else tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        for prompt in prompts
    ]
    longest = llm.info()["max_model_len"]
    encoded = [token_ids[: longest // 2] for token_ids in encoded if token_ids]
    windows: list[list[int]] = []
    while sum(map(len, windows)) < num_tokens:
        group = [encoded[(len(windows) + number) % len(encoded)] for number in range(_ANSWERS_AT_ONCE)]
        params = [
            SamplingParams(
                temperature=_TEMPERATURE,
                max_tokens=min(_ANSWER_TOKENS, longest - len(token_ids)),
                seed=seed + len(windows) + number,
            )
            for number, token_ids in enumerate(group)
        ]
        outputs = llm.generate(group, params)
        before = sum(map(len, windows))
        windows += [[*given, *output.outputs[0].token_ids] for given, output in zip(group, outputs, strict=True)]
        advance(min(sum(map(len, windows)), num_tokens) - before)
    return _cut(windows, num_tokens)


def read_calibration(file: Path, llm: LLM, num_tokens: int, context: int) -> list[list[int]]:
    """The first `num_tokens` tokens of a file, in pieces of at most `context` tokens.

    Args:
        file: plain text, or JSONL with `messages` (a conversation), `text` or `prompt` in each line.
        llm: whose tokenizer and chat template are used.
        num_tokens: most tokens.
        context: longest piece.

    Raises:
        PromptError: the file cannot be read or is of another form, or holds nothing.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"cannot read calibration file {file}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise PromptError(f"calibration file {file} is not valid UTF-8; convert it to UTF-8") from error
    if file.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        encoded = [_encode_line(line, llm, f"calibration file {file}, line {number}") for number, line in lines]
    else:
        encoded = [llm.tokenizer.encode(text)]
    windows = _cut([window for token_ids in encoded for window in windows_of(token_ids, context)], num_tokens)
    if not windows:
        raise PromptError(f"calibration file {file} has fewer than two tokens")
    return windows


def _encode_line(line: str, llm: LLM, where: str) -> list[int]:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not valid JSON: {error}") from error
    if isinstance(entry, dict) and "messages" in entry:
        return llm.tokenizer.encode_chat(entry["messages"], add_generation_prompt=False)
    text = entry.get("text", entry.get("prompt")) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise PromptError(f"{where} must be an object with messages, or with a text under text or prompt")
    return llm.tokenizer.encode(text)


def _cut(windows: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    kept: list[list[int]] = []
    for window in windows:
        part = window[:num_tokens]
        num_tokens -= len(part)
        if len(part) > 1:
            kept.append(part)
    return kept
