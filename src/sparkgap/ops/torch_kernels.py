"""The kernels in plain torch: correct on every torch device, and the oracle that other kernels are tested against.

Softmax and attention products are computed in float32. On a CPU with one sequence the live length is read from the
positions (free there), so that exactly the visible keys are gathered. Where the host must know device values
(`kv_write` with masked slots, passes with unequal numbers of rows), an accelerator has to be waited for; device
kernels avoid that, this reference does not.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from sparkgap.ops.kernels import Kernels
from sparkgap.ops.operands import AttentionRows, KVCache, LinearWeight, QuantizedWeight, RotaryTable
from sparkgap.ops.w8a8 import (
    Quantization,
    QuantizedLinearWeight,
    linear_w8a8,
    quantize_weight,
)

_FUSED_ATTENTION_ROWS = 32
"""Rows of one sequence from which torch's fused attention is faster than two matrix products on a CPU."""

_CHUNK_ELEMENTS = 2**17
"""Most key features in one product over several sequences on a CPU: 512 KiB in float32 stay in a core's cache."""


_FEWEST_ROWS = {torch.float32: 8, torch.bfloat16: 2}
"""Fewest rows of a matrix product on a CPU. Below, the libraries (MKL, oneDNN) add in another order than above."""

_LENGTH_STEP = 16
"""Attention on a CPU runs over multiples of so many keys, so that every key falls into the same vector lane whatever
stands behind it."""

_LENGTH_CHUNK = 128
"""Values are summed over so many keys at a time. Sums over more are split by the library at places that depend on
their length."""


class TorchKernels(Kernels):
    """`Kernels` in eager torch.

    On a CPU the shapes of products are chosen so that a row's result does not depend on the rows that stand beside
    it, as long as fewer than 32 rows of a sequence are computed. That holds for the libraries of torch's x86-64
    builds with AVX-512, where it is tested; other libraries may add in other orders.

    Args:
        linear_tile_rows: when given, every matrix product runs on exactly that many rows at a time, padded with
            zeros, and attention of up to 31 rows a sequence is computed row by row, so that on a CPU a row's
            result does not depend on the rows that stand beside it, to the last bit.
        quantization: `w8a8` quantizes weights and activations to int8, as the native kernels do; None keeps weights
            in their own dtype.
    """

    def __init__(self, linear_tile_rows: int | None = None, quantization: Quantization | None = None) -> None:
        if linear_tile_rows is not None and linear_tile_rows < 1:
            raise ValueError(f"linear_tile_rows must be at least 1, got {linear_tile_rows}")
        self.linear_tile_rows = linear_tile_rows
        self.quantization = quantization

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, quantize: bool = True) -> LinearWeight:
        """The weight as it is, without a copy, unless it is to be quantized.

        Raises:
            CheckpointError: the weight has infinities or NaN and is to be quantized.
        """
        if quantize and self.quantization == "w8a8":
            return self.prepare_quantized(quantize_weight(weight), bias)
        return LinearWeight(weight, bias)

    def prepare_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> QuantizedLinearWeight:
        """See `Kernels.prepare_quantized`."""
        return QuantizedLinearWeight(weight.values, bias, scales=weight.scales, input_scale=weight.input_scale)

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `Kernels.embed`."""
        return table.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        total = x + residual
        return functional.rms_norm(total, weight.shape, weight, eps), total

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """See `Kernels.linear`."""
        if isinstance(weight, QuantizedLinearWeight):
            return linear_w8a8(x, weight)
        if self.linear_tile_rows is None:
            return _linear(x, weight)
        return _tiled_linear(x, weight, self.linear_tile_rows)

    def rotary(self, x: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
        """See `Kernels.rotary`; computed in float32."""
        cos = table.cos.index_select(0, positions).unsqueeze(1)
        sin = table.sin.index_select(0, positions).unsqueeze(1)
        half = cos.shape[-1]
        rotary_dim = 2 * half
        pairs = x[..., :rotary_dim].to(cos.dtype)
        first, second = pairs[..., :half], pairs[..., half:]
        rotated = torch.empty(pairs.shape, dtype=cos.dtype, device=x.device)
        torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1.0)
        torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
        if rotary_dim < x.shape[-1]:
            return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)
        return rotated.to(x.dtype)

    def kv_write(self, keys: Tensor, values: Tensor, cache: KVCache, slots: Tensor) -> None:
        """See `Kernels.kv_write`; asks the device whether a slot is masked, which waits for an accelerator."""
        masked = slots < 0
        if masked.any():
            kept = masked.logical_not_().nonzero().squeeze(1)
            slots, keys, values = slots[kept], keys[kept], values[kept]
        _flat(cache.keys).index_copy_(0, slots, keys)
        _flat(cache.values).index_copy_(0, slots, values)

    def paged_attention(
        self,
        queries: Tensor,
        cache: KVCache,
        rows: AttentionRows,
        scale: float,
        sliding_window: int | None = None,
        following: Sequence[LinearWeight] = (),
    ) -> Tensor:
        """See `Kernels.paged_attention`; unequal numbers of rows loop over sequences with lengths on the host."""
        del following
        uniform = queries.shape[0] == rows.block_tables.shape[0] * rows.max_rows
        if uniform and self.linear_tile_rows is None:
            return _uniform_attention(queries, cache, rows, scale, sliding_window)
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for sequence, start, end in self._spans(rows):
            part = AttentionRows(
                positions=rows.positions[start:end],
                row_starts=rows.row_starts,
                block_tables=rows.block_tables[sequence : sequence + 1],
                max_rows=end - start,
                max_length=rows.max_length,
            )
            output[start:end] = _uniform_attention(queries[start:end], cache, part, scale, sliding_window)
        return output

    def _spans(self, rows: AttentionRows) -> list[tuple[int, int, int]]:
        """Sequence, first and last row + 1 of the parts that are computed one by one."""
        spans = []
        for sequence, (start, end) in enumerate(pairwise(rows.row_starts.tolist())):
            alone = self.linear_tile_rows is not None and end - start < _FUSED_ATTENTION_ROWS
            step = 1 if alone else max(end - start, 1)
            spans += [(sequence, row, row + step) for row in range(start, end, step)]
        return spans

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
        """See `Kernels.block_attention`."""
        num_sequences, block_rows = queries.shape[:2]
        capacity = block_tables.shape[1] * cache.block_size
        length = min(max_length, capacity) if max_length else capacity
        context_keys, context_values = _gather(cache, block_tables, 0, length)
        place = torch.arange(length, device=queries.device)
        live = place < context_lengths.unsqueeze(1)
        # What lies beyond the live context may be not a number, and zero times that is not zero.
        dead = live.logical_not()[:, :, None, None]
        context_keys.masked_fill_(dead, 0.0)
        context_values.masked_fill_(dead, 0.0)
        visible = live.unsqueeze(1).expand(num_sequences, block_rows, length)
        row = torch.arange(block_rows, device=queries.device)
        inside = torch.ones(block_rows, block_rows, dtype=torch.bool, device=queries.device)
        if sliding_window is not None:
            oldest = context_lengths.unsqueeze(1) + row - sliding_window
            visible = visible & (place > oldest.unsqueeze(2))
            inside = row > row.unsqueeze(1) - sliding_window
        if causal:
            inside = inside & (row <= row.unsqueeze(1))
        visible = torch.cat((visible, inside.expand(num_sequences, block_rows, block_rows)), dim=2)
        all_keys = torch.cat((context_keys, keys), dim=1)
        all_values = torch.cat((context_values, values), dim=1)
        return _attend(queries, all_keys, all_values, visible, scale)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


def _linear(x: Tensor, weight: LinearWeight) -> Tensor:
    rows = x.shape[0]
    fewest = _FEWEST_ROWS.get(x.dtype, 1)
    if x.device.type != "cpu" or rows >= fewest:
        return functional.linear(x, weight.weight, weight.bias)
    padded = functional.pad(x, (0, 0, 0, fewest - rows))
    return functional.linear(padded, weight.weight, weight.bias)[:rows].clone()


def _tiled_linear(x: Tensor, weight: LinearWeight, tile_rows: int) -> Tensor:
    output = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    for start in range(0, x.shape[0], tile_rows):
        part = x[start : start + tile_rows]
        tile = torch.zeros(tile_rows, x.shape[1], dtype=x.dtype, device=x.device)
        tile[: part.shape[0]] = part
        product = functional.linear(tile, weight.weight, weight.bias)
        output[start : start + tile_rows] = product[: part.shape[0]]
    return output


def _flat(cache: Tensor) -> Tensor:
    """Slots in a row: `[num_blocks * block_size, kv_heads, head_dim]`; a view, so that writes reach the cache."""
    return cache.view(-1, *cache.shape[2:])


def _gather(cache: KVCache, block_tables: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Copies of keys and values at positions `start ... end - 1`, each `[sequences, length, kv_heads, head_dim]`.

    Blocks are copied whole; what is returned is a slice of them.
    """
    block_size = cache.block_size
    first, last = start // block_size, (end + block_size - 1) // block_size
    blocks = block_tables[:, first:last]
    shape = (blocks.shape[0], blocks.shape[1] * block_size, *cache.keys.shape[2:])
    blocks = blocks.reshape(-1)
    wanted = slice(start - first * block_size, end - first * block_size)
    keys = cache.keys.index_select(0, blocks).view(shape)[:, wanted]
    values = cache.values.index_select(0, blocks).view(shape)[:, wanted]
    return keys, values


def _gather_live(cache: KVCache, block_tables: Tensor, last: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copies of keys and values at positions `0 ... length - 1`, each `[sequences, length, kv_heads, head_dim]`.

    Positions above a sequence's `last` (int64 `[sequences]`) repeat that position: what lies in the cache beyond a
    sequence's end may be another's, or not a number, and zero times that is not zero.
    """
    place = torch.arange(length, device=last.device)
    place = torch.minimum(place, last.unsqueeze(1))
    slots = block_tables.gather(1, place // cache.block_size) * cache.block_size + place % cache.block_size
    shape = (*slots.shape, *cache.keys.shape[2:])
    slots = slots.view(-1)
    keys = _flat(cache.keys).index_select(0, slots).view(shape)
    return keys, _flat(cache.values).index_select(0, slots).view(shape)


def _uniform_attention(
    queries: Tensor, cache: KVCache, rows: AttentionRows, scale: float, sliding_window: int | None
) -> Tensor:
    """Causal attention where every sequence has the same number of rows."""
    num_sequences = rows.block_tables.shape[0]
    num_rows, heads, head_dim = queries.shape
    width = num_rows // num_sequences
    split = queries.view(num_sequences, width, heads, head_dim)
    positions = rows.positions.view(num_sequences, width)
    if queries.device.type != "cpu":
        length = min(rows.max_length, rows.block_tables.shape[1] * cache.block_size)
        output = _causal(split, cache, positions, rows.block_tables, length, scale, sliding_window)
    elif num_sequences == 1:
        output = _causal_alone(split, cache, positions, rows.block_tables, scale, sliding_window)
    else:
        length = int(positions.max()) + 1
        chunk = max(1, _CHUNK_ELEMENTS // (length * cache.keys.shape[2] * head_dim))
        output = torch.empty(split.shape, dtype=queries.dtype)
        for start in range(0, num_sequences, chunk):
            part = slice(start, start + chunk)
            output[part] = _causal(
                split[part], cache, positions[part], rows.block_tables[part], length, scale, sliding_window
            )
    return output.view(num_rows, heads, head_dim)


def _causal(
    queries: Tensor,
    cache: KVCache,
    positions: Tensor,
    block_tables: Tensor,
    length: int,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Causal attention of `[sequences, width, heads, head_dim]` queries, with nothing known on the host."""
    keys, values = _gather_live(cache, block_tables, positions.amax(1), length)
    place = torch.arange(length, device=queries.device)
    positions = positions.unsqueeze(2)
    visible = place <= positions
    if sliding_window is not None:
        visible &= place > positions - sliding_window
    return _attend(queries, keys, values, visible, scale)


def _causal_alone(
    queries: Tensor,
    cache: KVCache,
    positions: Tensor,
    block_tables: Tensor,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Causal attention of one sequence whose positions the host can read."""
    numbers = positions[0].tolist()
    end = max(numbers) + 1
    oldest = 0 if sliding_window is None else max(min(numbers) + 1 - sliding_window, 0)
    start = oldest // _LENGTH_CHUNK * _LENGTH_CHUNK
    keys, values = _gather(cache, block_tables, start, end)
    if len(numbers) == 1 and start == oldest:
        return _attend(queries, keys, values, None, scale)
    place = torch.arange(start, end)
    rows = positions.unsqueeze(2)
    visible = place <= rows
    if sliding_window is not None:
        visible &= place > rows - sliding_window
    return _attend(queries, keys, values, visible, scale)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Attention with grouped heads.

    Args:
        queries: `[sequences, width, heads, head_dim]`.
        keys, values: `[sequences, length, kv_heads, head_dim]`.
        visible: bool `[sequences, width, length]`; None when every row sees everything.
        scale: multiplies the dot products.

    Returns:
        Contiguous `[sequences, width, heads, head_dim]`.
    """
    num_sequences, width, heads, head_dim = queries.shape
    length, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    if width >= _FUSED_ATTENTION_ROWS:
        output = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=None if visible is None else visible.unsqueeze(1),
            scale=scale,
            enable_gqa=group > 1,
        )
        return output.transpose(1, 2).contiguous()
    rows = width * group
    grouped = queries.view(num_sequences, width, kv_heads, group, head_dim).transpose(1, 2)
    grouped = _contiguous(grouped, torch.float32).view(num_sequences * kv_heads, rows, head_dim)
    on_cpu = queries.device.type == "cpu"
    if on_cpu and rows < _FEWEST_ROWS[torch.float32]:
        grouped = functional.pad(grouped, (0, 0, 0, _FEWEST_ROWS[torch.float32] - rows))
    padded_length = -(-length // _LENGTH_STEP) * _LENGTH_STEP if on_cpu else length
    scores = torch.bmm(grouped, _by_head(keys, padded_length).transpose(1, 2)).mul_(scale)
    scores[:, :, length:] = -torch.inf
    if visible is not None:
        hidden = visible.logical_not().repeat_interleave(group, dim=1).unsqueeze(1)
        by_sequence = scores.view(num_sequences, kv_heads, -1, padded_length)
        by_sequence[:, :, :rows, :length].masked_fill_(hidden, -torch.inf)
    weighted = _weighted_sum(scores.softmax(-1), _by_head(values, padded_length), on_cpu)[:, :rows]
    output = weighted.reshape(num_sequences, kv_heads, width, group, head_dim).transpose(1, 2)
    return _contiguous(output, queries.dtype).view(queries.shape)


def _weighted_sum(weights: Tensor, values: Tensor, in_chunks: bool) -> Tensor:
    """`weights` `[batch, rows, length]` @ `values` `[batch, length, features]`, chunk by chunk of the length."""
    if not in_chunks or weights.shape[2] <= _LENGTH_CHUNK:
        return torch.bmm(weights, values)
    total = torch.bmm(weights[:, :, :_LENGTH_CHUNK], values[:, :_LENGTH_CHUNK])
    for start in range(_LENGTH_CHUNK, weights.shape[2], _LENGTH_CHUNK):
        part = slice(start, start + _LENGTH_CHUNK)
        total += torch.bmm(weights[:, :, part], values[:, part])
    return total


def _by_head(x: Tensor, padded_length: int) -> Tensor:
    """`[sequences, length, kv_heads, head_dim]` as float32 `[sequences * kv_heads, padded_length, head_dim]`.

    One sequence's heads are a view that products read in place; several have to be brought together. What is added
    to the length is zeros.
    """
    sequences, length, heads, head_dim = x.shape
    if length < padded_length:
        padded = torch.zeros(sequences, heads, padded_length, head_dim, device=x.device)
        padded[:, :, :length] = x.transpose(1, 2)
        return padded.flatten(0, 1)
    if sequences == 1:
        return x[0].to(torch.float32).transpose(0, 1)
    return _contiguous(x.transpose(1, 2), torch.float32).flatten(0, 1)


def _contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, contiguous, with at most one copy."""
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()
