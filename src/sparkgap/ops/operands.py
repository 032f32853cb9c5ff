"""What the verbs take beside tensors: caches, rows, and weights in the form of their kernels."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class KVCache:
    """One layer's paged keys and values.

    Attributes:
        keys, values: `[num_blocks, block_size, kv_heads, head_dim]`. Slot `s` is place `s % block_size` of block
            `s // block_size`.
    """

    keys: Tensor
    values: Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self.keys.shape[0]

    @property
    def block_size(self) -> int:
        """Positions in one block."""
        return self.keys.shape[1]


@dataclass(frozen=True)
class RotaryTable:
    """Rotation angles of each position, already scaled by the RoPE variant.

    Attributes:
        cos, sin: float32 `[max_positions, rotary_dim / 2]`, with any attention factor (yarn) multiplied in.
            Feature `i` of a head is rotated with feature `i + rotary_dim / 2` (Hugging Face's "half" layout).
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class AttentionRows:
    """Which rows of a forward pass belong to which sequence, and where each sequence's KV lies.

    Rows of a sequence are consecutive, sequences follow each other. All tensors are on the device.

    Attributes:
        positions: int64 `[rows]`, the position of each row in its sequence.
        row_starts: int32 `[sequences + 1]`, first row of each sequence; the last entry is the number of rows.
        block_tables: int32 `[sequences, max_blocks]`, block of positions `i * block_size ...`; unused entries
            are any valid block.
        max_rows: most rows of one sequence (host number, an upper bound).
        max_length: most KV positions that any row sees (host number, an upper bound).
    """

    positions: Tensor
    row_starts: Tensor
    block_tables: Tensor
    max_rows: int
    max_length: int


@dataclass(frozen=True)
class LinearWeight:
    """A matrix product's weight in the form its kernels want; made by `Kernels.prepare_linear`.

    Attributes:
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.
        multipliers: float32 `[in_features]`, what inputs are multiplied by first; None leaves them as they are.
    """

    weight: Tensor
    bias: Tensor | None = None
    multipliers: Tensor | None = field(kw_only=True, default=None)

    @property
    def in_features(self) -> int:
        """Size of an input row."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Size of an output row."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads of it, without what is only padding."""
        return self.weight.nbytes + sum(t.nbytes for t in (self.bias, self.multipliers) if t is not None)


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix product's weight as a quantized checkpoint holds it (W8A8, symmetric).

    Attributes:
        values: int8 `[out_features, in_features]`, in -127 ... 127: kernels multiply magnitudes.
        scales: float32 `[out_features]`, of each output channel.
        input_scale: the one scale of its int8 inputs (static); None gives each row its own (dynamic).
    """

    values: Tensor
    scales: Tensor
    input_scale: float | None = None


class PackedForm(NamedTuple):
    """A prepared weight's content.

    Attributes:
        facts: values of JSON's types.
        tensors: contiguous CPU tensors over the weight's own memory, the same on every instruction set.
    """

    facts: dict[str, Any]
    tensors: dict[str, Tensor]
