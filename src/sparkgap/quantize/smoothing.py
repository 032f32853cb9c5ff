"""Moving the spread of activations into weights, where it quantizes better, without changing what a network computes.

Dividing an input channel of a product by a factor and multiplying the weight's column by it leaves the product as it
is. The division is folded into what makes the input: the norm before it, the value projection, the up projection. The
factors are those of SmoothQuant (arXiv 2211.10438): of channel j `max|X_j|^a / max|W_j|^(1 - a)`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.catalog.weights import WeightSource, read_weight
from sparkgap.models.config import ModelConfig
from sparkgap.quantize.calibration import InputStatistics

_SMALLEST = 1e-5


@dataclass(frozen=True)
class SmoothedWeights:
    """A `WeightSource` with factors folded in.

    Attributes:
        source: the original.
        rows: factors of a tensor's first dimension, by its name.
        columns: factors of a matrix' second dimension, by its name.
    """

    source: WeightSource
    rows: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]

    def names(self) -> Iterable[str]:
        """See `WeightSource.names`."""
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self.source.shape(name)

    def get(self, name: str) -> Tensor:
        """See `WeightSource.get`; float32 where there are factors."""
        if name not in self.rows and name not in self.columns:
            return self.source.get(name)
        tensor = read_weight(self.source, name).to(torch.float32)
        if name in self.rows:
            factors = self.rows[name]
            tensor = tensor * (factors if tensor.dim() == 1 else factors[:, None])
        return tensor * self.columns[name] if name in self.columns else tensor


def smoothed(
    config: ModelConfig, weights: WeightSource, statistics: Mapping[str, InputStatistics], strength: float
) -> SmoothedWeights:
    """`weights` with smoothing folded in.

    Args:
        config: the network.
        weights: its tensors.
        statistics: of the inputs of its products, by module.
        strength: `a` above, from 0 to 1.
    """
    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    group = config.num_heads // config.num_kv_heads
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = {
            f"{prefix}.input_layernorm.weight": [f"{attention}.{name}_proj" for name in "qkv"],
            f"{prefix}.post_attention_layernorm.weight": [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
        }
        for norm, modules in norms.items():
            most = torch.stack([_columns(weights, module) for module in modules]).amax(0)
            factors = _factors(statistics[modules[0]].channels, most, strength)
            rows[norm] = 1 / factors
            columns |= {f"{module}.weight": factors for module in modules}

        # Query heads of a group read the same values, so they share factors.
        def by_value(x: Tensor) -> Tensor:
            return x.view(config.num_kv_heads, group, config.head_dim).amax(1).flatten()

        output, values = f"{attention}.o_proj", f"{attention}.v_proj"
        factors = _factors(by_value(statistics[output].channels), by_value(_columns(weights, output)), strength)
        by_head = factors.view(config.num_kv_heads, 1, config.head_dim)
        columns[f"{output}.weight"] = by_head.expand(-1, group, -1).flatten()
        down, up = f"{mlp}.down_proj", f"{mlp}.up_proj"
        rows |= _row_factors(weights, values, 1 / factors)
        factors = _factors(statistics[down].channels, _columns(weights, down), strength)
        columns[f"{down}.weight"] = factors
        rows |= _row_factors(weights, up, 1 / factors)
    return SmoothedWeights(weights, rows, columns)


def _columns(weights: WeightSource, module: str) -> Tensor:
    """The largest magnitude of each input channel's weights."""
    return read_weight(weights, f"{module}.weight").to(torch.float32).abs().amax(0)


def _factors(activations: Tensor, weights: Tensor, strength: float) -> Tensor:
    factors = activations.clamp(min=_SMALLEST) ** strength / weights.clamp(min=_SMALLEST) ** (1 - strength)
    # A channel that is always zero, or that nothing reads, stays as it is.
    return torch.where((activations > 0) & (weights > 0), factors, 1.0).clamp(_SMALLEST, 1 / _SMALLEST)


def _row_factors(weights: WeightSource, module: str, factors: Tensor) -> dict[str, Tensor]:
    names = set(weights.names())
    return {name: factors for name in (f"{module}.weight", f"{module}.bias") if name in names}
