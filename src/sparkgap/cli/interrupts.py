"""Ctrl-C while modules are imported. Imports next to nothing itself, because it comes first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Within, Ctrl-C ends the process at once, as it ends programs that do nothing about it.

    Raised as an exception in the middle of an import it would show a traceback of somebody else's module, or be
    swallowed there, and the program would go on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
