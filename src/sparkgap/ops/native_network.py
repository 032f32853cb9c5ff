"""A network's verbs as native operations."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from sparkgap.ops.native_weights import NativeLinearWeight, NativeWeightKernels
from sparkgap.ops.operands import AttentionRows, KVCache, LinearWeight, RotaryTable


class NativeNetworkKernels(NativeWeightKernels):
    """`NetworkKernels` as native operations."""

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `Kernels.embed`; rows come in `activation_dtype`."""
        out = self._empty((token_ids.shape[0], table.shape[1]), self.activation_dtype)
        self.executor.embed(token_ids, table, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        out = self._empty(x.shape, x.dtype)
        self.executor.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        out, total = self._empty(x.shape, x.dtype), self._empty(x.shape, x.dtype)
        self.executor.add_rms_norm(x, residual, weight, eps, out, total)
        return out, total

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """See `Kernels.linear`; `weight` must come from this class's `prepare_linear`."""
        return self._linear(x, weight, None)

    def written_linear(self, x: Tensor, weight: LinearWeight, slots: Tensor) -> Tensor:
        """See `Kernels.written_linear`; products that are not int8, or have multipliers, leave such rows out."""
        return self._linear(x, weight, slots)

    def _linear(self, x: Tensor, weight: LinearWeight, slots: Tensor | None) -> Tensor:
        if not isinstance(weight, NativeLinearWeight):
            raise TypeError("the weight was not prepared by NativeKernels.prepare_linear")
        out = self._empty((x.shape[0], weight.out_features), x.dtype)
        self.executor.linear(x, weight.packed, out, slots, weight.multipliers)
        return out

    def rotary(self, x: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
        """See `Kernels.rotary`."""
        out = self._empty(x.shape, x.dtype)
        self.executor.rotary(x, None, 0.0, positions, table.cos, table.sin, out)
        return out

    def kv_write(self, keys: Tensor, values: Tensor, cache: KVCache, slots: Tensor) -> None:
        """See `Kernels.kv_write`; values are rounded to the cache's dtype."""
        self.executor.kv_write(keys, values, cache.keys, cache.values, slots)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: LinearWeight
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.norm_linear`; bit for bit what the single operations give."""
        if not _is_plain_int8(weight):
            return super().norm_linear(x, residual, norm, eps, weight)
        out = self._empty((x.shape[0], weight.out_features), x.dtype)
        total = None if residual is None else self._empty(x.shape, x.dtype)
        self.executor.norm_linear(x, residual, norm, eps, weight.packed, out, total)
        return out, x if total is None else total

    def silu_mul_linear(self, gate_up: Tensor, weight: LinearWeight) -> Tensor:
        """See `Kernels.silu_mul_linear`; bit for bit what the single operations give."""
        if not _is_plain_int8(weight):
            return super().silu_mul_linear(gate_up, weight)
        out = self._empty((gate_up.shape[0], weight.out_features), gate_up.dtype)
        self.executor.silu_linear(gate_up, weight.packed, out)
        return out

    def norm_rotary(self, x: Tensor, norm: Tensor, eps: float, positions: Tensor, table: RotaryTable) -> Tensor:
        """See `Kernels.norm_rotary`."""
        out = self._empty(x.shape, x.dtype)
        self.executor.rotary(x, norm, eps, positions, table.cos, table.sin, out)
        return out

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
        """See `Kernels.rotary_kv_write`."""
        heads = qkv.shape[1] - 2 * cache.keys.shape[2]
        queries = self._empty((qkv.shape[0], heads, qkv.shape[2]), qkv.dtype)
        self.executor.rotary_write(
            qkv, query_norm, key_norm, eps, positions, table.cos, table.sin, cache.keys, cache.values, slots, queries
        )
        return queries

    def paged_attention(
        self,
        queries: Tensor,
        cache: KVCache,
        rows: AttentionRows,
        scale: float,
        sliding_window: int | None = None,
        following: Sequence[LinearWeight] = (),
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        out = self._empty(queries.shape, queries.dtype)
        self.executor.paged_attention(
            queries,
            cache.keys,
            cache.values,
            rows.positions,
            rows.row_starts,
            rows.block_tables,
            rows.max_rows,
            rows.max_length,
            scale,
            sliding_window or 0,
            out,
            [weight.packed for weight in following if isinstance(weight, NativeLinearWeight)],
        )
        return out

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
        """See `Kernels.block_attention`; `max_length` is not needed, lengths are read where they lie."""
        del max_length
        out = self._empty(queries.shape, queries.dtype)
        self.executor.block_attention(
            queries,
            keys,
            values,
            cache.keys,
            cache.values,
            context_lengths,
            block_tables,
            scale,
            sliding_window or 0,
            causal,
            out,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        out = self._empty((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        self.executor.silu_mul(gate_up, out)
        return out

    def concat(self, tensors: Sequence[Tensor]) -> Tensor:
        """See `Kernels.concat`."""
        widths = [tensor.shape[-1] for tensor in tensors]
        out = self._empty((*tensors[0].shape[:-1], sum(widths)), tensors[0].dtype)
        start = 0
        for tensor, width in zip(tensors, widths, strict=True):
            self.executor.convert(tensor, out[..., start : start + width])
            start += width
        return out

    def to_float32(self, x: Tensor) -> Tensor:
        """See `Kernels.to_float32`."""
        if x.dtype == torch.float32:
            return x
        out = self._empty(x.shape, torch.float32)
        self.executor.convert(x, out)
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """Place of the largest of each row of `x` `[rows, features]`, the first of equals: int64 `[rows]`.

        A NaN counts as larger than every number, as in torch.
        """
        out = self._empty((x.shape[0],), torch.int64)
        self.executor.argmax(x, out)
        return out


def _is_plain_int8(weight: LinearWeight) -> TypeGuard[NativeLinearWeight]:
    """Whether a fused operation takes the weight."""
    return isinstance(weight, NativeLinearWeight) and weight.form == "int8" and weight.multipliers is None
