"""From a checked request to its answer, whole or as a stream of server-sent events."""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparkgap import __version__
from sparkgap.config import SamplingParams
from sparkgap.engine.outputs import RequestOutput
from sparkgap.engine.request import Request
from sparkgap.errors import SparkgapError
from sparkgap.server.errors import ApiError, encode_json, from_sparkgap, is_failure, json_response
from sparkgap.server.forms import Form, Head, Usage
from sparkgap.server.logs import RequestLog, write_failure
from sparkgap.server.metrics import ServerMetrics
from sparkgap.server.state import ServerState


class Answering:
    """One request's answer.

    Args:
        state: the server's.
        metrics: told of times and tokens.
        log: of the request.
        form: how choices are written.
        id_prefix: of the answer's id.
    """

    def __init__(
        self, state: ServerState, metrics: ServerMetrics, log: RequestLog, form: Form, *, id_prefix: str
    ) -> None:
        self._state = state
        self._metrics = metrics
        self._log = log
        self._form = form
        self._head = Head(
            f"{id_prefix}-{secrets.token_hex(12)}", int(time.time()), state.model_name, fingerprint(state)
        )
        self._usage = Usage()

    async def respond(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        stream: bool = False,
        wants_usage: bool = False,
    ) -> Response:
        """The response.

        Args:
            prompts: token ids of each prompt, of lengths that fit.
            params: for all of them.
            stream: send pieces as they come.
            wants_usage: end a stream with the numbers of tokens.

        Raises:
            ApiError: the request is refused, or failed before anything of a stream was sent.
            SparkgapError: the same.
        """
        self._log.fields |= {"stream": stream, "n": params.n * len(prompts)}
        requests = [
            await self._state.llm.prepare(
                prompt, params, request_id=f"{self._head.id}-{number}", output_kind="delta" if stream else "final"
            )
            for number, prompt in enumerate(prompts)
        ]
        self._usage.prompt_tokens = sum(map(len, prompts))
        self._log.fields["prompt_tokens"] = self._usage.prompt_tokens
        outputs = self._outputs(requests)
        numbers = {request.request_id: number for number, request in enumerate(requests)}
        if not stream:
            return await self._whole(outputs, numbers, params)
        # The first output decides whether there is an answer or an error, so it comes before the status.
        first = await anext(outputs)
        return EventStream(self._events(first, outputs, numbers, params.n, wants_usage))

    async def _outputs(self, requests: Sequence[Request]) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of all requests; ends them when it is closed, and when their time is over."""
        state, timeout_s = self._state, self._state.settings.request_timeout_s
        unfinished = {request.request_id: request.params.n for request in requests}
        last_s: dict[str, float] = {}
        state.check_capacity(sum(unfinished.values()))
        running = state.llm.start(*requests)
        timer = None
        if timeout_s is not None:
            left_s = self._log.started_s + timeout_s - time.perf_counter()
            timer = asyncio.get_running_loop().call_later(left_s, running.put, _overdue(timeout_s))
        try:
            async for output in running:
                self._observe(output, last_s)
                if output.finished:
                    del unfinished[output.request_id]
                yield output
        except SparkgapError:
            self._metrics.failed()
            unfinished.clear()
            raise
        finally:
            running.close()
            if timer is not None:
                timer.cancel()
            if unfinished:
                self._metrics.aborted(sum(unfinished.values()))

    def _observe(self, output: RequestOutput, last_s: dict[str, float]) -> None:
        now_s, started_s = time.perf_counter(), self._log.started_s
        metrics, before_s = output.metrics, last_s.get(output.request_id)
        last_s[output.request_id] = now_s
        if before_s is not None:
            self._metrics.gap(now_s - before_s)
        else:
            # An answer that comes at once, as a whole, has its first token's time in its metrics.
            ttft_s = now_s - started_s if metrics is None else (metrics.ttft_ms or 0.0) / 1000
            self._metrics.first_token(ttft_s)
            self._log.fields.setdefault("ttft_ms", round(ttft_s * 1000, 1))
        if metrics is None:
            return
        reasons = [completion.finish_reason or "abort" for completion in output.outputs]
        self._usage.completion_tokens += metrics.completion_tokens
        self._usage.cached_tokens += metrics.num_cached_tokens
        self._log.fields["completion_tokens"] = self._usage.completion_tokens
        self._log.fields["finish_reason"] = reasons[0]
        if metrics.draft_rounds:
            self._log.fields["accepted_per_round"] = round(metrics.accepted_per_round or 0.0, 2)
        self._metrics.finished(metrics, reasons, now_s - started_s)
        self._state.note_latency(now_s - started_s)

    async def _whole(
        self, outputs: AsyncGenerator[RequestOutput, None], numbers: dict[str, int], params: SamplingParams
    ) -> Response:
        choices: dict[int, dict[str, Any]] = {}
        async for output in outputs:
            self._form.note_prompt(numbers[output.request_id], output)
            for completion in output.outputs:
                index = numbers[output.request_id] * params.n + completion.index
                choices[index] = self._form.choice(index, completion)
        answer = self._head.object(self._form.kind, [choices[index] for index in sorted(choices)])
        self._note_text(choices.values())
        return json_response({**answer, "usage": self._usage.report()})

    async def _events(
        self,
        first: RequestOutput,
        outputs: AsyncGenerator[RequestOutput, None],
        numbers: dict[str, int],
        n: int,
        wants_usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events of a stream; what fails now is an event too."""
        head, form = self._head, self._form
        usage: dict[str, Any] = {"usage": None} if wants_usage else {}
        opened: set[int] = set()

        def events(output: RequestOutput) -> bytes:
            choices: list[dict[str, Any]] = []
            form.note_prompt(numbers[output.request_id], output)
            for completion in output.outputs:
                index = numbers[output.request_id] * n + completion.index
                if index not in opened:
                    opened.add(index)
                    choices += form.openings(index)
                piece = form.piece(index, completion)
                if piece is not None:
                    choices.append(piece)
            self._note_text(choices)
            return b"".join(_event({**head.object(form.chunk_kind, [choice]), **usage}) for choice in choices)

        try:
            yield events(first)
            async for output in outputs:
                if written := events(output):
                    yield written
            if wants_usage:
                yield _event({**head.object(form.chunk_kind, []), "usage": self._usage.report()})
        except ApiError as error:
            self._log.refused(error)
            yield _event(error.body())
        except SparkgapError as error:
            if is_failure(error):
                write_failure("a request failed", error, request_id=self._log.request_id)
            told = from_sparkgap(error)
            self._log.refused(told)
            yield _event(told.body())
        finally:
            await outputs.aclose()
        yield b"data: [DONE]\n\n"

    def _note_text(self, choices: Any) -> None:
        """Write the answer to the log, if that is wanted."""
        if not self._state.settings.log_prompts:
            return
        for choice in choices:
            written = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            name = f"answer_{choice['index']}"
            self._log.fields[name] = self._log.fields.get(name, "") + written


class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: each already in the wire format; closed when the response is over.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # A buffering proxy would keep tokens back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=self.media_type)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


def fingerprint(state: ServerState) -> str:
    """A word that changes when the model, its precision or the version does."""
    config = state.llm.config
    facts = [__version__, config.model, config.dtype, config.quantization, config.device]
    return f"fp_{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


def _overdue(timeout_s: float) -> ApiError:
    return ApiError(
        504, f"the request was not finished within {timeout_s:g} s", type="server_error", code="request_timeout"
    )
