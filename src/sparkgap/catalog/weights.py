"""Where a model's tensors come from, whatever the file format."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from sparkgap.errors import CheckpointError, UnsupportedModelError


class WeightSource(Protocol):
    """Tensors of a checkpoint by their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`, ...).

    A source reads lazily from memory-mapped files: holding a source costs no copy of the model, and one tensor is
    materialized at a time. GGUF names and layouts (permuted query and key rows) are translated by the source.
    """

    def names(self) -> Iterable[str]:
        """All tensor names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape without reading it. Raises CheckpointError naming a missing tensor."""
        ...

    def get(self, name: str) -> Tensor:
        """A tensor, dequantized to float32 if quantized, else in its stored dtype; may be a read-only view of the
        mapped file. Raises CheckpointError naming a missing tensor."""
        ...


_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_weight(source: WeightSource, name: str) -> Tensor:
    """A tensor that a network multiplies with.

    Raises:
        CheckpointError: no such tensor.
        UnsupportedModelError: it is not stored in a plain floating-point dtype: integers and 8-bit floats mean
            something only with the scales of the quantization that made them.
    """
    tensor = source.get(name)
    if tensor.dtype not in _FLOATING:
        raise UnsupportedModelError(
            f"tensor {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, a quantization that is not "
            "supported; use the unquantized checkpoint or a GGUF file"
        )
    return tensor


def read_int8(source: WeightSource, name: str) -> Tensor:
    """The int8 values of a quantized product.

    Raises:
        CheckpointError: no such tensor, or it is of another dtype.
    """
    tensor = source.get(name)
    if tensor.dtype != torch.int8:
        raise CheckpointError(
            f"tensor {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, and config.json says that its "
            "weights are int8; quantize the model again"
        )
    return tensor
