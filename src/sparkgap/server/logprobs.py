"""Log-probabilities as OpenAI's two endpoints write them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.engine.outputs import CompletionOutput, Logprob

LEAST_LOGPROB = -9999.0
"""What is written for a log-probability below it (vLLM's value): that of an impossible token is no JSON number."""

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Bytes by the characters that byte-level BPE spells them with (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES_OF_CHARACTERS = _byte_level_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> list[int]:
    """The bytes that a token stands for, also where they are a part of a character only.

    Args:
        tokenizer: spells the token.
        token_id: the token.
        text: the token decoded by itself.
    """
    if _REPLACEMENT not in text:
        return list(text.encode())
    spelled = tokenizer.id_to_token(token_id) or ""
    match = _BYTE_TOKEN.fullmatch(spelled)
    if match:
        return [int(match[1], 16)]
    if spelled and all(character in _BYTES_OF_CHARACTERS for character in spelled):
        return [_BYTES_OF_CHARACTERS[character] for character in spelled]
    return list(text.encode())


def chat_logprobs(output: CompletionOutput, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of a chat choice.

    Args:
        output: with log-probabilities.
        number: alternatives to list at each token.
        tokenizer: spells tokens.
    """

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token
        return {"token": text, "logprob": _written(logprob), "bytes": token_bytes(tokenizer, token_id, text)}

    content = []
    for token_id, table in zip(output.token_ids, output.logprobs or (), strict=True):
        top = [entry(other, logprob) for other, logprob in _most_probable(table, number)]
        content.append({**entry(token_id, table[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextLogprobs:
    """The `logprobs` of a plain choice, or of a piece of one: four lists with an entry for each token.

    Args:
        number: alternatives to list at each token, beside the chosen one.
        offset: characters of the texts of the tokens before.

    Attributes:
        offset: where the text of the next token begins.
    """

    def __init__(self, number: int, offset: int = 0) -> None:
        self.offset = offset
        self._number = number
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(
        self, token_ids: Sequence[int], tables: Sequence[Mapping[int, Logprob] | None], tokenizer: Tokenizer
    ) -> None:
        """Tokens of a prompt, the first of which follows nothing and so has no probability."""
        for token_id, table in zip(token_ids, tables, strict=True):
            if table is not None:
                self._add(token_id, table)
            else:
                self._add_text(tokenizer.decode([token_id], skip_special_tokens=False))
                self._values.append(None)
                self._tops.append(None)

    def add_output(self, output: CompletionOutput) -> None:
        """Tokens of an answer, with their log-probabilities."""
        for token_id, table in zip(output.token_ids, output.logprobs or (), strict=True):
            self._add(token_id, table)

    def report(self) -> dict[str, Any]:
        """The object."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def _add(self, token_id: int, table: Mapping[int, Logprob]) -> None:
        chosen = table[token_id]
        self._add_text(chosen.decoded_token)
        self._values.append(_written(chosen))
        shown = [*_most_probable(table, self._number), (token_id, chosen)]
        self._tops.append({logprob.decoded_token: _written(logprob) for _, logprob in reversed(shown)})

    def _add_text(self, text: str) -> None:
        self._tokens.append(text)
        self._offsets.append(self.offset)
        self.offset += len(text)


def _written(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST_LOGPROB)


def _most_probable(table: Mapping[int, Logprob], number: int) -> Sequence[tuple[int, Logprob]]:
    return sorted(((i, entry) for i, entry in table.items() if entry.rank <= number), key=lambda pair: pair[1].rank)
