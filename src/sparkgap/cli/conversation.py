"""The turns of a chat, and which of them fit the context."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sparkgap.errors import PromptError


class ChatTokenizer(Protocol):
    """What a conversation needs of a tokenizer."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /) -> list[int]:
        """Token ids of a chat, with the opening of the next answer."""
        ...


class Conversation:
    """A system message and exchanges of one user message and one answer each.

    Args:
        system: system message, if any.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.exchanges: list[tuple[str, str]] = []

    def clear(self) -> None:
        """Forget the exchanges; the system message stays."""
        self.exchanges.clear()

    def add(self, message: str, answer: str) -> None:
        """Remember an exchange."""
        self.exchanges.append((message, answer))

    def messages(self, message: str, skip: int = 0) -> list[dict[str, str]]:
        """The chat that ends with a new user message, without its `skip` oldest exchanges."""
        chat = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, assistant in self.exchanges[skip:]:
            chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return [*chat, {"role": "user", "content": message}]

    def fit(
        self, message: str, tokenizer: ChatTokenizer, max_model_len: int, max_tokens: int
    ) -> tuple[list[dict[str, str]], int]:
        """The chat that ends with `message`, after dropping the oldest exchanges that leave no room for an answer.

        Room is `max_tokens`, but at most a quarter of the context. A message that fits only with less room
        than that is let through.

        Returns:
            The messages, and how many exchanges were dropped for good.

        Raises:
            PromptError: the message and the system message alone fill the context. Nothing is dropped then.
        """
        room = min(max_tokens, max_model_len // 4)
        for skip in range(len(self.exchanges) + 1):
            messages = self.messages(message, skip)
            num_tokens = len(tokenizer.encode_chat(messages))
            if num_tokens + room <= max_model_len:
                break
        if num_tokens >= max_model_len:
            raise PromptError(
                f"the message has {num_tokens} tokens with its chat template, and the context holds "
                f"{max_model_len}; shorten it or raise --max-model-len"
            )
        del self.exchanges[:skip]
        return messages, skip
