"""The two forms of an answer: chat completions and plain completions, whole and in pieces."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.engine.outputs import CompletionOutput, RequestOutput
from sparkgap.server.logprobs import TextLogprobs, chat_logprobs


@dataclass(frozen=True)
class Head:
    """What every object of one answer repeats.

    Attributes:
        id: of the answer.
        created: Unix time in seconds.
        model: the model's name.
        system_fingerprint: tells configurations apart whose tokens may differ.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str

    def object(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """An object of the answer."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": list(choices),
        }


@dataclass
class Usage:
    """Numbers of tokens of an answer, over all its prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def report(self) -> dict[str, Any]:
        """The `usage` object."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Form(ABC):
    """How an endpoint writes choices. One object serves one request, and is given each choice's outputs in order."""

    kind: str
    chunk_kind: str

    @abstractmethod
    def note_prompt(self, number: int, output: RequestOutput) -> None:
        """Take what an output says of the prompt with this number, before any of its choices is written."""

    @abstractmethod
    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """A choice that is complete."""

    @abstractmethod
    def openings(self, index: int) -> list[dict[str, Any]]:
        """What a streamed choice begins with, before anything of its text."""

    @abstractmethod
    def piece(self, index: int, output: CompletionOutput) -> dict[str, Any] | None:
        """A piece of a streamed choice; None where there is nothing to tell."""


@dataclass
class ChatForm(Form):
    """`/v1/chat/completions`.

    Attributes:
        tokenizer: spells tokens.
        top_logprobs: alternatives at each token; None without log-probabilities.
    """

    tokenizer: Tokenizer
    top_logprobs: int | None
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def note_prompt(self, number: int, output: RequestOutput) -> None:
        """See `Form.note_prompt`; chats do not repeat their prompts."""

    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """See `Form.choice`."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return self._choice(index, "message", message, output)

    def openings(self, index: int) -> list[dict[str, Any]]:
        """See `Form.openings`."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def piece(self, index: int, output: CompletionOutput) -> dict[str, Any] | None:
        """See `Form.piece`."""
        if not output.text and output.finish_reason is None and self.top_logprobs is None:
            return None
        return self._choice(index, "delta", {"content": output.text} if output.text else {}, output)

    def _choice(self, index: int, name: str, value: dict[str, Any], output: CompletionOutput) -> dict[str, Any]:
        wanted = self.top_logprobs
        return {
            "index": index,
            name: value,
            "logprobs": None if wanted is None else chat_logprobs(output, wanted, self.tokenizer),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }


@dataclass
class TextForm(Form):
    """`/v1/completions`.

    Attributes:
        tokenizer: spells tokens.
        logprobs: alternatives at each token; None without log-probabilities.
        echoes: text that each prompt's choices begin with; empty without echo.
        n: choices of each prompt.
    """

    tokenizer: Tokenizer
    logprobs: int | None
    echoes: Sequence[str]
    n: int
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"
    _offsets: dict[int, int] = field(default_factory=dict)
    _prompts: dict[int, RequestOutput] = field(default_factory=dict)

    def note_prompt(self, number: int, output: RequestOutput) -> None:
        """See `Form.note_prompt`."""
        if output.prompt_logprobs is not None:
            self._prompts[number] = output

    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """See `Form.choice`."""
        found = self._prompt_logprobs(index)
        return self._choice(index, self._echo(index) + output.text, output, found)

    def openings(self, index: int) -> list[dict[str, Any]]:
        """See `Form.openings`."""
        echo, found = self._echo(index), self._prompt_logprobs(index)
        if not echo and found is None:
            return []
        logprobs = None
        if found is not None:
            logprobs, self._offsets[index] = found.report(), found.offset
        return [{"index": index, "text": echo, "logprobs": logprobs, "finish_reason": None}]

    def piece(self, index: int, output: CompletionOutput) -> dict[str, Any] | None:
        """See `Form.piece`."""
        if not output.text and output.finish_reason is None and self.logprobs is None:
            return None
        return self._choice(index, output.text, output)

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.n] if self.echoes else ""

    def _prompt_logprobs(self, index: int) -> TextLogprobs | None:
        """Of the prompt that a choice begins with, as far as they are wanted."""
        output = self._prompts.get(index // self.n)
        if output is None or self.logprobs is None:
            return None
        found = TextLogprobs(self.logprobs)
        found.add_prompt(output.prompt_token_ids, output.prompt_logprobs or (), self.tokenizer)
        return found

    def _choice(
        self, index: int, text: str, output: CompletionOutput, before: TextLogprobs | None = None
    ) -> dict[str, Any]:
        """A choice, or a piece of one; with the log-probabilities of what is `before` it in this object."""
        logprobs = None
        if self.logprobs is not None:
            found = before or TextLogprobs(self.logprobs, self._offsets.get(index, 0))
            found.add_output(output)
            logprobs, self._offsets[index] = found.report(), found.offset
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
