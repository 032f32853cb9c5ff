"""The verbs of every network: products, norms, rotation, KV writes, attention."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparkgap.ops.operands import AttentionRows, KVCache, LinearWeight, PackedForm, QuantizedWeight, RotaryTable
from sparkgap.ops.w8a8 import Quantization, equalize_columns


class NetworkKernels(ABC):
    """What targets and drafters compute with; see `Kernels`.

    Attributes:
        quantization: `w8a8` has `prepare_linear` quantize weights, and products their inputs; None neither.
    """

    quantization: Quantization | None = None

    @abstractmethod
    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, quantize: bool = True) -> LinearWeight:
        """Bring `weight` `[out_features, in_features]` into the form that `linear` reads fastest.

        Args:
            weight: floating-point values.
            bias: `[out_features]`.
            quantize: False keeps the weight's dtype where these kernels quantize.
        """

    def prepare_equalized(self, weight: Tensor) -> LinearWeight:
        """`prepare_linear` of a weight whose input features differ in size by orders of magnitude.

        One int8 scale for a row of such inputs would lose most of them. Where these kernels quantize, each column is
        divided by its root mean square, and `linear` multiplies each input feature by it: what a feature brings to the
        product is then in its size.

        Raises:
            CheckpointError: the weight has infinities or NaN and is to be quantized.
        """
        if self.quantization != "w8a8":
            return self.prepare_linear(weight)
        values, multipliers = equalize_columns(weight)
        return replace(self.prepare_linear(values), multipliers=multipliers)

    @abstractmethod
    def prepare_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> LinearWeight:
        """The same for a weight that is quantized already, whatever these kernels do with others."""

    def packed_form(self, weight: LinearWeight) -> PackedForm | None:
        """What must be kept of a prepared weight to have it again without preparing it; None: nothing is worth it."""
        del weight
        return None

    def blank_packed(self, facts: Mapping[str, Any]) -> tuple[LinearWeight, dict[str, Tensor]]:
        """A weight of these facts, and its tensors for the caller to fill.

        Raises:
            ValueError: no weight of these kernels has such facts.
        """
        raise ValueError(f"these kernels keep no weight, so none of {dict(facts)}")

    @abstractmethod
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows of `table` `[vocab, hidden]` at `token_ids` int64 `[rows]`: `[rows, hidden]`."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32, in `x`'s dtype."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`(rms_norm(s), s)` for `s = x + residual`."""

    @abstractmethod
    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """`(x * multipliers) @ weight.T + bias`: `[rows, in_features]` -> `[rows, out_features]`."""

    def written_linear(self, x: Tensor, weight: LinearWeight, slots: Tensor) -> Tensor:
        """`linear(x, weight)` for rows that go to a cache: rows whose slot (int64 `[rows]`) is -1 may hold anything."""
        del slots
        return self.linear(x, weight)

    @abstractmethod
    def rotary(self, x: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
        """`x` `[rows, heads, head_dim]` rotated at `positions` int64 `[rows]`.

        Features beyond the table's rotary_dim pass unchanged.
        """

    @abstractmethod
    def kv_write(self, keys: Tensor, values: Tensor, cache: KVCache, slots: Tensor) -> None:
        """Write `keys` and `values` `[rows, kv_heads, head_dim]` at `slots` int64 `[rows]`; -1 writes nothing."""

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: LinearWeight
    ) -> tuple[Tensor, Tensor]:
        """`(linear(rms_norm(s, norm, eps), weight), s)` for `s = x + residual`, or `s = x` without a residual."""
        if residual is None:
            return self.linear(self.rms_norm(x, norm, eps), weight), x
        normed, total = self.add_rms_norm(x, residual, norm, eps)
        return self.linear(normed, weight), total

    def silu_mul_linear(self, gate_up: Tensor, weight: LinearWeight) -> Tensor:
        """`linear(silu_mul(gate_up), weight)`."""
        return self.linear(self.silu_mul(gate_up), weight)

    def norm_rotary(self, x: Tensor, norm: Tensor, eps: float, positions: Tensor, table: RotaryTable) -> Tensor:
        """`rotary(rms_norm(x, norm, eps), positions, table)` for heads `[rows, heads, head_dim]`."""
        return self.rotary(self.rms_norm(x, norm, eps), positions, table)

    def rotary_kv_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        table: RotaryTable,
        cache: KVCache,
        slots: Tensor,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Rotate queries and keys and write keys and values to the cache; gives the queries.

        Args:
            qkv: `[rows, heads + 2 * kv_heads, head_dim]`: queries (0 heads or more), keys, values.
            positions: int64 `[rows]`.
            table: angles of the positions.
            cache: where keys and values go.
            slots: int64 `[rows]`; -1 writes nothing.
            query_norm, key_norm: `[head_dim]`, weights of an RMSNorm of each head before the rotation.
            eps: of the norms.

        Returns:
            `[rows, heads, head_dim]`.
        """
        kv_heads = cache.keys.shape[2]
        heads = qkv.shape[1] - 2 * kv_heads
        queries, keys, values = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if query_norm is not None:
            queries = self.rms_norm(queries, query_norm, eps)
        if key_norm is not None:
            keys = self.rms_norm(keys, key_norm, eps)
        self.kv_write(self.rotary(keys, positions, table), values, cache, slots)
        return self.rotary(queries, positions, table)

    @abstractmethod
    def paged_attention(
        self,
        queries: Tensor,
        cache: KVCache,
        rows: AttentionRows,
        scale: float,
        sliding_window: int | None = None,
        following: Sequence[LinearWeight] = (),
    ) -> Tensor:
        """Causal attention of `queries` `[rows, heads, head_dim]` over the cache: same shape.

        A row at position `p` sees its sequence's positions `0 ... p` (the last `sliding_window` of them, itself
        included, where that is given). Query head `h` reads KV head `h // (heads / kv_heads)`.

        `following` are weights of the products that come next, in order. A device may fetch them meanwhile; results do
        not depend on them.
        """

    @abstractmethod
    def block_attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cache: KVCache,
        context_lengths: Tensor,
        block_tables: Tensor,
        scale: float,
        sliding_window: int | None = None,
        max_length: int = 0,
        causal: bool = False,
    ) -> Tensor:
        """Attention of draft blocks: each row sees its sequence's live context and its whole block.

        Args:
            queries: `[sequences, block_rows, heads, head_dim]`; row `i` stands at position `context_length + i`.
            keys, values: `[sequences, block_rows, kv_heads, head_dim]`, the block's own.
            cache: context KV; positions `0 ... context_length - 1` are seen.
            context_lengths: int64 `[sequences]`, live lengths.
            block_tables: int32 `[sequences, max_blocks]`.
            scale: multiplies the dot products.
            sliding_window: when given, a row sees positions above `its own - sliding_window` only.
            max_length: upper bound of `context_lengths` (host number); 0 when unknown: the block tables' whole
                capacity is looked at.
            causal: a row sees, of its block, itself and the rows before it only.

        Returns:
            `[sequences, block_rows, heads, head_dim]`.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up` `[rows, 2 * features]`, gate first: `[rows, features]`."""

    def concat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors `[rows, features_i]` side by side: `[rows, sum of features_i]`."""
        return torch.cat(list(tensors), dim=-1)

    def to_float32(self, x: Tensor) -> Tensor:
        """`x` in float32."""
        return x.to(torch.float32)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that operations fill."""
        return torch.empty(tuple(shape), dtype=dtype, device=device)
