"""What the machine lends this process: cores and memory."""

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def usable_cores() -> int:
    """Cores that this process may run on: its CPU affinity, within a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(int(quota[0]) // int(quota[1]), 1))
    return cores


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
