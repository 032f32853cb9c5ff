"""What clients may send: OpenAI's request bodies, vLLM's additions, and ours (`speculation`, `deadline_s`).

A field that is not here is refused, as OpenAI refuses it. Fields that OpenAI has and this server does not serve are
here with the values that ask for nothing.
"""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from sparkgap.config import MAX_LOGPROBS, REPETITION_PENALTIES, SamplingParams

MAX_N = 128
"""Most completions of one prompt (OpenAI's limit)."""

MAX_STOP_STRINGS = 16
"""Most stop strings; each costs time at every token."""

_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Field(fail_fast=True, min_length=1)]
_StopString = Annotated[str, Field(min_length=1, max_length=256)]


def _only(*neutral: Any) -> Any:
    """The default of a field that is not supported: null, and values that change nothing, are taken."""
    return Field(default=None, json_schema_extra={"enum": [None, *neutral]})


class Body(BaseModel):
    """A request's JSON object: exact types, no unknown names, finite numbers, and nothing that is not supported."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @field_validator("*")
    @classmethod
    def _refuse_unsupported(cls, value: Any, info: ValidationInfo) -> Any:
        extra = cls.model_fields[info.field_name or ""].json_schema_extra
        neutral: Any = extra.get("enum") if isinstance(extra, dict) else None
        if neutral is None or any(type(value) is type(other) and value == other for other in neutral):
            return value
        allowed = ", ".join(json.dumps(other) for other in neutral)
        raise PydanticCustomError(
            "unsupported_parameter", "not supported; leave it out, or use {allowed}", {"allowed": allowed}
        )


_SAMPLING = (
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "speculation",
    "deadline_s",
)


class StreamOptions(Body):
    """`stream_options`; obfuscation, which OpenAI adds against eavesdroppers, is not sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body):
    """What chat and plain completions share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: _StopString | Annotated[list[_StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    speculation: bool | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Sampling parameters; a field that is null has vLLM's default. Raises ConfigError."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


def _text_only(kind: str) -> str:
    if kind != "text":
        raise PydanticCustomError(
            "unsupported_parameter", "parts of type {kind} are not supported", {"kind": repr(kind)}
        )
    return kind


class TextPart(Body):
    """A part of a message's content; other types than text are not supported."""

    type: Annotated[str, AfterValidator(_text_only), Field(json_schema_extra={"enum": ["text"]})]
    text: str


class ChatMessage(Body):
    """One message; tool calls and audio are not supported."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Any = _only([])
    audio: Any = _only()
    function_call: Any = _only()
    tool_calls: Any = _only([])
    tool_call_id: Any = _only()


class ChatBody(GenerationBody):
    """`/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    prediction: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    audio: Any = _only()
    function_call: Any = _only("none", "auto")
    functions: Any = _only([])
    modalities: Any = _only(["text"])
    moderation: Any = _only()
    prompt_cache_options: Any = _only()
    reasoning_effort: Any = _only("none")
    response_format: Any = _only({"type": "text"})
    service_tier: Any = _only("auto", "default")
    store: Any = _only(False)
    tool_choice: Any = _only("none", "auto")
    tools: Any = _only([])
    verbosity: Any = _only("medium")
    web_search_options: Any = _only()


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

    prompt: (
        str
        | _TokenIds
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | Annotated[list[_TokenIds], Field(fail_fast=True, min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    add_special_tokens: bool | None = None
    suffix: Any = _only("")


class TokenizeBody(Body):
    """`/tokenize`: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[_TokenId], Field(fail_fast=True)]
