"""The pool's last thread leaves for the host's turn and comes back, whatever the system stops meanwhile."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
COMPILER = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's threads and affinity"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
]
# The program is an ordinary one where the tests' own process is preloaded with a sanitizer.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that runs calls of its own on the pool, and stops threads of it by signals."""
    built = tmp_path_factory.mktemp("pool") / "pool_host_turn"
    sources = [Path(__file__).with_name("pool_host_turn.cpp")]
    sources += [NATIVE / name for name in ("pool.cpp", "placement.cpp", "trace.cpp", "cpu_info.cpp")]
    command = [str(COMPILER), "-std=c++20", "-O1", "-pthread", f"-I{NATIVE}", *map(str, sources), "-o", str(built)]
    subprocess.run(command, check=True, timeout=120, env=ENVIRONMENT)
    return built


def run(program: Path, *arguments: str) -> None:
    # A thread that is never called back is a hang.
    done = subprocess.run(
        [program, *arguments], timeout=60, capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_thread_that_sleeps_through_leaving_and_being_called_back(program: Path) -> None:
    run(program, "scripted")


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_threads_stopped_at_random(program: Path, threads: int, seed: int) -> None:
    run(program, "random", str(threads), str(seed))
