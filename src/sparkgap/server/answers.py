"""The forms of answers, for the OpenAPI document; answers are built as plain dictionaries."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Answer):
    """The body of every error."""

    error: ErrorDetail


class PromptTokensDetails(_Answer):
    """Tokens of the prompts whose KV was there already."""

    cached_tokens: int


class UsageAnswer(_Answer):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length", "timeout"]
"""`timeout` where the request's `deadline_s` passed."""


class TopLogprob(_Answer):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A chosen token, with the most probable ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities of a chat choice."""

    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(_Answer):
    """The answer's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Answer):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(_Answer):
    """`/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class TextLogprobs(_Answer):
    """Log-probabilities of a plain choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class TextCompletion(_Answer):
    """`/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageAnswer


class Model(_Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(_Answer):
    """`/v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(_Answer):
    """`/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[Any] | None


class Detokenized(_Answer):
    """`/detokenize`."""

    prompt: str


class HealthAnswer(_Answer):
    """`/health`."""

    status: Literal["ok", "loading", "draining", "failed", "stalled"]
    detail: str


class VersionAnswer(_Answer):
    """`/version`."""

    version: str
