"""What the commands print: answers and reports on standard output, everything else on standard error."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from sparkgap.errors import OutputError


def stderr_console() -> Console:
    """A console on standard error that changes nothing in the text it is given."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_error(message: str) -> None:
    """One line, whatever line breaks the message holds; nothing where standard error is closed."""
    if sys.stderr is not None:
        print(f"sparkgap: error: {' '.join(message.split())}", file=sys.stderr)


def print_note(message: str) -> None:
    """A line beside the answer, dim on a terminal."""
    stderr_console().print(message, style="dim")


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line. JSON has no NaN or infinity: such a value raises ValueError."""
    write_text(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(text: str) -> None:
    """A piece of an answer, shown at once.

    Raises:
        OutputError: it cannot be written; a reader that went away is a BrokenPipeError.
    """
    if sys.stdout is None:
        raise OutputError("standard output is closed; give it a place to write to")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror}; check its disk") from error


def use_utf8_output() -> None:
    """Write UTF-8 whatever the locale: model text holds any character, and half an answer helps nobody."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace")


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner on standard error while something is prepared; nothing when it is not a terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield


def format_bytes(size: float) -> str:
    """A size in binary units: `98.4 MiB`."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


class DownloadProgress:
    """A `ProgressReporter` on standard error: bars on a terminal, else one line a download."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def start(self, description: str, total_bytes: int | None) -> None:
        """A transfer begins; `total_bytes` is None while its size is unknown."""
        if not self._console.is_terminal:
            size = "" if total_bytes is None else f", {format_bytes(total_bytes)}"
            self.log(f"downloading {description}{size}")
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=self._console)
        self._bar.start()
        self._task = self._bar.add_task(description, total=total_bytes)

    def update(self, done_bytes: int) -> None:
        """Bytes of the current transfer that are on disk so far."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done_bytes)

    def finish(self) -> None:
        """The current transfer ended, well or not."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def log(self, message: str) -> None:
        """One line worth telling a user."""
        self._console.print(f"sparkgap: {message}")
