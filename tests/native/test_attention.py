from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_reference import attention
from torch import Tensor

from sparkgap.ops import AttentionRows, KVCache
from sparkgap.ops.native_kernels import NativeKernels

Make = Callable[..., NativeKernels]
some = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@dataclass
class Case:
    """Sequences in a paged cache of shuffled blocks; what no sequence uses is NaN."""

    cache: KVCache
    keys: list[Tensor]
    values: list[Tensor]
    block_tables: Tensor


def make_case(
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
    spare: int = 2,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    width = max(-(-length // block_size) for length in lengths) + spare
    order = torch.randperm(len(lengths) * width, generator=g).view(len(lengths), width)
    shape = (len(lengths) * width, block_size, kv_heads, head_dim)
    cache = KVCache(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
    keys, values = [], []
    for blocks, length in zip(order, lengths, strict=True):
        for store, into in ((keys, cache.keys), (values, cache.values)):
            x = torch.randn(length, kv_heads, head_dim, generator=g).to(dtype)
            store.append(x)
            places = torch.arange(length)
            slots = blocks[places // block_size] * block_size + places % block_size
            into.view(-1, kv_heads, head_dim)[slots] = x
    return Case(cache, keys, values, order.to(torch.int32).contiguous())


def causal(case: Case, q: Tensor, counts: list[int], positions: list[int], scale: float, window: int | None) -> Tensor:
    sequence_of = [s for s, n in enumerate(counts) for _ in range(n)]
    visible = []
    for s, position in zip(sequence_of, positions, strict=True):
        place = torch.arange(case.keys[s].shape[0])
        visible.append((place <= position) & (place > position - (window or 10**9)))
    keys, values = [case.keys[s] for s in sequence_of], [case.values[s] for s in sequence_of]
    return attention(q, keys, values, visible, scale)


def rows_of(case: Case, counts: list[int], positions: list[int], slack: int = 0) -> AttentionRows:
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    length = max(positions) + 1 + slack
    return AttentionRows(torch.tensor(positions), starts, case.block_tables, max(counts), length)


@some
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    width=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 7]),
    head_dim=st.sampled_from([8, 16, 24, 64]),
    block_size=st.sampled_from([1, 5, 16]),
    window=st.sampled_from([None, 1, 17, 130, 200]),
    dtype=dtypes,
    cache_dtype=dtypes,
    seed=st.integers(0, 999),
)
def test_paged_attention(
    make: Make,
    variant: str,
    lengths: list[int],
    width: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    seed: int,
) -> None:
    case = make_case(lengths, kv_heads, head_dim, block_size, cache_dtype, seed)
    counts = [min(width, length) for length in lengths]
    positions = [p for n, length in zip(counts, lengths, strict=True) for p in range(length - n, length)]
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(sum(counts), kv_heads * group + 2, head_dim, generator=g).to(dtype)
    q, scale = wide[:, 1:-1], head_dim**-0.5
    rows = rows_of(case, counts, positions)
    out = make(variant).paged_attention(q, case.cache, rows, scale, window)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-5
    expected = causal(case, q, counts, positions, scale, window)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 150])
def test_rows_lengths_threads_and_variants_do_not_show(
    make: Make, variant: str, cache_dtype: torch.dtype, window: int | None
) -> None:
    """Same bits alone, in a verification batch, in a long chunk, and with any bound on the length."""
    length, rows, heads = 420, 64, 6
    case = make_case([length], 2, 32, 16, cache_dtype, 0, spare=60)
    q = torch.randn(rows, heads, 32, generator=torch.Generator().manual_seed(1))
    positions = list(range(length - rows, length))

    def run(kernels: NativeKernels, begin: int, end: int, slack: int = 0) -> Tensor:
        rows = rows_of(case, [end - begin], positions[begin:end], slack)
        return kernels.paged_attention(q[begin:end], case.cache, rows, 0.2, window)

    expected = run(make("portable", 1), 0, rows)
    for threads in (1, 2, 3):
        kernels = make(variant, threads)
        assert torch.equal(run(kernels, 0, rows), expected)
        for begin in range(0, rows, 8):
            assert torch.equal(run(kernels, begin, begin + 8), expected[begin : begin + 8])
        for row in range(0, rows, 3):
            assert torch.equal(run(kernels, row, row + 1, slack=row * 8), expected[row : row + 1])


def test_sequences_do_not_show(make: Make, variant: str) -> None:
    lengths, counts = [300, 5, 129, 128, 77], [3, 1, 8, 2, 5]
    case = make_case(lengths, 1, 64, 16, torch.bfloat16, 3)
    positions = [p for n, length in zip(counts, lengths, strict=True) for p in range(length - n, length)]
    q = torch.randn(sum(counts), 4, 64)
    kernels = make(variant)
    together = kernels.paged_attention(q, case.cache, rows_of(case, counts, positions), 0.125)
    start = 0
    for sequence, count in enumerate(counts):
        part = slice(start, start + count)
        alone = Case(case.cache, [], [], case.block_tables[sequence : sequence + 1])
        rows = rows_of(alone, [count], positions[part])
        assert torch.equal(kernels.paged_attention(q[part], case.cache, rows, 0.125), together[part])
        start += count


def test_unseen_rows_and_unused_rows_give_zeros(make: Make, variant: str) -> None:
    case = make_case([10], 1, 16, 4, torch.float32, 0)
    positions = torch.tensor([9, -1, 5])
    rows = AttentionRows(positions, torch.tensor([0, 2], dtype=torch.int32), case.block_tables, 2, 10)
    out = make(variant).paged_attention(torch.randn(3, 2, 16), case.cache, rows, 0.25)
    assert out[0].isfinite().all()
    assert torch.equal(out[1:], torch.zeros(2, 2, 16))


def test_scores_far_apart(make: Make, variant: str) -> None:
    case = make_case([300], 1, 16, 16, torch.float32, 0)
    q = torch.randn(1, 1, 16) * 200
    out = make(variant).paged_attention(q, case.cache, rows_of(case, [1], [299]), 1.0)
    torch.testing.assert_close(out.double(), causal(case, q, [1], [299], 1.0, None), rtol=1e-4, atol=1e-4)


def test_bad_blocks_and_lengths_raise(make: Make, variant: str) -> None:
    case = make_case([300], 1, 16, 16, torch.float32, 0, spare=0)
    kernels, q = make(variant), torch.randn(1, 2, 16)
    with pytest.raises(IndexError, match="longer than its block table"):
        kernels.paged_attention(q, case.cache, rows_of(case, [1], [500]), 1.0)
    rows = rows_of(case, [1], [299])
    with pytest.raises(IndexError, match="max_length"):
        kernels.paged_attention(q, case.cache, replace(rows, max_length=129), 1.0)
    case.block_tables[0, 3] = 1000
    with pytest.raises(IndexError, match="block table names a block outside"):
        kernels.paged_attention(q, case.cache, rows, 1.0)
    with pytest.raises(ValueError, match="queries must be"):
        kernels.paged_attention(torch.randn(1, 2, 8), case.cache, rows, 1.0)


def block_reference(
    case: Case, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None, causal: bool
) -> Tensor:
    rows = []
    for s, length in enumerate(lengths):
        keys = torch.cat([case.keys[s][:length].double(), k[s].double()])
        values = torch.cat([case.values[s][:length].double(), v[s].double()])
        place = torch.arange(keys.shape[0])
        count = q.shape[1]
        last = [length + (i if causal else count) for i in range(count)]
        visible = [(place > length + i - (window or 10**9)) & (place <= last[i]) for i in range(count)]
        rows.append(attention(q[s], [keys] * count, [values] * count, visible, scale))
    return torch.stack(rows)


@some
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    block_rows=st.integers(1, 20),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([16, 24]),
    window=st.sampled_from([None, 1, 12, 150]),
    causal=st.booleans(),
    dtype=dtypes,
    cache_dtype=dtypes,
    seed=st.integers(0, 999),
)
def test_block_attention(
    make: Make,
    variant: str,
    lengths: list[int],
    block_rows: int,
    group: int,
    head_dim: int,
    window: int | None,
    causal: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    seed: int,
) -> None:
    case = make_case([max(length, 1) for length in lengths], 2, head_dim, 16, cache_dtype, seed)
    g = torch.Generator().manual_seed(seed)
    n = len(lengths)
    q = torch.randn(n, block_rows, 2 * group, head_dim, generator=g).to(dtype)
    # As a drafter lays them out: slices of one product's rows.
    kv = torch.randn(n * block_rows, 4, head_dim, generator=g).to(dtype)
    k, v = (part.unflatten(0, (n, block_rows)) for part in (kv[:, :2], kv[:, 2:]))
    context = torch.tensor(lengths)
    out = make(variant).block_attention(q, k, v, case.cache, context, case.block_tables, 0.25, window, causal=causal)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-5
    expected = block_reference(case, q, k, v, lengths, 0.25, window, causal)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_blocks_threads_and_variants_do_not_show(make: Make, variant: str) -> None:
    lengths = [140, 0, 256]
    case = make_case([140, 1, 256], 2, 16, 16, torch.bfloat16, 0)
    q, kv = torch.randn(3, 7, 4, 16), torch.randn(3, 7, 4, 16)
    k, v = kv[:, :, :2], kv[:, :, 2:]
    context = torch.tensor(lengths)

    def run(kernels: NativeKernels, part: slice) -> Tensor:
        return kernels.block_attention(
            q[part], k[part], v[part], case.cache, context[part], case.block_tables[part], 0.25, 200
        )

    expected = run(make("portable", 1), slice(0, 3))
    for threads in (1, 2, 3):
        assert torch.equal(run(make(variant, threads), slice(0, 3)), expected)
    for s in range(3):
        assert torch.equal(run(make(variant), slice(s, s + 1))[0], expected[s])


def test_rows_that_no_sequence_has_are_zero(make: Make, variant: str) -> None:
    """Whatever the row starts say, nothing beside the result is written."""
    case = make_case([3], 1, 16, 16, torch.float32, 0)
    memory = torch.full((6, 2, 16), 7.0)
    for starts in ([0, 0], [0, -3], [-5, -1], [9, 9]):
        rows = AttentionRows(torch.tensor([0, 1]), torch.tensor(starts, dtype=torch.int32), case.block_tables, 2, 3)
        memory.fill_(7.0)
        make(variant).executor.paged_attention(
            torch.randn(2, 2, 16),
            case.cache.keys,
            case.cache.values,
            rows.positions,
            rows.row_starts,
            rows.block_tables,
            2,
            3,
            0.25,
            0,
            memory[2:4],
        )
        assert (memory[:2] == 7).all()
        assert (memory[4:] == 7).all()
        assert starts == [9, 9] or (memory[2:4] == 0).all()
