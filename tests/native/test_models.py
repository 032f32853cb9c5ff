"""Whole networks on the native kernels: against transformers, and against themselves in other batches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_reference import linear_w8a8
from tiny_models import CPU, Session, load_saved, tiny_model

from sparkgap.ops import LinearWeight, TorchKernels
from sparkgap.ops.native_kernels import NativeKernels

Make = Callable[..., NativeKernels]
FAMILIES = ["llama", "qwen3", "qwen2", "mistral"]


class EmulatedW8A8(TorchKernels):
    """The torch reference with products as W8A8 defines them."""

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return linear_w8a8(x, weight.weight, weight.bias)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(session: Session, chunks: dict[int, list[int]]) -> torch.Tensor:
    return session.decoder.logits(session.forward(chunks).hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(make: Make, variant: str, tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    session = Session(load_saved(model, tmp_path, make(variant)), 1)
    tokens = prompt(150)
    parts = [tokens[:100], tokens[100:101], tokens[101:109], tokens[109:]]
    ours = torch.cat([logits(session, {0: part}) for part in parts])
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_w8a8_equals_its_emulation(make: Make, variant: str, tmp_path: Path, family: str) -> None:
    """Integers are equal wherever the float operations between products round alike; a rounding that falls the
    other way moves one activation by one step of 1/127 of its row's largest, which is the tolerance's scale."""
    model = tiny_model(family)
    native = Session(load_saved(model, tmp_path, make(variant, quantization="w8a8")), 1)
    torch_session = Session(load_saved(model, tmp_path, EmulatedW8A8()), 1)
    tokens = prompt(60)
    ours, theirs = logits(native, {0: tokens}), logits(torch_session, {0: tokens})
    error = (ours - theirs).abs()
    assert error.median() < 1e-5
    assert error.max() < 0.05 * theirs.abs().max()


@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_do_not_depend_on_their_batch(
    make: Make, variant: str, tmp_path: Path, family: str, quantization: str | None
) -> None:
    """One token at a time, a prompt in one chunk, verification batches and several sequences: the same bits."""
    decoder = load_saved(
        tiny_model(family), tmp_path, make(variant, quantization=quantization), dtype=torch.bfloat16, device=CPU
    )
    tokens = [prompt(140, seed) for seed in range(3)]
    whole = [logits(Session(decoder, 3), {s: tokens[s]}) for s in range(3)]
    session = Session(decoder, 3)
    position = 0
    for width in (70, 1, 1, 8, 3, 48, 9):
        part = slice(position, position + width)
        together = logits(session, {s: tokens[s][part] for s in range(3)}).view(3, width, -1)
        for s in range(3):
            assert torch.equal(together[s], whole[s][part])
        position += width
    assert position == 140


def test_bfloat16_model_follows_the_float32_reference(make: Make, variant: str, tmp_path: Path) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    ours = Session(load_saved(model, tmp_path, make(variant), dtype=torch.bfloat16), 1)
    reference = Session(load_saved(model, tmp_path, TorchKernels(), dtype=torch.float32), 1)
    tokens = prompt(60)
    got, expected = logits(ours, {0: tokens}), logits(reference, {0: tokens})
    # Only the KV cache is rounded.
    assert (got - expected).abs().max() < 0.03 * expected.abs().max()


def test_captured_streams(make: Make, variant: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    ours = Session(load_saved(model, tmp_path, make(variant)), 1).forward({0: prompt(40)}, (2, 0)).captured
    reference = Session(load_saved(model, tmp_path, TorchKernels()), 1).forward({0: prompt(40)}, (2, 0)).captured
    assert ours is not None
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
