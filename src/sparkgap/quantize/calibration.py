"""What the inputs of a network's products look like on sample text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparkgap.catalog.weights import WeightSource
from sparkgap.engine.scoring import hidden_states
from sparkgap.errors import CheckpointError
from sparkgap.models.decoder import Decoder
from sparkgap.models.loading import load_target
from sparkgap.ops import LinearWeight, NativeKernels
from sparkgap.ops.w8a8 import LARGEST

_BINS_PER_OCTAVE = 16
_LOWEST_OCTAVE, _HIGHEST_OCTAVE = -40, 40
_NUM_BINS = (_HIGHEST_OCTAVE - _LOWEST_OCTAVE) * _BINS_PER_OCTAVE


@dataclass
class InputStatistics:
    """Magnitudes of one product's inputs.

    Attributes:
        channels: float32 `[in_features]`, the largest of each.
        counts: float64 `[bins]`, how many lie in each bin; bins are spaced evenly on a logarithmic scale.
    """

    channels: Tensor
    counts: Tensor = field(default_factory=lambda: torch.zeros(_NUM_BINS, dtype=torch.float64))

    def add(self, x: Tensor) -> None:
        """Count the inputs `[rows, in_features]` of one pass."""
        magnitudes = x.detach().to(torch.float32).abs()
        torch.maximum(self.channels, magnitudes.amax(0), out=self.channels)
        bins = ((magnitudes.log2() - _LOWEST_OCTAVE) * _BINS_PER_OCTAVE).nan_to_num_().clamp_(0, _NUM_BINS - 1)
        self.counts += torch.bincount(bins.to(torch.int64).view(-1), minlength=_NUM_BINS).to(torch.float64)

    def scale(self, clip: bool) -> float:
        """One scale for all inputs: of the largest, or of where clipping gives the least mean squared error.

        An input below the clipping point is off by a rounding error, evenly distributed over a step; one above by what
        is cut off.
        """
        largest = float(self.channels.max())
        if largest == 0:
            return 1.0 / LARGEST
        if not clip:
            return largest / LARGEST
        centers = 2.0 ** ((torch.arange(_NUM_BINS, dtype=torch.float64) + 0.5) / _BINS_PER_OCTAVE + _LOWEST_OCTAVE)
        points = centers[self.counts > 0].clamp(max=largest)
        above = (centers[None] - points[:, None]).clamp(min=0)
        errors = (above**2 * self.counts).sum(1) + (centers <= points[:, None]).to(torch.float64) @ self.counts * (
            points / LARGEST
        ) ** 2 / 12
        return float(points[errors.argmin()]) / LARGEST


class _ObservingKernels(NativeKernels):
    """Float32 kernels that count the inputs of products."""

    def __init__(self, threads: int | None) -> None:
        super().__init__(threads)
        self.statistics: dict[int, InputStatistics] = {}

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """See `Kernels.linear`."""
        found = self.statistics.setdefault(id(weight), InputStatistics(torch.zeros(weight.in_features)))
        found.add(x)
        return super().linear(x, weight)


def observe(
    config: Mapping[str, Any],
    weights: WeightSource,
    windows: Sequence[list[int]],
    *,
    threads: int | None = None,
    advance: Callable[[int], None] = lambda number: None,
) -> dict[str, InputStatistics]:
    """Inputs of each layer's products, while the network reads texts.

    Args:
        config: keys of the checkpoint's `config.json`.
        weights: its tensors.
        windows: token ids of each text.
        threads: of the kernels; None takes the cores available to the process.
        advance: told how many texts are done.

    Returns:
        Statistics by module; modules that read the same input have the same.

    Raises:
        CheckpointError: the network gives infinities or NaN.
    """
    kernels = _ObservingKernels(threads)
    longest = max(map(len, windows))
    with torch.inference_mode():
        target = load_target(
            config,
            weights,
            kernels=kernels,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=longest,
        )
        for window in windows:
            hidden_states(target, window)
            advance(1)
    statistics = _by_module(target, kernels.statistics)
    for module, found in statistics.items():
        if not found.channels.isfinite().all():
            raise CheckpointError(f"the inputs of {module} are not finite on the calibration text: nothing to scale by")
    return statistics


def _by_module(target: Decoder, statistics: dict[int, InputStatistics]) -> dict[str, InputStatistics]:
    found: dict[str, InputStatistics] = {}
    for index, layer in enumerate(target.layers):
        prefix = f"model.layers.{index}"
        products = {
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): layer.qkv,
            ("self_attn.o_proj",): layer.output,
            ("mlp.gate_proj", "mlp.up_proj"): layer.gate_up,
            ("mlp.down_proj",): layer.down,
        }
        for modules, weight in products.items():
            found |= {f"{prefix}.{module}": statistics[id(weight)] for module in modules}
    return found
