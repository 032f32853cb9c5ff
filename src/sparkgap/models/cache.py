"""Memory of the paged KV cache."""

import torch

from sparkgap.ops.kernels import KVCache


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
    return [
        KVCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(num_layers)
    ]
