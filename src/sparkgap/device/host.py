"""What the machine lends this process: memory, and cores by way of the native module."""

import os
from pathlib import Path

import torch

from sparkgap._native import usable_cores

__all__ = ["available_memory_bytes", "usable_cores"]

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_memory_bytes(device: torch.device) -> int:
    """Memory that new tensors on `device` may take: free or reclaimable, within a container's limit."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0])
    available = _available_host_bytes()
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(int(limit) - int(used), 0))
    return available


def _available_host_bytes() -> int:
    for line in _read(_MEMINFO).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    # Systems without /proc do not say what is available; half of what there is, is a guess on the safe side.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read(path: Path) -> str:
    """A system file's text, empty where the system has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
