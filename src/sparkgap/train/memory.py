"""How much memory training takes, and how the C library hands it out on CPUs."""

import ctypes
import os
import sys

import torch

from sparkgap.errors import ConfigError
from sparkgap.models.config import ModelConfig
from sparkgap.train.config import ConversationConfig

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST_MMAP_THRESHOLD = 2**25
"""glibc refuses more."""


def keep_freed_memory() -> None:
    """Let the C library keep freed tensors' memory for the next ones instead of returning it to the system.

    By default glibc maps each large allocation anew, and the kernel zeroes its pages again: a good part of a
    training step on CPUs. Does nothing where there is no glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 2**26)
        # One arena for all threads: the others are limited to 64 MiB and return their memory.
        mallopt(_M_ARENA_MAX, 1)


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where the system does not tell."""
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable_bytes()
    except (ValueError, OSError):
        return None


def _reclaimable_bytes() -> int:
    """Page cache of a Linux system."""
    if not os.path.exists("/proc/meminfo"):
        return 0
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in file)}
    return max(sizes.get("MemAvailable", 0) - sizes.get("MemFree", 0), 0)


def check_memory(model: ModelConfig, config: ConversationConfig, workers: int, device: torch.device) -> None:
    """Refuse to start what the memory cannot hold: KV of all lanes, and their captured states and logits.

    Raises:
        ConfigError: naming the memory needed and the memory there is.
    """
    kv = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim * config.lanes * config.max_positions
    captured = 2 * 5 * model.hidden_size * config.lanes * config.max_positions
    logits = 3 * 4 * model.vocab_size * config.lanes
    needed = workers * (kv + captured + logits)
    free = available_bytes(device)
    if free is not None and needed > free:
        raise ConfigError(
            f"{workers} workers with {config.lanes} lanes of {config.max_positions} positions need about "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; lower --lanes, --max-positions or "
            "--workers"
        )
