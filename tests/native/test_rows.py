from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkgap.ops import KVCache, RotaryTable, TorchKernels
from sparkgap.ops.native_kernels import NativeKernels

Make = Callable[..., NativeKernels]
REFERENCE = TorchKernels()
some = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-2 if actual.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@some
@given(rows=st.integers(1, 20), features=st.integers(1, 100), dtype=dtypes, seed=st.integers(0, 999))
def test_norms(make: Make, variant: str, rows: int, features: int, dtype: torch.dtype, seed: int) -> None:
    kernels = make(variant)
    x, r = randn(rows, features, seed=seed, dtype=dtype), randn(rows, features, seed=seed + 1, dtype=dtype)
    w = randn(features, seed=2, dtype=dtype)
    close(kernels.rms_norm(x, w, 1e-5), REFERENCE.rms_norm(x.float(), w.float(), 1e-5).to(dtype))
    out, total = kernels.add_rms_norm(x, r, w, 1e-5)
    assert torch.equal(total, x + r)
    close(out, REFERENCE.rms_norm(total.float(), w.float(), 1e-5).to(dtype))


def test_norm_of_strided_heads(make: Make, variant: str) -> None:
    kernels = make(variant)
    qkv, w = randn(5, 9, 24), randn(24, seed=1)
    heads = qkv[:, 2:6]
    close(kernels.rms_norm(heads, w, 1e-6), REFERENCE.rms_norm(heads, w, 1e-6))


@some
@given(
    rows=st.integers(1, 20),
    half=st.integers(1, 40),
    rest=st.integers(0, 20),
    dtype=dtypes,
    seed=st.integers(0, 999),
)
def test_rotary(make: Make, variant: str, rows: int, half: int, rest: int, dtype: torch.dtype, seed: int) -> None:
    x = randn(rows, 5, 2 * half + rest, seed=seed, dtype=dtype)[:, 1:4]
    angles = randn(50, half, seed=3)
    table = RotaryTable(angles.cos(), angles.sin())
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(seed))
    close(make(variant).rotary(x, positions, table), REFERENCE.rotary(x, positions, table))


@some
@given(rows=st.integers(1, 20), features=st.integers(1, 100), dtype=dtypes, seed=st.integers(0, 999))
def test_silu_mul(make: Make, variant: str, rows: int, features: int, dtype: torch.dtype, seed: int) -> None:
    x = randn(rows, 2 * features, seed=seed, dtype=dtype) * 8
    expected = REFERENCE.silu_mul(x.float()).to(dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(make(variant).silu_mul(x), expected, rtol=tolerance, atol=tolerance)


def test_silu_of_extremes(make: Make, variant: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -87.0, -0.0, 0.0, 87.0, 200.0, 1e30, torch.nan]])
    out = make(variant).silu_mul(torch.cat([gate, torch.ones_like(gate)], 1))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_write(make: Make, variant: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    shape = (5, 4, 2, 24)
    cache = KVCache(torch.full(shape, torch.nan, dtype=cache_dtype), torch.full(shape, torch.nan, dtype=cache_dtype))
    qkv = randn(4, 7, 24, dtype=dtype)
    slots = torch.tensor([7, -1, 19, 0])
    make(variant).kv_write(qkv[:, 3:5], qkv[:, 5:7], cache, slots)
    for stored, given_ in ((cache.keys, qkv[:, 3:5]), (cache.values, qkv[:, 5:7])):
        flat = stored.view(20, 2, 24)
        assert torch.equal(flat[[7, 19, 0]], given_[[0, 2, 3]].to(cache_dtype))
        untouched = [slot for slot in range(20) if slot not in (7, 19, 0)]
        assert flat[untouched].isnan().all()


def test_embed_convert_and_concat(make: Make, variant: str) -> None:
    kernels = make(variant)
    table = randn(30, 21, dtype=torch.bfloat16)
    ids = torch.tensor([29, 0, 7])
    assert torch.equal(kernels.embed(ids, table), table[ids].float())
    assert torch.equal(make(variant, activation_dtype=torch.bfloat16).embed(ids, table), table[ids])
    assert torch.equal(kernels.to_float32(table), table.float())
    parts = [randn(4, n, seed=n) for n in (3, 16, 20)]
    assert torch.equal(kernels.concat(parts), torch.cat(parts, 1))


def test_bfloat16_is_rounded_as_torch_does(make: Make, variant: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32).view(1, -1)
    out = torch.empty(1, 4096, dtype=torch.bfloat16)
    make(variant).executor.convert(x, out)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@some
@given(rows=st.integers(1, 9), features=st.integers(1, 100), dtype=dtypes, seed=st.integers(0, 999))
def test_argmax(make: Make, variant: str, rows: int, features: int, dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-5, 5, (rows, features), generator=g).to(dtype)  # many equals
    assert torch.equal(make(variant).argmax(x), x.argmax(1))


def test_argmax_of_nan_and_infinity(make: Make, variant: str) -> None:
    x = torch.full((3, 40), -torch.inf)
    x[1, 17] = torch.nan
    x[1, 3] = torch.inf
    x[2, 30:] = torch.inf
    assert make(variant).argmax(x).tolist() == [0, 17, 30]


def test_indices_out_of_range_raise(make: Make, variant: str) -> None:
    kernels = make(variant)
    table = RotaryTable(torch.ones(4, 8), torch.zeros(4, 8))
    cache = KVCache(torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1, 16))
    x = torch.ones(2, 1, 16)
    for bad in (-1, 4):
        with pytest.raises(IndexError, match="position lies outside the rotary table"):
            kernels.rotary(x, torch.tensor([0, bad]), table)
        with pytest.raises(IndexError, match="token id lies outside the embedding table"):
            kernels.embed(torch.tensor([0, bad]), torch.zeros(4, 3))
    for bad in (-2, 8):
        with pytest.raises(IndexError, match="slot lies outside the KV cache"):
            kernels.kv_write(x, x, cache, torch.tensor([0, bad]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_threads_and_variants_do_not_show(make: Make, variant: str, dtype: torch.dtype) -> None:
    rows = 33
    x, r, w = randn(rows, 90, dtype=dtype), randn(rows, 90, seed=1, dtype=dtype), randn(90, seed=2, dtype=dtype)
    angles = randn(64, 15, seed=3)
    table, positions = RotaryTable(angles.cos(), angles.sin()), torch.arange(rows)

    def run(kernels: NativeKernels, part: slice) -> list[torch.Tensor]:
        return [
            *kernels.add_rms_norm(x[part], r[part], w, 1e-5),
            kernels.rms_norm(x[part], w, 1e-5),
            kernels.silu_mul(x[part] * 3),
            kernels.rotary(x[part].view(-1, 3, 30), positions[part], table),
        ]

    expected = run(make("portable", 1), slice(0, rows))
    for threads in (1, 2, 3):
        for a, b in zip(run(make(variant, threads), slice(0, rows)), expected, strict=True):
            assert torch.equal(a, b)
    for row in range(rows):
        for a, b in zip(run(make(variant), slice(row, row + 1)), expected, strict=True):
            assert torch.equal(a[0], b[row])
