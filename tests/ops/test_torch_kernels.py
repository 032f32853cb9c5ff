"""The torch kernels against dense implementations written row by row in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkgap.ops import AttentionRows, KVCache, NativeKernels, RotaryTable, TorchKernels, make_kernels

KERNELS = TorchKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
examples = settings(max_examples=60, deadline=None)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One row `[heads, head_dim]` over `[length, kv_heads, head_dim]`, in float64, head by head."""
    heads, kv_heads = query.shape[0], keys.shape[1]
    rows = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = keys[:, shared].double() @ query[head].double() * scale
        weights = (scores - scores.max()).exp()
        rows.append((weights / weights.sum()) @ values[:, shared].double())
    return torch.stack(rows)


class Paged:
    """Sequences of given lengths, scattered over a cache that holds NaN everywhere else."""

    def __init__(
        self, lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, seed: int
    ) -> None:
        self.keys = [normal((length, kv_heads, head_dim), seed + i, dtype) for i, length in enumerate(lengths)]
        self.values = [normal((length, kv_heads, head_dim), 99 + seed + i, dtype) for i, length in enumerate(lengths)]
        per_sequence = max(-(-length // block_size) for length in lengths) + 1
        blocks = per_sequence * len(lengths)
        shape = (blocks, block_size, kv_heads, head_dim)
        self.cache = KVCache(torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype))
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
        self.block_tables = order.view(len(lengths), per_sequence).to(torch.int32)
        for sequence, length in enumerate(lengths):
            for position in range(length):
                block = self.block_tables[sequence, position // block_size]
                self.cache.keys[block, position % block_size] = self.keys[sequence][position]
                self.cache.values[block, position % block_size] = self.values[sequence][position]


@st.composite
def head_shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    kv_heads = draw(st.integers(1, 3))
    return kv_heads * draw(st.integers(1, 4)), kv_heads, draw(st.sampled_from([2, 8, 16]))


@st.composite
def row_layouts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """`(context, rows)` of each sequence; often the same number of rows everywhere."""
    contexts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, 1, 2, 5, 8, 33, 40]))
        return [(context, rows) for context in contexts]
    return [(context, draw(st.sampled_from([1, 2, 3, 8, 31, 32, 35]))) for context in contexts]


def check_paged_attention(
    kernels: TorchKernels,
    layout: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    seed: int,
    slack: int = 0,
) -> None:
    num_heads, kv_heads, head_dim = heads
    paged = Paged([context + rows for context, rows in layout], kv_heads, head_dim, block_size, dtype, seed)
    counts = [rows for _, rows in layout]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    positions = [position for context, rows in layout for position in range(context, context + rows)]
    queries = normal((len(positions), num_heads + 2, head_dim), seed + 7, dtype)[:, :num_heads]
    rows = AttentionRows(
        positions=torch.tensor(positions),
        row_starts=torch.tensor(starts, dtype=torch.int32),
        block_tables=paged.block_tables,
        max_rows=max(counts),
        max_length=max(positions) + 1 + slack,
    )
    scale = 0.3
    result = kernels.paged_attention(queries, paged.cache, rows, scale, window)
    assert result.shape == queries.shape
    assert result.dtype == dtype
    assert result.is_contiguous()
    for sequence, start in enumerate(starts[:-1]):
        for row in range(start, starts[sequence + 1]):
            end = positions[row] + 1
            begin = 0 if window is None else max(end - window, 0)
            expected = dense_attention(
                queries[row], paged.keys[sequence][begin:end], paged.values[sequence][begin:end], scale
            )
            torch.testing.assert_close(result[row].double(), expected, rtol=0, atol=TOLERANCE[dtype])


@examples
@given(
    layout=row_layouts(),
    heads=head_shapes(),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 50),
    tile=st.sampled_from([None, None, 4]),
    slack=st.sampled_from([0, 1, 1000]),
    seed=st.integers(0, 1000),
)
def test_paged_attention_is_dense_attention(layout, heads, block_size, window, tile, slack, seed):
    kernels = TorchKernels(linear_tile_rows=tile)
    check_paged_attention(kernels, layout, heads, block_size, window, torch.float32, seed, slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [[(0, 1)], [(15, 1)], [(16, 1)], [(9, 8), (30, 8)], [(0, 40)], [(5, 3), (0, 33)]])
def test_paged_attention_dtypes_and_block_boundaries(dtype, layout):
    check_paged_attention(KERNELS, layout, (6, 2, 16), 16, None, dtype, 3)


def test_paged_attention_splits_many_sequences_into_groups():
    layout = [(position % 200, 1) for position in range(0, 4000, 37)]
    check_paged_attention(KERNELS, layout, (3, 3, 16), 16, None, torch.float32, 5)


@examples
@given(
    contexts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    block_rows=st.sampled_from([1, 2, 7, 16, 33]),
    heads=head_shapes(),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 60),
    bound=st.sampled_from(["exact", "above", "beyond the tables", "unknown"]),
    seed=st.integers(0, 1000),
)
def test_block_attention_is_dense_attention(contexts, block_rows, heads, block_size, window, bound, seed):
    num_heads, kv_heads, head_dim = heads
    paged = Paged(contexts, kv_heads, head_dim, block_size, torch.float32, seed)
    queries = normal((len(contexts), block_rows, num_heads, head_dim), seed + 1)
    keys = normal((len(contexts), block_rows, kv_heads, head_dim), seed + 2)
    values = normal((len(contexts), block_rows, kv_heads, head_dim), seed + 3)
    longest = max(contexts)
    max_length = {"exact": longest, "above": longest + 1, "beyond the tables": 10_000, "unknown": 0}[bound]
    result = KERNELS.block_attention(
        queries,
        keys,
        values,
        paged.cache,
        torch.tensor(contexts),
        paged.block_tables,
        0.3,
        sliding_window=window,
        max_length=max_length,
    )
    assert result.shape == queries.shape
    for sequence, context in enumerate(contexts):
        all_keys = torch.cat((paged.keys[sequence], keys[sequence]))
        all_values = torch.cat((paged.values[sequence], values[sequence]))
        for row in range(block_rows):
            begin = 0 if window is None else max(context + row - window + 1, 0)
            expected = dense_attention(queries[sequence, row], all_keys[begin:], all_values[begin:], 0.3)
            torch.testing.assert_close(result[sequence, row].double(), expected, rtol=0, atol=2e-5)


@examples
@given(
    slots=st.lists(st.integers(0, 31), min_size=1, max_size=20, unique=True),
    masked=st.integers(0, 2**20 - 1),
    seed=st.integers(0, 1000),
)
def test_kv_write_writes_its_slots_and_nothing_else(slots, masked, seed):
    slots = [-1 if masked >> i & 1 else slot for i, slot in enumerate(slots)]
    shape = (8, 4, 2, 6)
    cache = KVCache(normal(shape, seed), normal(shape, seed + 1))
    expected = KVCache(cache.keys.clone(), cache.values.clone())
    rows = normal((len(slots), 5, 6), seed + 2)
    keys, values = rows[:, :2], rows[:, 3:]
    KERNELS.kv_write(keys, values, cache, torch.tensor(slots))
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected.keys[slot // 4, slot % 4] = keys[row]
            expected.values[slot // 4, slot % 4] = values[row]
    assert torch.equal(cache.keys, expected.keys)
    assert torch.equal(cache.values, expected.values)


@pytest.mark.parametrize("rows", [1, 3])
def test_kv_write_of_masked_slots_alone_writes_nothing(rows):
    cache = KVCache(torch.full((2, 4, 1, 2), 7.0), torch.full((2, 4, 1, 2), 8.0))
    KERNELS.kv_write(torch.ones(rows, 1, 2), torch.ones(rows, 1, 2), cache, torch.full((rows,), -1))
    assert (cache.keys == 7.0).all()
    assert (cache.values == 8.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
@pytest.mark.parametrize("rows", [1, 5])
def test_rotary_turns_pairs_of_features(dtype, rotary_dim, rows):
    angles = normal((20, rotary_dim // 2), 1).double()
    table = RotaryTable(angles.cos().float(), angles.sin().float())
    x = normal((rows, 7, 8), 2, dtype)[:, 2:5]
    positions = torch.tensor([19, 0, 3, 3, 7][:rows])
    result = KERNELS.rotary(x, positions, table)
    expected = x.double().clone()
    for row, position in enumerate(positions.tolist()):
        for i in range(rotary_dim // 2):
            pair = torch.complex(x[row, :, i].double(), x[row, :, i + rotary_dim // 2].double())
            turned = pair * torch.polar(torch.tensor(1.0).double(), angles[position, i])
            expected[row, :, i], expected[row, :, i + rotary_dim // 2] = turned.real, turned.imag
    assert result.dtype == dtype
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (4, 3, 16)])
def test_norms(dtype, shape):
    x, residual = normal(shape, 1, dtype) * 3, normal(shape, 2, dtype)
    weight = normal(shape[-1:], 3, dtype)

    def expected(y: Tensor) -> Tensor:
        y = y.double()
        return y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()

    normed = KERNELS.rms_norm(x, weight, 1e-3)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected(x), rtol=1e-2, atol=TOLERANCE[dtype])
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), expected(total), rtol=1e-2, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype):
    gate_up = normal((3, 20), 1, dtype)
    before = gate_up.clone()
    gate, up = gate_up[:, :10].double(), gate_up[:, 10:].double()
    result = KERNELS.silu_mul(gate_up)
    torch.testing.assert_close(result.double(), gate / (1 + (-gate).exp()) * up, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("tile", [None, 1, 4, 16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 17])
def test_linear(tile, biased, rows):
    x, weight = normal((rows, 12), 1), normal((9, 12), 2)
    bias = normal((9,), 3) if biased else None
    kernels = TorchKernels(linear_tile_rows=tile)
    prepared = kernels.prepare_linear(weight, bias)
    assert (prepared.in_features, prepared.out_features) == (12, 9)
    assert prepared.weight.data_ptr() == weight.data_ptr()
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(kernels.linear(x, prepared).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [1, 8, 16])
@pytest.mark.parametrize("shape", [(97, 48), (192, 320), (33, 100)])
def test_tiled_linear_rows_are_bit_identical_whatever_stands_beside_them(dtype, tile, shape):
    kernels = TorchKernels(linear_tile_rows=tile)
    prepared = kernels.prepare_linear(normal(shape, 1, dtype))
    x = normal((17, shape[1]), 2, dtype)
    alone = torch.cat([kernels.linear(x[row : row + 1], prepared) for row in range(17)])
    for rows in range(1, 18):
        for start in range(18 - rows):
            assert torch.equal(kernels.linear(x[start : start + rows], prepared), alone[start : start + rows])


def test_tile_of_no_rows_is_refused():
    with pytest.raises(ValueError, match="linear_tile_rows"):
        TorchKernels(linear_tile_rows=0)


def test_embed_concat_and_float32():
    table = normal((5, 3), 1, torch.bfloat16)
    rows = KERNELS.embed(torch.tensor([4, 0, 4]), table)
    assert torch.equal(rows, table[[4, 0, 4]])
    assert torch.equal(KERNELS.concat([rows, rows[:, :1]]), table[[4, 0, 4]][:, [0, 1, 2, 0]])
    assert torch.equal(KERNELS.to_float32(rows), table[[4, 0, 4]].float())


def test_make_kernels():
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert isinstance(make_kernels(cpu, torch.bfloat16), NativeKernels)
    assert make_kernels(cpu, torch.float32, "w8a8", 1).quantization == "w8a8"
    assert isinstance(make_kernels(cpu, torch.float16), TorchKernels)
    assert isinstance(make_kernels(meta, torch.bfloat16), TorchKernels)
    for device, dtype in ((cpu, torch.float16), (meta, torch.bfloat16)):
        kernels = make_kernels(device, dtype, "w8a8")
        assert isinstance(kernels, TorchKernels)
        assert kernels.quantization == "w8a8"
