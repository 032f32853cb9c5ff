"""One streamed request to a server with OpenAI's interface, with the time of each piece of its answer."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import httpx

from sparkgap.bench.serving.workload import LoadRequest
from sparkgap.errors import ServerError

Endpoint = Literal["chat", "completions"]
"""Which of OpenAI's two interfaces is asked."""

_PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class ServerAddress:
    """A server, and how it is asked.

    Attributes:
        base_url: without `/v1`, such as `http://127.0.0.1:8000`.
        api_key: sent as a bearer token; None sends none.
        timeout_s: longest wait for a connection, and for the next piece of an answer.
    """

    base_url: str
    api_key: str | None = None
    timeout_s: float = 600.0

    def client(self) -> httpx.AsyncClient:
        """A client that opens as many connections as are asked for."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.base_url, headers=headers, timeout=self.timeout_s, limits=limits, trust_env=False
        )


@dataclass
class Answer:
    """What became of one request. Times are `time.perf_counter()`.

    Attributes:
        arrived_s: when the request was to be sent.
        piece_times_s: when each piece with text came.
        ended_s: when the answer was complete, or failed.
        prompt_tokens, completion_tokens: as the server counts; None where it does not.
        error: kind of failure, None for an answer that is complete.
        detail: what the failure said.
    """

    arrived_s: float
    piece_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    detail: str = ""

    @property
    def output_tokens(self) -> int:
        """Output tokens; pieces, where the server counts no tokens."""
        return len(self.piece_times_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first piece."""
        return self.piece_times_s[0] - self.arrived_s if self.piece_times_s else None

    @property
    def latency_s(self) -> float:
        """Time from arrival to the last piece."""
        return (self.piece_times_s[-1] if self.piece_times_s else self.ended_s) - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """(latency - time to first token) / (output tokens - 1); None below two tokens."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces. A piece of a speculating server has several tokens."""
        return [after - before for before, after in pairwise(self.piece_times_s)]


@dataclass(frozen=True)
class Question:
    """What all requests have in common.

    Attributes:
        model: named in the requests.
        endpoint: which interface.
        extra: further fields of the body, such as `temperature`; they win.
    """

    model: str
    endpoint: Endpoint
    extra: Mapping[str, Any]

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """The JSON body of a request."""
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if self.endpoint == "chat":
            prompt = {"messages": [{"role": "user", "content": request.prompt}]}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **prompt, "max_tokens": request.max_tokens, **stream, **self.extra}


async def ask(client: httpx.AsyncClient, question: Question, request: LoadRequest, arrived_s: float) -> Answer:
    """Send a request and read its answer to the end. A failure is part of the answer and raises nothing."""
    answer = Answer(arrived_s)
    try:
        async with client.stream("POST", _PATHS[question.endpoint], json=question.body(request)) as response:
            if response.status_code == httpx.codes.OK:
                await _read(response, answer)
            else:
                answer.error = f"status {response.status_code}"
                answer.detail = _message(await response.aread())
    except httpx.TimeoutException as error:
        _fail(answer, "timeout", error)
    except httpx.ConnectError as error:
        _fail(answer, "no connection", error)
    except (httpx.TransportError, httpx.StreamError) as error:
        _fail(answer, "connection lost", error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # Whatever a server sends that is no event of this interface.
        _fail(answer, "malformed answer", error)
    answer.ended_s = time.perf_counter()
    return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    is_done = has_end = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            is_done = True
            continue
        now_s = time.perf_counter()
        event = json.loads(data)
        if event.get("error") is not None:
            answer.error, answer.detail = "error in the stream", _message(data.encode())
            return
        for choice in event.get("choices") or ():
            if _text(choice):
                answer.piece_times_s.append(now_s)
            has_end = has_end or choice.get("finish_reason") is not None
        if event.get("usage"):
            answer.prompt_tokens = int(event["usage"]["prompt_tokens"])
            answer.completion_tokens = int(event["usage"]["completion_tokens"])
    if not (is_done or has_end):
        answer.error, answer.detail = "connection lost", "the stream ended in the middle of the answer"


def _text(choice: Mapping[str, Any]) -> str:
    if "delta" in choice:
        delta = choice["delta"] or {}
        return delta.get("content") or delta.get("reasoning_content") or ""
    return choice.get("text") or ""


def _message(body: bytes) -> str:
    """What an error body says, in one short line."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace")
    return " ".join(text.split())[:200]


def _fail(answer: Answer, kind: str, error: Exception) -> None:
    answer.error, answer.detail = kind, f"{type(error).__name__}: {error}".removesuffix(": ")


async def first_model(client: httpx.AsyncClient) -> str:
    """The model that a server names first.

    Raises:
        ServerError: no server answers, or it names no model.
    """
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerError(
            f"no server answers at {client.base_url}: {type(error).__name__}: {error}; start one (sparkgap serve), or "
            "name another with --base-url"
        ) from error
    if response.status_code != httpx.codes.OK:
        raise ServerError(
            f"{response.url} answers with status {response.status_code}: {_message(response.content)}; "
            "check the URL and the API key, or name the model"
        )
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{response.url} names no model; name one with --model") from error
