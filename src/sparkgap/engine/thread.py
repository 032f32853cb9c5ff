"""An engine that is stepped in a thread of its own, so that its owner never waits for a step."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress

from sparkgap.engine.engine import Engine
from sparkgap.engine.home import HomeProcess
from sparkgap.engine.outputs import RequestOutput
from sparkgap.engine.request import Request
from sparkgap.errors import EngineClosedError, EngineDeadError, SparkgapError

_logger = logging.getLogger(__name__)

_Command = Callable[[Engine], Seq[RequestOutput]]


class EngineThread:
    """Steps an engine while it has requests. All methods may be called from any thread, and none waits for a step.

    Args:
        engine: nobody else may use it, but for `make_request`.
        deliver: given the outputs of each step, in the engine's thread.
        refuse: given the id of a request that the engine does not take, and why, in the engine's thread.
        fail: told why, in the engine's thread, when the engine can go on no more.

    Attributes:
        error: why the engine stopped for good, None while it has not.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        deliver: Callable[[Seq[RequestOutput]], None],
        refuse: Callable[[str, SparkgapError], None],
        fail: Callable[[EngineDeadError], None],
    ) -> None:
        self.error: EngineDeadError | None = None
        self._engine = engine
        self._deliver = deliver
        self._refuse = refuse
        self._fail = fail
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._is_busy = False
        self._progress_s = time.monotonic()
        self._home = HomeProcess()
        # A daemon, so that a program which forgets to stop it can still end; see `stop`.
        self._thread = threading.Thread(target=self._run, name="sparkgap-engine", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """Queue a request that the engine made.

        Raises:
            EngineDeadError, EngineClosedError: the engine takes no requests any more.
        """

        def command(engine: Engine) -> Seq[RequestOutput]:
            try:
                engine.add(request)
            except SparkgapError as error:
                self._refuse(request.request_id, error)
            return ()

        self._send(command)

    def abort(self, request_id: str) -> None:
        """End a request, if it is there, after the step that is being computed; its last output is delivered."""

        def command(engine: Engine) -> Seq[RequestOutput]:
            output = engine.abort(request_id)
            return () if output is None else (output,)

        # An engine that has stopped has ended all its requests.
        with suppress(EngineDeadError, EngineClosedError):
            self._send(command)

    def check_process(self) -> None:
        """Raise EngineClosedError in a process that was forked from the engine's: threads do not come along."""
        self._home.check()

    def stalled_for_s(self) -> float:
        """Seconds in which requests were there and no token was computed, of a prompt or an answer; 0 when idle."""
        is_busy = self._is_busy or bool(self._commands)
        return time.monotonic() - self._progress_s if is_busy else 0.0

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after the step that is being computed, and all requests with it.

        Returns:
            Whether it has ended; False when `timeout_s` passed before.
        """
        if not self._home.is_here:
            # Nothing runs in a forked process, and its copy of the lock may never be released.
            return True
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _send(self, command: _Command) -> None:
        self.check_process()
        with self._wake:
            if self.error is not None:
                raise self.error
            if self._is_stopping:
                raise EngineClosedError("the engine is shutting down and takes no requests")
            if not self._is_busy and not self._commands:
                self._progress_s = time.monotonic()
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        except BaseException as error:
            _logger.critical("the engine failed", exc_info=True)
            reason = " ".join(str(error).split())
            failure = EngineDeadError(f"the engine failed and must be restarted: {type(error).__name__}: {reason}")
            failure.__cause__ = error
            with self._wake:
                self.error = failure
                self._is_busy = False
                self._commands.clear()
            self._fail(failure)

    def _obey(self) -> bool:
        """Do what was asked for, waiting for it while there are no requests; False when the thread is to end."""
        with self._wake:
            self._is_busy = self._has_work()
            while not (self._commands or self._is_busy or self._is_stopping):
                self._wake.wait()
            if self._is_stopping:
                return False
            commands, self._commands = self._commands, deque()
            self._is_busy = True
        for command in commands:
            outputs = command(self._engine)
            if outputs:
                self._deliver(outputs)
        return True

    def _has_work(self) -> bool:
        return self._engine.has_unfinished_requests() or self._engine.has_rounds_in_flight()

    def _step(self) -> None:
        if not self._has_work():
            return
        before_s = self._engine.stats.last_progress_s
        outputs = self._engine.step()
        # An output without a token reports a failed request: that, too, is progress.
        if outputs or self._engine.stats.last_progress_s != before_s:
            self._progress_s = time.monotonic()
        if outputs:
            self._deliver(outputs)
