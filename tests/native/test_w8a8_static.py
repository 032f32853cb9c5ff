"""int8 weights as a quantized checkpoint holds them, and static activation scales: against the torch oracle."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkgap.device.cpu import CpuGraph
from sparkgap.ops import TorchKernels
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.ops.w8a8 import quantize_rows, quantize_weight

Make = Callable[..., NativeKernels]
TORCH = TorchKernels(quantization="w8a8")


def operands(rows: int, outs: int, ins: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, ins, generator=g) * torch.rand(rows, 1, generator=g).exp()
    return x, torch.randn(outs, ins, generator=g), torch.randn(outs, generator=g)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    outs=st.integers(1, 130),
    ins=st.integers(1, 140),
    input_scale=st.one_of(st.none(), st.floats(1e-3, 0.2)),
    bias=st.booleans(),
    bf16=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_products_equal_the_oracle(
    make: Make,
    variant: str,
    rows: int,
    outs: int,
    ins: int,
    input_scale: float | None,
    bias: bool,
    bf16: bool,
    seed: int,
) -> None:
    x, w, b = operands(rows, outs, ins, seed)
    x = x.bfloat16() if bf16 else x
    weight = quantize_weight(w, input_scale)
    native = make(variant)
    ours = native.linear(x, native.prepare_quantized(weight, b if bias else None))
    assert torch.equal(ours, TORCH.linear(x, TORCH.prepare_quantized(weight, b if bias else None)))


def test_wide_inputs_are_exact_in_the_oracle(make: Make, variant: str) -> None:
    x, w = torch.full((2, 5000), 3.0), torch.full((3, 5000), -2.0)
    native = make(variant)
    weight = quantize_weight(w, 3 / 127)
    ours = native.linear(x, native.prepare_quantized(weight))
    assert torch.equal(ours, TORCH.linear(x, TORCH.prepare_quantized(weight)))
    torch.testing.assert_close(ours, torch.full((2, 3), -30000.0))


@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (16, 64), (37, 130)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_quantized_weight_is_packed_as_one_that_the_kernels_quantize(
    make: Make, variant: str, outs: int, ins: int, bias: bool
) -> None:
    _, w, b = operands(1, outs, ins, outs)
    native = make(variant, quantization="w8a8")
    own = native.prepare_linear(w, b if bias else None)
    read = native.prepare_quantized(quantize_weight(w), b if bias else None)
    assert read.nbytes == own.nbytes
    assert read.packed.parts().keys() == own.packed.parts().keys()
    for name, part in own.packed.parts().items():
        assert torch.equal(read.packed.parts()[name], part), name


def test_parts_keep_their_memory(make: Make, variant: str) -> None:
    weight = make(variant).prepare_linear(torch.ones(3, 5), torch.arange(3.0))
    parts = weight.packed.parts()
    assert torch.equal(parts["bias"], torch.tensor([0.0, 1.0, 2.0] + [0.0] * 13))
    del weight
    assert parts["packed"].sum() == 15
    assert "scales" not in parts


@pytest.mark.parametrize("rows", [2, 12, 13, 49, 64])
def test_static_rows_are_independent(make: Make, variant: str, rows: int) -> None:
    x, w, b = operands(rows, 150, 100, rows)
    native = make(variant)
    weight = native.prepare_quantized(quantize_weight(w, 0.02), b)
    together = native.linear(x, weight)
    for row in range(rows):
        assert torch.equal(native.linear(x[row : row + 1], weight)[0], together[row])


def test_static_scales_saturate_and_tell_of_what_is_not_finite(make: Make, variant: str) -> None:
    x = torch.tensor([[10.0, -10.0, 0.5], [torch.nan, 0, 0], [0, torch.inf, 0], [0.1, 0.2, -torch.inf]])
    native, weight = make(variant), quantize_weight(torch.eye(3), 1 / 127)
    y = native.linear(x, native.prepare_quantized(weight))
    torch.testing.assert_close(y[0], torch.tensor([1.0, -1.0, 0.5]), atol=0.005, rtol=0)
    assert y[1:].isnan().all()
    assert TORCH.linear(x, TORCH.prepare_quantized(weight))[1:].isnan().all()


def test_static_activations(make: Make, variant: str) -> None:
    x = torch.randn(6, 70)
    quantized, scales = torch.zeros(6, 128, dtype=torch.uint8), torch.zeros(6)
    make(variant).executor.quantize_rows(x, quantized, scales, 0.01)
    q, expected = quantize_rows(x, 0.01)
    assert torch.equal(quantized[:, :70].float() - 128, q)
    assert (quantized[:, 70:] == 128).all()
    assert torch.equal(scales, expected)


def test_a_static_product_is_recorded(make: Make, variant: str) -> None:
    """A graph holds the weight, and its replay quantizes by the same scale."""
    native = make(variant)
    x, w, b = operands(3, 20, 40, 0)
    expected = native.linear(x, native.prepare_quantized(quantize_weight(w, 0.03), b))
    weight = native.prepare_quantized(quantize_weight(w, 0.03), b)
    graph = CpuGraph(native.executor)
    with graph.capture():
        y = native.linear(x, weight)
    del weight
    graph.replay()
    assert torch.equal(y, expected)


def test_wrong_blank_weights(make: Make, variant: str) -> None:
    executor = make(variant).executor
    for arguments in ((0, 4, "int8", False, 0.0), (4, 4, "int4", False, 0.0), (4, 70000, "int8", False, 0.0)):
        with pytest.raises(ValueError, match=r"weight|form"):
            executor.blank_weight(*arguments)
    for scale in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="input_scale"):
            executor.blank_weight(4, 4, "int8", False, scale)


def test_weights_kept_unquantized(make: Make, variant: str) -> None:
    x, w, b = operands(3, 20, 40, 0)
    quantizing, unquantized = make(variant, quantization="w8a8"), make(variant)
    kept = quantizing.prepare_linear(w, b, quantize=False)
    assert kept.form == "float32"
    assert torch.equal(quantizing.linear(x, kept), unquantized.linear(x, unquantized.prepare_linear(w, b)))
    plain = TorchKernels()
    kept = TORCH.prepare_linear(w, b, quantize=False)
    assert torch.equal(TORCH.linear(x, kept), plain.linear(x, plain.prepare_linear(w, b)))


def test_the_oracle_quantizes_as_the_kernels_do(make: Make, variant: str) -> None:
    x, w, b = operands(5, 33, 70, 1)
    native = make(variant, quantization="w8a8")
    assert torch.equal(native.linear(x, native.prepare_linear(w, b)), TORCH.linear(x, TORCH.prepare_linear(w, b)))
