from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_reference import linear_w8a8, quantize
from torch import Tensor

from sparkgap.errors import CheckpointError, ConfigError
from sparkgap.ops import LinearWeight, TorchKernels
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.ops.native_weights import NativeLinearWeight

Make = Callable[..., NativeKernels]
FORMS = ["w8a8", "bfloat16", "float32"]


def prepared(kernels: NativeKernels, form: str, weight: Tensor, bias: Tensor | None) -> LinearWeight:
    if form == "bfloat16":
        weight = weight.bfloat16()
    return kernels.prepare_linear(weight, bias)


def kernels_for(make: Make, variant: str, form: str, threads: int = 2) -> NativeKernels:
    return make(variant, threads, quantization="w8a8" if form == "w8a8" else None)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    outs=st.integers(1, 130),
    ins=st.integers(1, 140),
    bias=st.booleans(),
    bf16=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_w8a8_equals_its_emulation(
    make: Make, variant: str, rows: int, outs: int, ins: int, bias: bool, bf16: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, ins, generator=g) * torch.rand(rows, 1, generator=g).exp()
    w, b = torch.randn(outs, ins, generator=g), torch.randn(outs, generator=g) if bias else None
    if bf16:
        x, w = x.bfloat16(), w.bfloat16()
    kernels = kernels_for(make, variant, "w8a8")
    assert torch.equal(kernels.linear(x, kernels.prepare_linear(w, b)), linear_w8a8(x, w, b))


def test_w8a8_at_the_largest_sums(make: Make, variant: str) -> None:
    kernels = kernels_for(make, variant, "w8a8")
    x = torch.tensor([[1.0], [-1.0]]).expand(2, 1536).contiguous()
    w = torch.tensor([[1.0], [-1.0]]).repeat(20, 1).expand(40, 1536).contiguous()
    assert torch.equal(kernels.linear(x, kernels.prepare_linear(w)), linear_w8a8(x, w))


def test_w8a8_zero_rows_zero_channels_and_nan(make: Make, variant: str) -> None:
    kernels = kernels_for(make, variant, "w8a8")
    w = torch.randn(18, 24)
    w[3] = 0
    x = torch.randn(4, 24)
    x[1] = 0
    x[2, 5] = torch.nan
    y = kernels.linear(x, kernels.prepare_linear(w))
    assert torch.equal(y[1], torch.zeros(18))
    assert torch.equal(y[:, 3][[0, 3]], torch.zeros(2))
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 3]], linear_w8a8(x[[0, 3]], w))


def test_w8a8_refuses_weights_that_are_not_finite(make: Make, variant: str) -> None:
    kernels = kernels_for(make, variant, "w8a8")
    for bad in (torch.nan, torch.inf):
        w = torch.randn(18, 24)
        w[17, 3] = bad
        with pytest.raises(CheckpointError, match="cannot be quantized"):
            kernels.prepare_linear(w)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    outs=st.integers(1, 130),
    ins=st.integers(1, 140),
    bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
@pytest.mark.parametrize("form", ["bfloat16", "float32"])
def test_float_linear(
    make: Make, variant: str, form: str, rows: int, outs: int, ins: int, bias: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(rows, ins, generator=g), torch.randn(outs, ins, generator=g)
    b = torch.randn(outs, generator=g) if bias else None
    kernels = kernels_for(make, variant, form)
    y = kernels.linear(x, prepared(kernels, form, w, b))
    kept = w.bfloat16() if form == "bfloat16" else w
    expected = torch.nn.functional.linear(x.double(), kept.double(), None if b is None else b.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-5)
    half = kernels.linear(x.bfloat16(), prepared(kernels, form, w, b))
    wide = kernels.linear(x.bfloat16().float(), prepared(kernels, form, w, b))
    assert torch.equal(half, wide.bfloat16())


@pytest.mark.parametrize("form", ["bfloat16", "float32"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(slots=st.lists(st.sampled_from([-1, 0, 7]), min_size=1, max_size=60), seed=st.integers(0, 2**20))
def test_rows_without_a_slot_are_left_out(make: Make, variant: str, form: str, slots: list[int], seed: int) -> None:
    kernels = kernels_for(make, variant, form)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(len(slots), 33, generator=g)
    weight = prepared(kernels, form, torch.randn(70, 33, generator=g), torch.randn(70, generator=g))
    out, live = torch.full((len(slots), 70), -9.0), torch.tensor(slots) >= 0
    kernels.executor.linear(x, weight.packed, out, torch.tensor(slots))
    assert torch.equal(out[live], kernels.linear(x, weight)[live])
    assert (out[~live] == -9.0).all()
    assert torch.equal(kernels.written_linear(x, weight, torch.tensor(slots))[live], out[live])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.lists(st.sampled_from([-1, 0, 7]), min_size=1, max_size=40),
    outs=st.integers(1, 70),
    ins=st.integers(1, 140),
    seed=st.integers(0, 2**20),
)
def test_inputs_of_very_different_sizes(
    make: Make, variant: str, dtype: torch.dtype, slots: list[int], outs: int, ins: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    sizes = 10 ** (3 * torch.rand(ins, generator=g))
    x = (torch.randn(len(slots), ins, generator=g) * sizes).to(dtype)
    w = torch.randn(outs, ins, generator=g) / sizes
    w[:, 0] = 0
    kernels = kernels_for(make, variant, "w8a8")
    weight = kernels.prepare_equalized(w)
    y = kernels.linear(x, weight)
    reference = TorchKernels(quantization="w8a8")
    assert torch.equal(y, reference.linear(x, reference.prepare_equalized(w)))
    live = torch.tensor(slots) >= 0
    assert torch.equal(kernels.written_linear(x, weight, torch.tensor(slots))[live], y[live])
    normed, _ = kernels.norm_linear(x, None, torch.ones(ins, dtype=dtype), 1e-5, weight)
    assert torch.equal(normed, kernels.linear(kernels.rms_norm(x, torch.ones(ins, dtype=dtype), 1e-5), weight))
    assert kernels.packed_form(weight) is None


def test_equalized_inputs_keep_what_one_scale_would_lose(make: Make, variant: str) -> None:
    sizes = torch.logspace(0, 3, 512)
    x, w = torch.randn(6, 512) * sizes, torch.randn(96, 512) / sizes
    kernels, exact = kernels_for(make, variant, "w8a8"), x.double() @ w.double().T

    def error(weight: NativeLinearWeight) -> float:
        return float((kernels.linear(x, weight) - exact).norm() / exact.norm())

    assert error(kernels.prepare_equalized(w)) < 0.02
    assert error(kernels.prepare_linear(w)) > 0.1


def test_equalized_weights_that_cannot_be(make: Make, variant: str) -> None:
    kernels = kernels_for(make, variant, "w8a8")
    for bad in (torch.nan, torch.inf):
        w = torch.randn(18, 24)
        w[17, 3] = bad
        with pytest.raises(CheckpointError, match="cannot be quantized"):
            kernels.prepare_equalized(w)
        with pytest.raises(CheckpointError, match="cannot be quantized"):
            TorchKernels(quantization="w8a8").prepare_equalized(w)
    w = torch.randn(18, 24)
    for other in (make(variant, 2), TorchKernels()):
        weight = other.prepare_equalized(w)
        assert weight.multipliers is None
        x = torch.randn(3, 24)
        assert torch.equal(other.linear(x, weight), other.linear(x, other.prepare_linear(w)))
    kept, x, out = make(variant, 1).prepare_linear(w), torch.randn(3, 24), torch.empty(3, 18)
    with pytest.raises(ValueError, match="multipliers"):
        make(variant, 1).executor.linear(x, kept.packed, out, None, torch.ones(24))
    with pytest.raises(ValueError, match="multipliers"):
        kernels.executor.linear(x, kernels.prepare_linear(w).packed, out, None, torch.ones(23))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [2, 7, 12, 13, 48, 49, 64, 130])
def test_rows_are_independent(make: Make, variant: str, form: str, rows: int) -> None:
    g = torch.Generator().manual_seed(rows)
    x, w, b = (
        torch.randn(rows, 100, generator=g),
        torch.randn(150, 100, generator=g),
        torch.randn(150, generator=g),
    )
    kernels = kernels_for(make, variant, form)
    weight = prepared(kernels, form, w, b)
    together = kernels.linear(x, weight)
    for row in range(rows):
        assert torch.equal(kernels.linear(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("form", FORMS)
def test_same_bits_for_any_threads_and_variant(make: Make, variant: str, form: str) -> None:
    g = torch.Generator().manual_seed(1)
    x, w, b = torch.randn(21, 130, generator=g), torch.randn(203, 130, generator=g), torch.randn(203, generator=g)
    one = kernels_for(make, "portable", form, threads=1)
    expected = one.linear(x, prepared(one, form, w, b))
    for threads in (1, 2, 3):
        kernels = kernels_for(make, variant, form, threads)
        assert torch.equal(kernels.linear(x, prepared(kernels, form, w, b)), expected)


def test_rows_may_be_strided(make: Make, variant: str) -> None:
    wide = torch.randn(5, 90)
    w = torch.randn(33, 40)
    for form in FORMS:
        kernels = kernels_for(make, variant, form)
        weight = prepared(kernels, form, w, None)
        part = wide[:, 20:60]
        assert torch.equal(kernels.linear(part, weight), kernels.linear(part.contiguous(), weight))


def test_quantized_activations(make: Make, variant: str) -> None:
    x = torch.randn(6, 70)
    quantized, scales = torch.zeros(6, 128, dtype=torch.uint8), torch.zeros(6)
    make(variant).executor.quantize_rows(x, quantized, scales)
    q, expected = quantize(x)
    assert torch.equal(quantized[:, :70].double() - 128, q)
    assert (quantized[:, 70:] == 128).all()
    assert torch.equal(scales, expected)


def test_empty_and_wrong_operands(make: Make, variant: str) -> None:
    kernels = make(variant)
    weight = kernels.prepare_linear(torch.randn(8, 16))
    assert kernels.linear(torch.empty(0, 16), weight).shape == (0, 8)
    with pytest.raises(ValueError, match=r"x must be \[rows, 16\], got float32 \[2, 15\]"):
        kernels.linear(torch.zeros(2, 15), weight)
    with pytest.raises(ValueError, match="x must be float32 or bfloat16"):
        kernels.linear(torch.zeros(2, 16, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match="contiguous rows"):
        kernels.linear(torch.zeros(16, 2).T, weight)
    with pytest.raises(TypeError, match="prepare_linear"):
        kernels.linear(torch.zeros(2, 16), LinearWeight(torch.zeros(8, 16)))


def test_unknown_variant_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="SPARKGAP_ISA=mmx: there are no kernels called mmx"):
        make("mmx")
