"""The server as a process: its socket, its signals, loading, draining and its end."""

import asyncio
import functools
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from sparkgap.api import LLM
from sparkgap.async_llm import AsyncLLM
from sparkgap.server.app import create_app
from sparkgap.server.connection import GuardedProtocol
from sparkgap.server.listener import BACKLOG
from sparkgap.server.logs import configure_logging, write_event
from sparkgap.server.settings import ServerSettings
from sparkgap.server.state import ServerState

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CLOSING_S = 5.0


def serve(settings: ServerSettings, listener: socket.socket, load: Callable[[], LLM]) -> None:
    """Serve until a signal says to stop; requests that run then are finished. A second signal ends the process.

    Args:
        settings: how.
        listener: see `bind`; it is closed at the end.
        load: loads the model, in a thread of its own, while `/health` says so.

    Raises:
        SparkgapError: the model cannot be loaded.
    """

    def load_for_good() -> LLM:
        llm = load()
        # What loading made stays: the collector need not look at it again while requests are served.
        gc.collect()
        gc.freeze()
        return llm

    try:
        configure_logging(settings)
        _raise_file_limit()
        status = ServerProcess(settings, listener, load_for_good).serve()
    finally:
        listener.close()
    if status is not None:
        # A thread that loads or computes and cannot be stopped would disturb the interpreter's own end.
        logging.shutdown()
        os._exit(status)


class ServerProcess:
    """A server from its first to its last moment; it closes `listener`.

    Args:
        settings: how it serves.
        listener: see `bind`.
        load: loads the model.

    Attributes:
        listener: as given.
        state, server: made when it runs; `server` is uvicorn's.
    """

    def __init__(self, settings: ServerSettings, listener: socket.socket, load: Callable[[], LLM]) -> None:
        self.state: ServerState | None = None
        self.server: uvicorn.Server | None = None
        self._settings = settings
        self.listener = listener
        self._load = load
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked: asyncio.Event | None = None

    def serve(self) -> int | None:
        """Run, in an event loop of its own; see `run`."""
        # uvloop where it is installed, whose wake-ups take half of the time.
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            return runner.run(self.run())

    def stop(self) -> None:
        """Do what the first signal does; may be called from any thread while it runs."""
        if self._loop is not None and self._stop_asked is not None:
            with suppress(RuntimeError):  # the loop is closed: it has stopped
                self._loop.call_soon_threadsafe(self._stop_asked.set)

    async def run(self) -> int | None:
        """Load, serve, drain; the exit status where a thread is left that cannot be stopped."""
        loop = self._loop = asyncio.get_running_loop()
        state = self.state = ServerState(self._settings)
        stop_asked = self._stop_asked = asyncio.Event()
        server = self.server = _Server(_uvicorn_config(state))
        with _stop_signals(loop, stop_asked):
            serving = loop.create_task(server.serve([self.listener]))
            stopping = loop.create_task(stop_asked.wait())
            try:
                llm = await self._load_or_stop(stopping)
                if llm is None:
                    write_event(logging.INFO, "stopped while loading")
                    return 0
                self._become_ready(state, llm)
                await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
                await self._drain(state)
                # Requests that still run get an error to send.
                has_closed = await asyncio.to_thread(state.llm.close, _CLOSING_S)
            finally:
                stopping.cancel()
                server.should_exit = True
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(serving, _CLOSING_S)
        if not has_closed:
            write_event(logging.ERROR, "stopped, though a step was still being computed")
            return 1
        write_event(logging.INFO, "stopped")
        return None

    async def _load_or_stop(self, stopping: "asyncio.Task[bool]") -> LLM | None:
        """The model; None when a signal came first. Raises what loading raises."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[LLM] = loop.create_future()

        def settle(llm: LLM | None, error: BaseException | None) -> None:
            if loaded.done():
                return
            if llm is not None:
                loaded.set_result(llm)
            elif error is not None:
                loaded.set_exception(error)

        def load() -> None:
            llm, error = None, None
            try:
                llm = self._load()
            except BaseException as caught:  # noqa: BLE001 (raised in the event loop's thread)
                error = caught
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, llm, error)

        threading.Thread(target=load, name="sparkgap-load", daemon=True).start()
        await asyncio.wait((loaded, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            loaded.cancel()
            return None
        return loaded.result()

    def _become_ready(self, state: ServerState, llm: LLM) -> None:
        state.ready(AsyncLLM.from_llm(llm))
        host, port = self.listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        write_event(logging.INFO, "ready", url=url, model=state.model_name)
        if self._settings.api_key is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            write_event(logging.WARNING, "there is no --api-key: everybody who can reach this address may use it")

    async def _drain(self, state: ServerState) -> None:
        state.drain()
        write_event(logging.INFO, "draining", unfinished=state.llm.num_unfinished_seqs)
        try:
            await asyncio.wait_for(state.wait_until_idle(), self._settings.drain_timeout_s)
        except TimeoutError:
            write_event(logging.WARNING, "requests are given up", unfinished=state.llm.num_unfinished_seqs)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `ServerProcess`."""
        yield


def _uvicorn_config(state: ServerState) -> uvicorn.Config:
    config = uvicorn.Config(
        create_app(state),
        http=functools.partial(GuardedProtocol, state.settings),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        backlog=BACKLOG,
        timeout_keep_alive=max(int(state.settings.read_timeout_s), 1),
    )
    return config


@contextmanager
def _stop_signals(loop: asyncio.AbstractEventLoop, stop_asked: asyncio.Event) -> Iterator[None]:
    """The first signal sets `stop_asked`; a second one ends the process at once, whatever it is doing."""

    def on_first(number: signal.Signals) -> None:
        stop_asked.set()
        for other in _SIGNALS:
            loop.remove_signal_handler(other)
            signal.signal(other, signal.SIG_DFL)
        write_event(logging.INFO, "stopping", signal=number.name, hint="a second signal stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_first, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _raise_file_limit() -> None:
    """Let the process open as many connections as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
