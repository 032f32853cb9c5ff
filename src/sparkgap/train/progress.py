"""How training shows its progress: bars on a terminal, a line now and then elsewhere, and a log file."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_LINE_INTERVAL_S = 30.0


class Bar:
    """One piece of work. Safe to advance from several threads."""

    def __init__(self, name: str, total: int, unit: str, progress: "Progress") -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self._progress, self._lock = progress, threading.Lock()
        self._started = self._last_line = time.monotonic()
        self._initial = 0
        self._rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=progress.console,
            disable=not progress.console.is_terminal,
        )
        self._task = self._rich.add_task(name, total=total, note="")

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more are done."""
        with self._lock:
            self._show(self.done + count, note)

    def set(self, done: int, note: str = "") -> None:
        """`done` are done."""
        with self._lock:
            self._show(done, note)

    def expect(self, total: int) -> None:
        """The whole is `total` now; shown with the next advance."""
        with self._lock:
            self.total = total
            self._rich.update(self._task, total=total)

    def start_from(self, done: int) -> None:
        """`done` were done before, and do not count in the speed."""
        self._initial = done
        self.set(done)

    def _show(self, done: int, note: str) -> None:
        self.done = done
        self._rich.update(self._task, completed=done, note=note)
        now = time.monotonic()
        if not self._progress.console.is_terminal and now - self._last_line >= _LINE_INTERVAL_S:
            self._last_line = now
            speed = (done - self._initial) / (now - self._started)
            self._progress.log(f"{self.name}: {done} of {self.total} {self.unit}, {speed:.1f} a second {note}".rstrip())

    def __enter__(self) -> "Bar":
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()


class Progress:
    """Reports of one training run.

    Args:
        console: where bars and lines go.
        log_file: gets every line with its time; None for none.
    """

    def __init__(self, console: Console, log_file: Path | None = None) -> None:
        self.console = console
        self._log_file = log_file

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Bar]:
        """Show one piece of work of `total` `unit`s."""
        with Bar(name, total, unit, self) as bar:
            yield bar

    def log(self, message: str) -> None:
        """One line, on the console and in the log file."""
        self.console.print(message, highlight=False, markup=False)
        if self._log_file is not None:
            with self._log_file.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
