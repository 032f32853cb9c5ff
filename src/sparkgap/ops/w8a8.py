"""W8A8 in plain torch: what int8 products mean, on every device. The oracle of the native kernels, to the bit.

int8 weights with a scale for each output channel, int8 activations with a scale for each row (dynamic) or one
calibrated scale (static), integer sums. Both are symmetric: zero is 0, the largest magnitude 127.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sparkgap.errors import CheckpointError
from sparkgap.ops.operands import LinearWeight, QuantizedWeight

Quantization = Literal["w8a8"]
"""How kernels quantize weights that come in floating point."""

LARGEST = 127.0
"""Largest magnitude of a quantized value."""

_EXACT_INPUTS = 1024
"""Products of so many int8 pairs add up exactly in float32, in any order: 1024 * 127 * 127 < 2^24."""


@dataclass(frozen=True)
class QuantizedLinearWeight(LinearWeight):
    """An int8 weight as the torch kernels hold it.

    Attributes:
        weight: int8 `[out_features, in_features]`.
        scales: float32 `[out_features]`.
        input_scale: of static activations; None where each row has its own.
    """

    scales: Tensor = field(kw_only=True)
    input_scale: float | None = field(kw_only=True, default=None)

    @property
    def nbytes(self) -> int:
        """See `LinearWeight.nbytes`."""
        return super().nbytes + self.scales.nbytes


def quantize_weight(weight: Tensor, input_scale: float | None = None) -> QuantizedWeight:
    """`weight` `[out_features, in_features]` as int8: scale = largest magnitude of the channel / 127.

    Raises:
        CheckpointError: the weight has infinities or NaN.
    """
    values = weight.detach().to(torch.float32)
    scales = _divide(values.abs().amax(1), LARGEST)
    if not scales.isfinite().all():
        raise CheckpointError(f"a weight of shape {list(weight.shape)} has infinities or NaN: it cannot be quantized")
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    quantized = (values / divisors[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return QuantizedWeight(quantized, scales, input_scale)


def equalize_columns(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` `[out_features, in_features]` with each column divided by its root mean square, and the divisors.

    A column of zeros is divided by 1. Both in float32.
    """
    values = weight.detach().to(torch.float32)
    sizes = values.square().mean(0).sqrt()
    sizes = torch.where(sizes > 0, sizes, torch.ones_like(sizes))
    return values / sizes, sizes


def quantize_rows(x: Tensor, input_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Rows of `x` `[rows, features]` as whole numbers in -127 ... 127, in float32, and the scale of each row.

    With `input_scale` values beyond 127 times it saturate, and a row with a NaN or an infinity has a NaN as its
    scale. Without, a row's scale is its largest magnitude / 127.
    """
    x = x.to(torch.float32)
    most = x.abs().amax(1)
    if input_scale is None:
        scales = _divide(most, LARGEST)
        factors = torch.where(most > 0, _divide(LARGEST, most), 0.0)
    else:
        # Rounded to float32 first, as a kernel holds it.
        scale = torch.tensor(input_scale, dtype=torch.float32, device=x.device)
        scales = torch.where(most.isfinite(), scale, torch.nan)
        factors = _divide(1.0, scale).expand(most.shape)
    return (x * factors[:, None]).clamp_(-LARGEST, LARGEST).round_(), scales


def linear_w8a8(x: Tensor, weight: QuantizedLinearWeight) -> Tensor:
    """`x` `[rows, in_features]` times an int8 weight, in `x`'s dtype."""
    factors = weight.multipliers
    quantized, row_scales = quantize_rows(x if factors is None else x * factors, weight.input_scale)
    total = torch.zeros(x.shape[0], weight.out_features, dtype=torch.int32, device=x.device)
    # A NaN's row has a NaN for its scale, whatever the integers are.
    quantized = quantized.nan_to_num_(0.0)
    for start in range(0, weight.in_features, _EXACT_INPUTS):
        part = slice(start, start + _EXACT_INPUTS)
        total += (quantized[:, part] @ weight.weight[:, part].to(torch.float32).T).to(torch.int32)
    y = total.to(torch.float32) * (row_scales[:, None] * weight.scales)
    return (y if weight.bias is None else y + weight.bias.to(torch.float32)).to(x.dtype)


def _divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """A correctly rounded quotient: with a number beside a tensor torch multiplies by a reciprocal."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    return torch.as_tensor(a, dtype=like.dtype, device=like.device) / torch.as_tensor(
        b, dtype=like.dtype, device=like.device
    ).expand(like.shape)
