"""From tokens to text as they arrive: whole characters only, at a cost that does not grow with the text."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\ufffd"
_LONGEST_INCOMPLETE_CHARACTER = 3
"""Bytes of a UTF-8 character that can be there without its last one."""
_CONTEXT_TOKENS = 8
_LARGEST_WINDOW_TOKENS = 16


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer (`catalog.tokenizer.Tokenizer`)."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are not text."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of `text`."""
        ...

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that are not valid UTF-8 become replacement characters."""
        ...

    def text_of(self, token_id: int) -> str | None:
        """What a token adds to any text that ends with a whole character; None where that is not so simple."""
        ...


class Detokenizer:
    """Text of a growing sequence of tokens.

    Pieces add up to the text of all tokens, decoded together after the prompt's last tokens. A character whose
    bytes are spread over tokens is held until it is complete, or until it is certain that it never will be. Only
    the last few tokens are decoded each time, and none where a token says by itself what it adds. (One difference, in
    tokenizers with byte fallback tokens: a complete character that has been given stays, where decoding all at once
    would replace it when invalid bytes follow.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Seq[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window = [i for i in prompt_token_ids[-_CONTEXT_TOKENS:] if i not in self._skipped]
        self._given = self._decode(self._window)
        if self._given.endswith(_REPLACEMENT):
            self._window, self._given = [], ""
        self._num_given_tokens = len(self._window)
        self._ends_whole = True

    def add(self, token_id: int) -> str:
        """Add a token; the text that has become certain, which may be empty."""
        if token_id in self._skipped:
            return ""
        if self._ends_whole:
            # What came before has no part in what such a token adds, nor in what comes after.
            text = self._tokenizer.text_of(token_id)
            if text is not None:
                self._window, self._given, self._num_given_tokens = [], "", 0
                return text
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = self._certain(text)
        self._ends_whole = not text.endswith(_REPLACEMENT)
        if not certain.startswith(self._given):
            return self._restart() if certain == text or self._is_overdue() else ""
        piece = certain[len(self._given) :]
        if piece or certain == text:
            self._given = certain
            self._num_given_tokens = len(self._window)
        if len(self._window) > _LARGEST_WINDOW_TOKENS:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """The text still held, after the last token."""
        text = self._decode(self._window)
        if not text.startswith(self._given):
            return self._restart()
        piece = text[len(self._given) :]
        self._given = text
        return piece

    def _certain(self, text: str) -> str:
        """What of `text` no further token changes.

        An incomplete character at its end shows as one replacement character, or as one for each of its bytes.
        """
        if not text.endswith(_REPLACEMENT):
            return text
        complete = len(text.rstrip(_REPLACEMENT))
        if self._is_overdue():
            complete = max(complete, len(text) - _LONGEST_INCOMPLETE_CHARACTER)
        return text[:complete]

    def _is_overdue(self) -> bool:
        """Whether so many tokens are held that their first bytes cannot be an incomplete character."""
        return len(self._window) - self._num_given_tokens > _LONGEST_INCOMPLETE_CHARACTER

    def _decode(self, token_ids: Seq[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""

    def _restart(self) -> str:
        """Decode the tokens since the last given text by themselves: those before now read differently."""
        self._window = self._window[self._num_given_tokens :]
        self._given = self._decode(self._window)
        self._num_given_tokens = len(self._window)
        return self._given

    def _shorten(self, text: str) -> None:
        """Drop the window's oldest tokens if the rest, decoded alone, gives the end of `text`.

        In UTF-8 the rest then has every character boundary of the whole: at most 3 bytes of a character cut in two
        can lead it, and its tokens have more.
        """
        dropped = len(self._window) - _CONTEXT_TOKENS
        rest = self._decode(self._window[dropped:])
        held = len(text) - len(self._given)
        if text.endswith(rest) and len(rest) > held:
            self._window = self._window[dropped:]
            self._given = rest[: len(rest) - held]
            self._num_given_tokens = max(self._num_given_tokens - dropped, 0)


@dataclass(frozen=True)
class StopMatch:
    """A stop string found in the text.

    Attributes:
        stop: the string.
        start, end: where it begins and ends in the text.
    """

    stop: str
    start: int
    end: int


class StopStrings:
    """Finds stop strings in a growing text, across the pieces it arrives in."""

    def __init__(self, stops: Seq[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)

    def find(self, text: str, num_seen: int) -> StopMatch | None:
        """The first stop string that ends after the first `num_seen` characters: which does not depend on pieces.

        Of several that end at the same place the longest is found.
        """
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(num_seen - len(stop) + 1, 0))
            if start >= 0:
                matches.append(StopMatch(stop, start, start + len(stop)))
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    def held_from(self, text: str, start: int) -> int:
        """Where the part of `text` begins that may be the beginning of a stop string; its length if there is none.

        Args:
            text: what has arrived.
            start: what this gave for an earlier part of the text, 0 at first. What could not be the beginning of a
                stop string then cannot be now, so that no place is looked at again and again.
        """
        for position in range(max(start, len(text) - self._longest + 1), len(text)):
            end = text[position:]
            if any(stop.startswith(end) for stop in self._stops):
                return position
        return len(text)
