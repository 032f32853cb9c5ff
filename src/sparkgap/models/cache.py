"""Memory of the paged KV cache."""

import math
import mmap

import torch
from torch import Tensor

from sparkgap.ops.operands import KVCache


def cache_block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in the caches of all layers, keys and values together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def allocate_caches(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[KVCache]:
    """One zeroed cache a layer, `[num_blocks, block_size, num_kv_heads, head_dim]` for keys and for values."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return [KVCache(_zeros(shape, dtype, device), _zeros(shape, dtype, device)) for _ in range(num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU straight from the system, where pages take memory and time only once they are written."""
    elements = math.prod(shape)
    if device.type != "cpu" or elements == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
