"""The machine a bench runs on: its names, and how fast it reads memory."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparkgap import __version__
from sparkgap.device.host import usable_cores

READ_BUFFER_BYTES = 512 * 2**20
"""A buffer well beyond the last cache that a few cores share."""

_CPUINFO = Path("/proc/cpuinfo")


def machine_facts() -> dict[str, Any]:
    """Processor, cores, versions and the load average of the last minute (None where the system has none)."""
    return {
        "cpu": cpu_name(),
        "cores": {"usable": usable_cores(), "total": os.cpu_count()},
        "platform": f"{platform.system()} {platform.machine()}",
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": {"sparkgap": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [
        value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == "model name"
    ]
    return names[0] if names else platform.processor() or platform.machine()


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch compute with `number` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class MemoryReader:
    """Measures how fast a device reads its memory: torch's sum of one large int64 buffer, front to back.

    The sum does one addition for eight bytes, far less than a core can do in the time the bytes take to arrive.

    Args:
        device: whose memory is read.
        threads: of the CPU that read it, each a part of its own.
        buffer_bytes: size of the buffer, a multiple of 8; `READ_BUFFER_BYTES` unless the caches are larger still.

    Attributes:
        buffer_bytes: read by each measurement.
    """

    def __init__(self, device: torch.device, threads: int, buffer_bytes: int) -> None:
        self._buffer = torch.ones(buffer_bytes // 8, dtype=torch.int64, device=device)
        self._threads = threads
        self.buffer_bytes = self._buffer.nbytes

    def bytes_per_s(self) -> float:
        """Bandwidth of one pass over the buffer."""
        with torch_threads(self._threads):
            # Threads start with the first operation that uses them.
            self._buffer[: 2**17].sum().item()
            start_s = time.perf_counter()
            self._buffer.sum().item()
            return self.buffer_bytes / (time.perf_counter() - start_s)
