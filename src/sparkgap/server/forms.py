"""The two forms of an answer: chat completions and plain completions, whole and in pieces."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.engine.outputs import CompletionOutput
from sparkgap.server.logprobs import chat_logprobs, text_logprobs


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
        logprobs: alternatives at each token; None without log-probabilities.
        echoes: text that each prompt's choices begin with; empty without echo.
        n: choices of each prompt.
    """

    logprobs: int | None
    echoes: Sequence[str]
    n: int
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"
    _offsets: dict[int, int] = field(default_factory=dict)

    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """See `Form.choice`."""
        return self._choice(index, self._echo(index) + output.text, output)

    def openings(self, index: int) -> list[dict[str, Any]]:
        """See `Form.openings`."""
        echo = self._echo(index)
        return [{"index": index, "text": echo, "logprobs": None, "finish_reason": None}] if echo else []

    def piece(self, index: int, output: CompletionOutput) -> dict[str, Any] | None:
        """See `Form.piece`."""
        if not output.text and output.finish_reason is None and self.logprobs is None:
            return None
        return self._choice(index, output.text, output)

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.n] if self.echoes else ""

    def _choice(self, index: int, text: str, output: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if self.logprobs is not None:
            logprobs, self._offsets[index] = text_logprobs(output, self.logprobs, self._offsets.get(index, 0))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
