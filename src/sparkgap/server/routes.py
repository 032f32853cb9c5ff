"""The endpoints."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from sparkgap import __version__
from sparkgap.errors import PromptError
from sparkgap.server.answers import (
    ChatCompletion,
    Detokenized,
    ErrorAnswer,
    HealthAnswer,
    Model,
    ModelList,
    TextCompletion,
    Tokenized,
    VersionAnswer,
)
from sparkgap.server.errors import ApiError, json_response
from sparkgap.server.forms import ChatForm, TextForm
from sparkgap.server.generation import Answering
from sparkgap.server.logs import RequestLog
from sparkgap.server.metrics import ServerMetrics
from sparkgap.server.requests import ChatBody, ChatMessage, CompletionBody, DetokenizeBody, TokenizeBody
from sparkgap.server.state import ServerState

DEFAULT_COMPLETION_TOKENS = 16
"""Most output tokens of a plain completion that names none (OpenAI's default)."""

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request is refused.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        415: "The body is not declared as JSON.",
        429: "The queue is full; Retry-After tells when to try again.",
        500: "Computing failed.",
        503: "The model is being loaded, or the server is shutting down.",
        504: "The request was not finished in time.",
    }.items()
}
router = APIRouter(responses=_ERRORS)
open_router = APIRouter()


# Dependencies are coroutines: a plain function would be called in another thread, for each request.


async def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def _metrics(request: Request) -> ServerMetrics:
    metrics: ServerMetrics = request.app.state.metrics
    return metrics


async def _log(request: Request) -> RequestLog:
    log: RequestLog = request.scope["sparkgap.log"]
    log.handler = request.scope["route"].path
    return log


State = Annotated[ServerState, Depends(_state)]
Metrics = Annotated[ServerMetrics, Depends(_metrics)]
Log = Annotated[RequestLog, Depends(_log)]


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def chat_completions(body: ChatBody, state: State, metrics: Metrics, log: Log) -> Response:
    """Answer a conversation; a stream of server-sent events with `stream`."""
    state.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.params(max_tokens=max_tokens, logprobs=top_logprobs)
    messages = _messages(body.messages)
    if state.settings.log_prompts:
        log.fields["messages"] = messages
    prompt = await _encode_chat(state, messages, body.add_generation_prompt, body.chat_template_kwargs)
    check_length(state, prompt, "messages")
    form = ChatForm(state.llm.tokenizer, top_logprobs)
    answering = Answering(state, metrics, log, form, id_prefix="chatcmpl")
    return await answering.respond([prompt], params, stream=bool(body.stream), wants_usage=body.wants_usage)


@router.post("/v1/completions", response_model=TextCompletion)
async def completions(body: CompletionBody, state: State, metrics: Metrics, log: Log) -> Response:
    """Continue one prompt or several; a stream of server-sent events with `stream`."""
    state.check_model(body.model)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        message = f"best_of {body.best_of} with n {n} is not supported; leave it out, or use {n}"
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.logprobs if body.echo else None
    params = body.params(max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)
    given = _prompts(body.prompt)
    state.check_capacity(len(given) * n)
    if state.settings.log_prompts:
        log.fields["prompts"] = given
    prompts, echoes = [], []
    for prompt in given:
        prompts.append(await _encode(state, prompt, add_special_tokens=body.add_special_tokens is not False))
        check_length(state, prompts[-1], "prompt")
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else state.llm.tokenizer.decode(prompt))
    form = TextForm(state.llm.tokenizer, body.logprobs, echoes, n)
    answering = Answering(state, metrics, log, form, id_prefix="cmpl")
    return await answering.respond(prompts, params, stream=bool(body.stream), wants_usage=body.wants_usage)


@router.get("/v1/models", response_model=ModelList)
async def models(state: State, log: Log) -> Response:
    """The model that is served."""
    return json_response({"object": "list", "data": [_model(state)]})


@router.get("/v1/models/{model:path}", response_model=Model)
async def model(model: str, state: State, log: Log) -> Response:
    """One model."""
    state.check_model(model)
    return json_response(_model(state))


@router.post("/tokenize", response_model=Tokenized)
async def tokenize(body: TokenizeBody, state: State, log: Log) -> Response:
    """Token ids of a text, or of a conversation's prompt."""
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
    if body.messages is not None:
        messages = _messages(body.messages)
        tokens = await _encode_chat(state, messages, body.add_generation_prompt, body.chat_template_kwargs)
    else:
        tokens = await _encode(state, body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    tokenizer = state.llm.tokenizer
    spelled = [tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
    return json_response(
        {"count": len(tokens), "max_model_len": state.llm.max_model_len, "tokens": tokens, "token_strs": spelled}
    )


@router.post("/detokenize", response_model=Detokenized)
async def detokenize(body: DetokenizeBody, state: State, log: Log) -> Response:
    """The text of token ids, special tokens included."""
    state.check_model(body.model)
    for token in body.tokens:
        if token >= state.llm.vocab_size:
            raise ApiError(
                400,
                f"tokens has id {token}, outside the vocabulary of {state.llm.vocab_size}",
                param="tokens",
                code="invalid_value",
            )
    return json_response({"prompt": state.llm.tokenizer.decode(body.tokens, skip_special_tokens=False)})


@open_router.get("/health", response_model=HealthAnswer, responses={503: {"model": HealthAnswer}})
async def health(state: State, log: Log) -> Response:
    """Whether requests can be expected to be served; 503 while loading, draining, stalled or failed."""
    found = state.health()
    return json_response({"status": found.status, "detail": found.detail}, 200 if found.healthy else 503)


@open_router.get("/version", response_model=VersionAnswer)
async def version(log: Log) -> Response:
    """Sparkgap's version."""
    return json_response({"version": __version__})


@open_router.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
async def prometheus(metrics: Metrics, log: Log) -> Response:
    """Metrics in Prometheus's text format."""
    return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")


def check_length(state: ServerState, prompt: Sequence[int], param: str) -> None:
    """Check that a prompt leaves room for an answer.

    Raises:
        ApiError: it is longer than the context or than `max_prompt_tokens`.
    """
    longest = state.llm.max_model_len - 1
    what = "this model's context"
    if state.settings.max_prompt_tokens is not None and state.settings.max_prompt_tokens < longest:
        longest, what = state.settings.max_prompt_tokens, "this server's limit"
    if len(prompt) > longest:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens, and {what} allows prompts of {longest}; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates take them."""
    return [
        {"role": message.role, "content": _content(message)} | ({"name": message.name} if message.name else {})
        for message in messages
    ]


def _content(message: ChatMessage) -> Any:
    if message.content is None or isinstance(message.content, str):
        return message.content
    return [part.model_dump() for part in message.content]


async def _encode_chat(
    state: ServerState,
    messages: Sequence[dict[str, Any]],
    add_generation_prompt: bool | None,
    variables: dict[str, Any] | None,
) -> list[int]:
    names = {"add_generation_prompt": True, **(variables or {})}
    if add_generation_prompt is not None:
        names["add_generation_prompt"] = add_generation_prompt
    try:
        return await state.llm.encode_chat(messages, **names)
    except PromptError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error


def _prompts(given: Any) -> list[str | list[int]]:
    """The prompts of a request in any of OpenAI's four forms."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    prompts: list[str | list[int]] = [given] if is_one else given
    return prompts


async def _encode(state: ServerState, prompt: str | list[int], *, add_special_tokens: bool) -> list[int]:
    try:
        if isinstance(prompt, str):
            return await state.llm.encode(prompt, add_special_tokens=add_special_tokens)
        return prompt
    except PromptError as error:
        raise ApiError(400, str(error), param="prompt", code="invalid_value") from error


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "sparkgap",
        "root": state.llm.config.model,
        "parent": None,
        "max_model_len": state.llm.max_model_len,
    }
