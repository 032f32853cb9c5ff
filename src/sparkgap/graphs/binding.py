"""What a graph was captured over."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class TensorBinding(NamedTuple):
    """One tensor as a graph borrows it.

    Attributes:
        name: what the pass calls it.
        address: of its first element.
        shape, stride: in elements.
        dtype, device: of its elements.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        layout = f"{list(self.shape)} of stride {list(self.stride)}"
        return f"{self.name}: {dtype} {layout} at {self.address:#x} on {self.device}"


class Binding(NamedTuple):
    """The exact tensors of one pass. Two passes can share a graph only if their bindings are equal."""

    tensors: tuple[TensorBinding, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Binding":
        """The binding of named tensors, in their order."""
        return cls(
            tuple(
                TensorBinding(name, t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device)
                for name, t in tensors.items()
            )
        )

    def __str__(self) -> str:
        return "; ".join(map(str, self.tensors))
