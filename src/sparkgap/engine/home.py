"""The process that an engine lives in."""

import os

from sparkgap.errors import EngineClosedError


class HomeProcess:
    """Tells the process that an engine was made in from those that were forked from it.

    A child of a fork has copies of the engine and of its locks, as they were at that moment, but none of the threads
    that compute and that would release them.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the engine's process."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raise EngineClosedError in a process that was forked from the engine's."""
        if not self.is_here:
            raise EngineClosedError("the engine runs in the process that this one was forked from; load the model here")
