"""Operations that do several things to a row at once: bit for bit what the single ones give, and what torch gives."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkgap.device.cpu import CaptureError, CpuGraph
from sparkgap.ops import Kernels, KVCache, LinearWeight, RotaryTable, TorchKernels
from sparkgap.ops.native_kernels import NativeKernels

Make = Callable[..., NativeKernels]
some = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@some
@given(
    rows=st.integers(0, 20),
    features=st.integers(1, 100),
    out_features=st.integers(1, 70),
    dtype=dtypes,
    adds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_norm_linear(
    make: Make,
    variant: str,
    rows: int,
    features: int,
    out_features: int,
    dtype: torch.dtype,
    adds: bool,
    seed: int,
) -> None:
    kernels = make(variant, quantization="w8a8")
    weight = kernels.prepare_linear(randn(out_features, features, seed=seed))
    x, norm = randn(rows, features, seed=seed + 1, dtype=dtype), randn(features, seed=seed + 2, dtype=dtype)
    residual = randn(rows, features, seed=seed + 3, dtype=dtype) if adds else None
    fused = kernels.norm_linear(x, residual, norm, 1e-5, weight)
    for ours, single in zip(fused, Kernels.norm_linear(kernels, x, residual, norm, 1e-5, weight), strict=True):
        assert torch.equal(ours, single)


@some
@given(rows=st.integers(0, 20), features=st.integers(1, 100), dtype=dtypes, seed=st.integers(0, 99))
def test_silu_mul_linear(make: Make, variant: str, rows: int, features: int, dtype: torch.dtype, seed: int) -> None:
    kernels = make(variant, quantization="w8a8")
    weight = kernels.prepare_linear(randn(33, features, seed=seed), randn(33, seed=seed))
    x = randn(rows, 2 * features, seed=seed + 1, dtype=dtype) * 4
    assert torch.equal(kernels.silu_mul_linear(x, weight), Kernels.silu_mul_linear(kernels, x, weight))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_unquantized_products_are_composed(kernels: str) -> None:
    ours: Kernels = NativeKernels(threads=1) if kernels == "native" else TorchKernels()
    raw, x, norm = randn(9, 20, seed=0), randn(3, 20, seed=1), randn(20, seed=2)
    weight, gated = ours.prepare_linear(raw), ours.prepare_linear(randn(5, 10, seed=3))
    reference = TorchKernels()
    product, total = ours.norm_linear(x, x, norm, 1e-5, weight)
    assert torch.equal(total, x + x)
    torch.testing.assert_close(product, reference.linear(reference.rms_norm(x + x, norm, 1e-5), LinearWeight(raw)))
    expected = reference.linear(reference.silu_mul(x), LinearWeight(randn(5, 10, seed=3)))
    torch.testing.assert_close(ours.silu_mul_linear(x, gated), expected)


@some
@given(
    rows=st.integers(1, 20),
    heads=st.integers(0, 5),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 20),
    rest=st.integers(0, 9),
    norms=st.booleans(),
    dtype=dtypes,
    cache_dtype=dtypes,
    seed=st.integers(0, 99),
)
def test_rotary_kv_write(
    make: Make,
    variant: str,
    rows: int,
    heads: int,
    kv_heads: int,
    half: int,
    rest: int,
    norms: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    seed: int,
) -> None:
    kernels, head_dim = make(variant), 2 * half + rest
    generator = torch.Generator().manual_seed(seed)
    qkv = randn(rows, heads + 2 * kv_heads + 1, head_dim, seed=seed, dtype=dtype)[:, 1:]
    angles = randn(50, half, seed=3)
    table, positions = RotaryTable(angles.cos(), angles.sin()), torch.randint(0, 50, (rows,), generator=generator)
    slots = torch.randperm(24, generator=generator)[:rows]
    slots[torch.rand(rows, generator=generator) < 0.3] = -1
    norm = tuple(randn(head_dim, seed=s, dtype=dtype) for s in (4, 5)) if norms else (None, None)

    def run(kernels: Kernels, fused: bool) -> list[torch.Tensor]:
        shape = (6, 4, kv_heads, head_dim)
        cache = KVCache(*(torch.full(shape, torch.nan, dtype=cache_dtype) for _ in range(2)))
        write = type(kernels).rotary_kv_write if fused else Kernels.rotary_kv_write
        queries = write(kernels, qkv, positions, table, cache, slots, *norm, 1e-6)
        return [queries, cache.keys, cache.values]

    ours = run(kernels, True)
    for a, b in zip(ours, run(kernels, False), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if dtype == cache_dtype:  # the reference does not convert
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        for a, b in zip(ours, run(TorchKernels(), False), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    untouched = [slot for slot in range(24) if slot not in slots.tolist()]
    assert ours[1].view(24, -1)[untouched].isnan().all()


def test_norm_rotary(make: Make, variant: str) -> None:
    kernels, x, norm = make(variant), randn(7, 9, 24, seed=0)[:, 2:6], randn(24, seed=1)
    angles = randn(50, 8, seed=3)
    table, positions = RotaryTable(angles.cos(), angles.sin()), torch.arange(7)
    ours = kernels.norm_rotary(x, norm, 1e-6, positions, table)
    assert torch.equal(ours, Kernels.norm_rotary(kernels, x, norm, 1e-6, positions, table))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_threads_and_variants_do_not_show(make: Make, variant: str, dtype: torch.dtype) -> None:
    rows, head_dim = 64, 32
    x, r = randn(rows, 90, seed=0, dtype=dtype), randn(rows, 90, seed=1, dtype=dtype)
    norm, raw, down = randn(90, seed=2), randn(50, 90, seed=3), randn(40, 45, seed=4)
    qkv, angles = randn(rows, 5, head_dim, seed=5, dtype=dtype), randn(rows, 16, seed=6)
    table, positions = RotaryTable(angles.cos(), angles.sin()), torch.arange(rows)

    def run(kernels: NativeKernels, part: slice) -> list[torch.Tensor]:
        cache = KVCache(torch.zeros(rows, 1, 1, head_dim), torch.zeros(rows, 1, 1, head_dim))
        weight, gated = kernels.prepare_linear(raw), kernels.prepare_linear(down)
        queries = kernels.rotary_kv_write(qkv[part], positions[part], table, cache, positions[part], norm[:32], None)
        written = [cache.keys[part].flatten(1), cache.values[part].flatten(1)]
        products = kernels.norm_linear(x[part], r[part], norm, 1e-5, weight)
        return [*products, kernels.silu_mul_linear(x[part], gated), queries, *written]

    expected = run(make("portable", 1, quantization="w8a8"), slice(0, rows))
    for threads in (1, 2, 3):
        kernels = make(variant, threads, quantization="w8a8")
        for part in [slice(0, rows), slice(3, 5), slice(11, 19), *(slice(row, row + 1) for row in range(0, rows, 7))]:
            for a, b in zip(run(kernels, part), expected, strict=True):
                assert torch.equal(a, b[part])


def test_wrong_operands_are_refused() -> None:
    kernels = NativeKernels(threads=1, quantization="w8a8")
    weight, x, norm = kernels.prepare_linear(torch.zeros(8, 16)), torch.zeros(2, 16), torch.ones(16)
    out = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="residual and sum are given together"):
        kernels.executor.norm_linear(x, x, norm, 0.0, weight.packed, out, None)
    with pytest.raises(ValueError, match="residual must be of x's shape"):
        kernels.executor.norm_linear(x, x[:1], norm, 0.0, weight.packed, out, x.clone())
    with pytest.raises(ValueError, match="in_features"):
        kernels.executor.norm_linear(x[:, :8], None, norm[:8], 0.0, weight.packed, out, None)
    with pytest.raises(ValueError, match="out must be"):
        kernels.executor.silu_linear(torch.zeros(2, 32), weight.packed, out[:1])
    plain = NativeKernels(threads=1).prepare_linear(torch.zeros(8, 16))
    with pytest.raises(ValueError, match="weight must be int8"):
        kernels.executor.silu_linear(torch.zeros(2, 32), plain.packed, out)
    cache = KVCache(torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1, 16))
    table, place = RotaryTable(torch.ones(4, 8), torch.zeros(4, 8)), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="qkv must be"):
        kernels.executor.rotary_write(
            torch.zeros(2, 1, 16),
            None,
            None,
            0.0,
            place,
            table.cos,
            table.sin,
            cache.keys,
            cache.values,
            place,
            x[:, None],
        )
    with pytest.raises(IndexError, match="slot lies outside the KV cache"):
        kernels.rotary_kv_write(torch.zeros(2, 3, 16), place, table, cache, torch.tensor([0, 8]))
    with pytest.raises(IndexError, match="position lies outside the rotary table"):
        kernels.rotary_kv_write(torch.zeros(2, 3, 16), torch.tensor([0, 4]), table, cache, place)


def test_profile_times_every_share_of_every_call() -> None:
    kernels = NativeKernels(threads=3, quantization="w8a8")
    weight, x, norm = kernels.prepare_linear(randn(64, 32, seed=0)), randn(5, 32, seed=1), torch.ones(32)
    graph = CpuGraph(kernels.executor)
    with pytest.raises(CaptureError, match="no calls"):
        graph.profile()
    with graph.capture():
        recorded = kernels.norm_linear(x, None, norm, 1e-5, weight)[0]
    timings = graph.profile(3)
    assert [timing.kind for timing in timings] == ["NormQuantize", "LinearInt8"]
    assert all(len(timing.share_ns) == 3 and min(timing.share_ns) >= 0 for timing in timings)
    assert torch.equal(recorded, kernels.norm_linear(x, None, norm, 1e-5, weight)[0])
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        graph.profile(0)
