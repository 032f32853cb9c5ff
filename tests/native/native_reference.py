"""What the native kernels must give, in plain torch."""

import torch
from torch import Tensor


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `x` as integers in -127 ... 127 (kept in float64) and their float32 scales."""
    most = x.float().abs().amax(1)
    inverse = torch.where(most > 0, torch.tensor(127.0) / most, torch.tensor(0.0))
    return (x.float() * inverse[:, None]).round().double(), most / 127


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.float().abs().amax(1) / 127
    safe = torch.where(scales > 0, scales, torch.tensor(1.0))
    return (weight.float() / safe[:, None]).round().clamp(-127, 127).double(), scales


def linear_w8a8(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same integers and the same float operations as the kernel: equal bits."""
    q, row_scales = quantize(x)
    w, channel_scales = quantize_weight(weight)
    y = (q @ w.T).float() * (row_scales[:, None] * channel_scales)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def attention(
    queries: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    visible: list[Tensor],
    scale: float,
) -> Tensor:
    """Attention of each row over its own keys, in float64.

    Args:
        queries: `[rows, heads, head_dim]`.
        keys, values: for each row `[length, kv_heads, head_dim]`.
        visible: for each row bool `[length]`.
        scale: multiplies the dot products.
    """
    rows = []
    for query, key, value, seen in zip(queries, keys, values, visible, strict=True):
        group = query.shape[0] // key.shape[1]
        k = key[seen].double().repeat_interleave(group, 1)
        v = value[seen].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,lhd->hl", query.double(), k) * scale
        rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v))
    return torch.stack(rows)
