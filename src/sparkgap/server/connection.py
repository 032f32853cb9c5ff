"""One client's connection, with limits on what an idle or slow one can hold."""

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState as UvicornState

from sparkgap.server.errors import ApiError, encode_json, unavailable
from sparkgap.server.settings import ServerSettings


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with time limits: on the head of a request, on what is sent after a response, and on a client
    that takes nothing of what waits for it.

    `scope["sparkgap.abort"]` of a request breaks the connection at once.

    Args:
        settings: `read_timeout_s`, `write_timeout_s` and `max_connections` are read.
        config, server_state, app_state, _loop: uvicorn's.
    """

    def __init__(
        self,
        settings: ServerSettings,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._settings = settings
        self._app = self.app
        self.app = self._serve
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            error = unavailable("too many open connections", "too_many_connections", retry_after_s=5)
            transport.write(_raw_response(error))
            transport.close()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        _cancel(self._reading)
        _cancel(self._writing)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has been received."""
        before = self.cycle
        try:
            super().handle_events()
        except h11.LocalProtocolError:
            # Nonsense came in the middle of a response, which can get no second one.
            self.transport.abort()
        if self.cycle is not before:
            _cancel(self._reading)

    def on_response_complete(self) -> None:
        """A response has been sent."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        self.transport.write(_raw_response(ApiError(400, msg, code="invalid_http")))
        self.transport.close()

    def pause_writing(self) -> None:
        """The client takes less than there is to send."""
        super().pause_writing()
        self._writing = self.loop.call_later(self._settings.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has taken some of it."""
        super().resume_writing()
        _cancel(self._writing)

    def _wait_for_head(self) -> None:
        _cancel(self._reading)
        self._reading = self.loop.call_later(self._settings.read_timeout_s, self.transport.abort)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        scope["sparkgap.abort"] = self.transport.abort
        await self._app(scope, receive, send)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _raw_response(error: ApiError) -> bytes:
    body = encode_json(error.body())
    lines = [f"HTTP/1.1 {error.status} Refused", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in error.headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body
