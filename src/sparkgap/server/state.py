"""The server's state: its model, whether it serves, and who may begin."""

import asyncio
import math
import time
from dataclasses import dataclass
from enum import Enum

from sparkgap.async_llm import AsyncLLM
from sparkgap.server.errors import ApiError, queue_full, unavailable
from sparkgap.server.settings import ServerSettings

_LONGEST_RETRY_AFTER_S = 60
_WEIGHT_OF_NEWEST = 0.1


class Phase(Enum):
    """What the server does with requests: only a ready one serves them."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True)
class Health:
    """What `/health` tells.

    Attributes:
        healthy: whether requests can be expected to be served.
        status: one word.
        detail: for people.
    """

    healthy: bool
    status: str
    detail: str


class ServerState:
    """What all requests share. Used in the event loop's thread only.

    Attributes:
        settings: how the server serves.
        phase: see `Phase`.
        created: Unix time in seconds at which the model was ready.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.phase = Phase.LOADING
        self.created = int(time.time())
        self._llm: AsyncLLM | None = None
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_latency_s = 1.0

    @property
    def llm(self) -> AsyncLLM:
        """The model.

        Raises:
            ApiError: it is not loaded yet.
        """
        if self._llm is None:
            raise unavailable("the model is being loaded; try again soon", "loading", retry_after_s=5)
        return self._llm

    @property
    def model_name(self) -> str:
        """The model's name in requests and answers."""
        return self.settings.served_model_name or self.llm.config.model

    @property
    def is_loaded(self) -> bool:
        """Whether there is a model."""
        return self._llm is not None

    def ready(self, llm: AsyncLLM) -> None:
        """The model is loaded, and everything is captured."""
        self._llm = llm
        self.created = int(time.time())
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.phase = Phase.DRAINING

    def health(self) -> Health:
        """Whether requests can be expected to be served."""
        if self.phase is Phase.DRAINING:
            return Health(False, "draining", "the server is shutting down")
        if self._llm is None:
            return Health(False, "loading", "the model is being loaded")
        if self._llm.error is not None:
            return Health(False, "failed", str(self._llm.error))
        stalled_s = self._llm.stalled_for_s()
        if stalled_s > self.settings.stall_timeout_s:
            return Health(False, "stalled", f"requests are running and no token has come for {stalled_s:.0f} s")
        return Health(True, "ok", "")

    def begin(self) -> None:
        """A request of an API endpoint has come in; each call is followed by one of `end`."""
        self._num_in_flight += 1
        self._idle.clear()

    def end(self) -> None:
        """Its response has been sent, or it is over for another reason."""
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Wait until no request of an API endpoint is left."""
        await self._idle.wait()

    def check_model(self, name: str | None) -> None:
        """Check that a request asks for the model that is served.

        Raises:
            ApiError: it asks for another one.
        """
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"The model `{name}` does not exist; this server has `{self.model_name}`",
                param="model",
                code="model_not_found",
            )

    def check_capacity(self, num_sequences: int) -> None:
        """Check that so many more sequences may run or wait.

        Raises:
            ApiError: they never may (400), or not now (429, with the seconds after which to try again).
        """
        running, waiting = self.llm.config.max_num_seqs, self.settings.max_queued_seqs
        if num_sequences > running + waiting:
            raise ApiError(
                400,
                f"the request asks for {num_sequences} completions, and this server takes {running + waiting} at once",
                code="too_many_completions",
            )
        unfinished = self.llm.num_unfinished_seqs
        if unfinished + num_sequences > running + waiting:
            wait_s = math.ceil(self._mean_latency_s * max(unfinished / running - 1, 0.5))
            retry_after_s = min(max(wait_s, 1), _LONGEST_RETRY_AFTER_S)
            message = f"the queue is full: {unfinished} sequences run or wait; try again in {retry_after_s} s"
            raise queue_full(message, retry_after_s)

    def note_latency(self, latency_s: float) -> None:
        """A request took so long; the time to try again is guessed from it."""
        self._mean_latency_s += _WEIGHT_OF_NEWEST * (latency_s - self._mean_latency_s)
