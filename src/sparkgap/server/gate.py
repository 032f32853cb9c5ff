"""What every request passes before a route sees it, and every response after."""

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparkgap.server.errors import ApiError, internal_error, unavailable
from sparkgap.server.logs import RequestLog, write_failure
from sparkgap.server.metrics import ServerMetrics
from sparkgap.server.state import Phase, ServerState

OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/openapi.json"})
"""Served without an API key, and while the model is loaded or the server drains."""

CLIENT_CLOSED_REQUEST = 499
"""Status in the log when the client went away (nginx's)."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gate:
    """An ASGI application around another one.

    It names the request, checks the API key, reads the body within its limits, ends the request when the client goes
    away, turns whatever is raised into an error response, and writes the log line.

    Args:
        app: the routes.
        state: the server's.
        metrics: counts responses.
    """

    def __init__(self, app: ASGIApp, state: ServerState, metrics: ServerMetrics) -> None:
        self._app = app
        self._state = state
        self._metrics = metrics
        key = state.settings.api_key
        self._key_digest = None if key is None else hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises nothing."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        log = scope["sparkgap.log"] = RequestLog(_request_id(headers.get("x-request-id")))
        exchange = _Exchange(receive, send, log.request_id)
        is_open = scope["path"] in OPEN_PATHS
        if not is_open:
            self._state.begin()
        try:
            await self._serve(scope, headers, exchange, is_open)
        finally:
            if not is_open:
                self._state.end()
            client = scope["client"][0] if scope["client"] else ""
            self._metrics.responded(scope["method"] if log.handler != "none" else "", log.handler, exchange.status)
            if not is_open or exchange.status == 500:
                log.write(method=scope["method"], path=scope["path"], status=exchange.status, client=client)

    async def _serve(self, scope: Scope, headers: dict[str, str], exchange: "_Exchange", is_open: bool) -> None:
        try:
            if not is_open:
                self._check_key(headers.get("authorization", ""))
                self._check_phase()
                _check_content_type(scope["method"], headers)
            body = await self._read_body(headers, exchange)
            await _run_until_disconnect(self._app, scope, body, exchange)
        except ApiError as error:
            scope["sparkgap.log"].refused(error)
            await exchange.fail(error, scope)
        except Exception as error:  # noqa: BLE001 (no request may take the server down)
            write_failure("a request failed unexpectedly", error, request_id=exchange.request_id)
            await exchange.fail(internal_error(), scope)

    def _check_key(self, authorization: str) -> None:
        if self._key_digest is None:
            return
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # Digests have one length, so that the time tells nothing of the key's.
        if not hmac.compare_digest(digest, self._key_digest) or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_phase(self) -> None:
        if self._state.phase is Phase.DRAINING:
            error = unavailable("the server is shutting down", "shutting_down", retry_after_s=5)
            error.headers["Connection"] = "close"
            raise error

    async def _read_body(self, headers: dict[str, str], exchange: "_Exchange") -> bytes:
        limit, timeout_s = self._state.settings.max_body_bytes, self._state.settings.read_timeout_s
        too_large = ApiError(413, f"the request body is larger than {limit} bytes", code="body_too_large")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await exchange.receive()
                    if message["type"] == "http.disconnect":
                        exchange.status = CLIENT_CLOSED_REQUEST
                        raise ApiError(CLIENT_CLOSED_REQUEST, "the client went away", code="client_closed_request")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408,
                f"the request body did not come within {timeout_s:g} s",
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None


class _Exchange:
    """One request's way in and out.

    Attributes:
        request_id: sent with the response.
        status: of the response.
        is_started, is_complete: how far the response has been sent.
    """

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self.receive = receive
        self.request_id = request_id
        self.status = CLIENT_CLOSED_REQUEST
        self.is_started = False
        self.is_complete = False
        self._send = send

    async def send(self, message: Message) -> None:
        """Pass a message of the response on."""
        if message["type"] == "http.response.start":
            self.is_started = True
            self.status = message["status"]
            name = (b"x-request-id", self.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), name]}
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope) -> None:
        """Answer with an error; a response that has begun is broken off."""
        if self.is_complete:
            return
        if self.is_started or error.status == CLIENT_CLOSED_REQUEST:
            abort = scope.get("sparkgap.abort")
            if abort is not None:
                abort()
            return
        await error.response()(scope, self.receive, self.send)


async def _run_until_disconnect(app: ASGIApp, scope: Scope, body: bytes, exchange: _Exchange) -> None:
    """Run the application; cancel it when the client goes away."""
    task = asyncio.current_task()
    assert task is not None
    is_gone = False
    has_body_been_read = False
    never = asyncio.Event()

    async def receive() -> Message:
        nonlocal has_body_been_read
        if has_body_been_read:
            await never.wait()
        has_body_been_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def watch() -> None:
        nonlocal is_gone
        while (await exchange.receive())["type"] != "http.disconnect":
            pass
        # The server's protocol also reports the end of a complete response in this way.
        if not exchange.is_complete:
            is_gone = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await app(scope, receive, exchange.send)
    except asyncio.CancelledError:
        if not is_gone:
            raise
        task.uncancel()
        exchange.status = CLIENT_CLOSED_REQUEST
    finally:
        watcher.cancel()


def _check_content_type(method: str, headers: dict[str, str]) -> None:
    """Web pages can send other types to any server without asking it; JSON they cannot."""
    given = headers.get("content-type", "")
    media_type = given.split(";", 1)[0].strip().lower()
    if method == "POST" and media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, f"the content type must be application/json, got {given!r}", code="unsupported_media_type")


def _request_id(given: str | None) -> str:
    """The client's own id where it is a harmless word, else a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"


def allowed_origins(origins: Iterable[str]) -> list[str]:
    """Origins in the form that browsers send: without a slash at the end."""
    return [origin.rstrip("/") for origin in origins]
