"""A drafter's operations on the native kernels: against the torch reference, row by row, and recorded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkgap.device.cpu import CpuGraph
from sparkgap.ops import DraftHeads, LinearWeight, TorchKernels
from sparkgap.ops.native_kernels import NativeKernels

Make = Callable[..., NativeKernels]
REFERENCE = TorchKernels()
KINDS = ["none", "vanilla", "gated", "rnn"]
some = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_heads(
    kind: str, vocab: int, draft_vocab: int, hidden: int, rank: int, confidence: str, seed: int = 0
) -> DraftHeads:
    """Heads whose products are plain `LinearWeight`s, as the reference takes them."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads = DraftHeads()
    if draft_vocab < vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        heads = replace(heads, target_ids=ids)
    if confidence != "none":
        width = hidden + (rank if confidence == "markov" and kind != "none" else 0)
        heads = replace(heads, confidence_weight=randn(width) * width**-0.5, confidence_bias=randn(1))
    if kind == "none":
        return heads
    shape = {"vanilla": None, "gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}[kind]
    projection = None if shape is None else LinearWeight(randn(*shape) * shape[1] ** -0.5, randn(shape[0]))
    return replace(
        heads,
        head_type=kind,
        w1=randn(vocab, rank),
        w2=LinearWeight(randn(draft_vocab, rank) * rank**-0.5),
        projection=projection,
    )


def prepared(kernels: NativeKernels, heads: DraftHeads) -> DraftHeads:
    def pack(weight: LinearWeight | None) -> LinearWeight | None:
        return None if weight is None else kernels.prepare_linear(weight.weight, weight.bias)

    return replace(heads, w2=pack(heads.w2), projection=pack(heads.projection))


def block(sequences: int, rows: int, vocab: int, draft_vocab: int, hidden: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sequences, rows, draft_vocab, generator=generator)
    features = torch.randn(sequences, rows, hidden, generator=generator)
    return logits, features, torch.randint(0, vocab, (sequences,), generator=generator)


def assert_chains_agree(ours: Any, reference: Any, tolerance: float = 1e-5) -> None:
    assert torch.equal(ours.token_ids, reference.token_ids)
    torch.testing.assert_close(ours.scores, reference.scores, rtol=tolerance, atol=tolerance)
    assert (ours.confidences is None) == (reference.confidences is None)
    if ours.confidences is not None:
        torch.testing.assert_close(ours.confidences, reference.confidences, rtol=tolerance, atol=tolerance)


@some
@given(sequences=st.integers(1, 9), rows=st.integers(1, 9), seed=st.integers(0, 999))
def test_draft_inputs(make: Make, variant: str, sequences: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(0, 50000, (sequences,), generator=generator)
    lengths = torch.randint(0, 8000, (sequences,), generator=generator)
    ours = make(variant).draft_inputs(anchors, lengths, rows, 7)
    for a, b in zip(ours, REFERENCE.draft_inputs(anchors, lengths, rows, 7), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
@some
@given(data=st.data())
def test_chain_equals_the_reference(make: Make, variant: str, kind: str, data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 90))
    draft_vocab = data.draw(st.integers(1, vocab))
    hidden, rank = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    sequences, lead = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 2))
    rows, seed = lead + data.draw(st.integers(1, 6)), data.draw(st.integers(0, 999))
    heads = make_heads(kind, vocab, draft_vocab, hidden, rank, data.draw(st.sampled_from(["none", "plain", "markov"])))
    if data.draw(st.booleans()):
        heads = heads.calibrate([(0.5 + 0.75 * place, place - 1.5) for place in range(rows - lead)])
    kernels = make(variant)
    inputs = block(sequences, rows, vocab, draft_vocab, hidden, seed)
    chain = kernels.draft_chain(*inputs, prepared(kernels, heads), lead)
    assert_chains_agree(chain, REFERENCE.draft_chain(*inputs, heads, lead))


@pytest.mark.parametrize("kind", KINDS)
def test_step_equals_the_chain_and_the_reference(make: Make, variant: str, kind: str) -> None:
    heads = make_heads(kind, 300, 211, 24, 20, "markov")
    kernels = make(variant)
    packed = prepared(kernels, heads)
    logits, hidden, anchors = block(3, 5, 300, 211, 24, 1)
    chain = kernels.draft_chain(logits, hidden, anchors, packed)
    previous, state, expected_state = anchors, None, None
    for row in range(5):
        step = kernels.draft_step(logits[:, row], hidden[:, row], previous, state, packed)
        expected = REFERENCE.draft_step(logits[:, row], hidden[:, row], previous, expected_state, heads)
        torch.testing.assert_close(step.logits, expected.logits, rtol=1e-5, atol=1e-5)
        state, expected_state = step.state, expected.state
        assert (state is None) == (expected_state is None)
        assert heads.target_ids is not None
        previous = heads.target_ids[step.logits.argmax(1)]
        assert torch.equal(previous, chain.token_ids[:, row])
        assert torch.equal(step.logits.amax(1), chain.scores[:, row])
        assert step.confidences is not None
        assert chain.confidences is not None
        assert torch.equal(step.confidences, chain.confidences[:, row])


@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_threads_and_variants_do_not_show(
    make: Make, variant: str, kind: str, quantization: str | None
) -> None:
    heads = make_heads(kind, 700, 600, 40, 24, "markov")
    logits, hidden, anchors = block(7, 4, 700, 600, 40, 2)

    def run(kernels: NativeKernels, part: slice) -> Any:
        return kernels.draft_chain(logits[part], hidden[part], anchors[part], prepared(kernels, heads))

    expected = run(make("portable", 1, quantization=quantization), slice(0, 7))
    for threads in (1, 2, 3):
        kernels = make(variant, threads, quantization=quantization)
        parts = [slice(0, 7), slice(0, 2), slice(3, 4), slice(6, 7)]
        for part in parts:
            for a, b in zip(run(kernels, part), expected, strict=True):
                assert torch.equal(a, b[part])


@pytest.mark.parametrize("form", ["w8a8", "float32", "bfloat16"])
@some
@given(data=st.data())
def test_vanilla_chain_in_one_kernel_equals_its_steps(make: Make, variant: str, form: str, data: st.DataObject) -> None:
    """Every bit, with shares of the vocabulary that are empty, and logits that are equal or not numbers."""
    vocab = data.draw(st.integers(1, 130))
    draft_vocab = data.draw(st.integers(1, vocab))
    hidden, rank = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 3, 16, 40, 64, 65]))
    sequences, lead = data.draw(st.sampled_from([1, 2, 3, 8, 12, 13, 25])), data.draw(st.integers(0, 1))
    steps, seed = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 999))
    heads = make_heads(
        "vanilla", vocab, draft_vocab, hidden, rank, data.draw(st.sampled_from(["none", "plain", "markov"])), seed
    )
    assert heads.w2 is not None
    if data.draw(st.booleans()):
        heads = replace(heads, w2=LinearWeight(heads.w2.weight, torch.randn(draft_vocab)))
    if form == "bfloat16":
        assert heads.w1 is not None
        assert heads.w2 is not None
        heads = replace(heads, w1=heads.w1.bfloat16(), w2=LinearWeight(heads.w2.weight.bfloat16(), heads.w2.bias))
    if data.draw(st.booleans()):
        heads = heads.calibrate([(0.5 + 0.75 * place, place - 1.5) for place in range(steps + 1)])
    logits, features, anchors = block(sequences, lead + steps, vocab, draft_vocab, hidden, seed)
    spoilt = data.draw(st.sampled_from(["nothing", "equal", "nan", "infinite"]))
    if spoilt == "equal":
        logits = logits.round()
        heads = replace(heads, w1=torch.zeros_like(heads.w1))
    elif spoilt != "nothing":
        value = torch.nan if spoilt == "nan" else -torch.inf
        logits = logits.masked_fill(torch.rand(logits.shape) < data.draw(st.sampled_from([0.05, 1.0])), value)
    kernels = make(variant, data.draw(st.sampled_from([1, 2, 5])), quantization="w8a8" if form == "w8a8" else None)
    packed = prepared(kernels, heads)
    chain = kernels.draft_chain(logits, features, anchors, packed, lead)
    assert (chain.confidences is not None) == heads.has_confidences
    steps_chain = type(chain)(*(None if t is None else torch.empty_like(t.t().contiguous()) for t in chain))
    kernels._chain_by_steps(logits, features, anchors, packed, lead, steps_chain)
    for ours, expected in zip(chain, steps_chain, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, expected.t(), rtol=0, atol=0, equal_nan=True)


def test_one_call_a_token(make: Make, variant: str) -> None:
    kernels = make(variant, quantization="w8a8")
    heads = prepared(kernels, make_heads("vanilla", 300, 211, 24, 20, "markov"))
    graph, inputs = CpuGraph(kernels.executor), block(2, 7, 300, 211, 24, 0)
    with graph.capture():
        kernels.draft_chain(*inputs, heads)
    assert [call.kind for call in graph.profile(1)] == ["MarkovStep"] * 7 + ["MarkovEnd"]


def test_a_token_outside_the_head_is_reported(make: Make, variant: str) -> None:
    kernels = make(variant)
    heads = prepared(kernels, make_heads("vanilla", 30, 30, 8, 4, "markov"))
    logits, hidden, _ = block(2, 3, 30, 30, 8, 0)
    for anchor in (-1, 30):
        with pytest.raises(IndexError, match="token id"):
            kernels.draft_chain(logits, hidden, torch.tensor([0, anchor]), heads)


def test_wrong_operands_of_a_chain_are_refused() -> None:
    kernels = NativeKernels(threads=1)
    heads = prepared(kernels, make_heads("vanilla", 30, 20, 8, 4, "markov"))
    logits, hidden, anchors = block(2, 3, 30, 20, 8, 0)
    with pytest.raises(ValueError, match=r"\[draft_vocab, rank\]"):
        kernels.draft_chain(torch.zeros(2, 3, 19), hidden, anchors, replace(heads, target_ids=None))
    with pytest.raises(ValueError, match="lead_rows"):
        kernels.draft_chain(logits, hidden, anchors, heads, -1)
    with pytest.raises(ValueError, match="anchors"):
        kernels.draft_chain(logits, hidden, anchors[:1], heads)
    with pytest.raises(ValueError, match="confidence_weights"):
        kernels.draft_chain(logits, hidden, anchors, heads.calibrate([(1.0, 0.0)] * 2))


def test_broken_and_equal_logits(make: Make, variant: str) -> None:
    """As torch: the first of equals, and a NaN is larger than every number and shows in the score."""
    kernels = make(variant)
    logits = torch.full((6, 1, 40), -torch.inf)
    logits[1, 0, 17], logits[1, 0, 3] = torch.nan, torch.inf
    logits[2, 0, 30:] = torch.inf
    logits[3, 0, 5], logits[3, 0, 39] = 2.0, 2.0
    logits[4, 0, 39] = torch.nan
    logits[5] = torch.nan
    inputs = (logits, torch.zeros(6, 1, 3), torch.zeros(6, dtype=torch.int64), DraftHeads())
    ours, reference = kernels.draft_chain(*inputs), REFERENCE.draft_chain(*inputs)
    assert torch.equal(ours.token_ids, reference.token_ids)
    torch.testing.assert_close(ours.scores, reference.scores, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_chain_gives_the_same_bits(make: Make, variant: str, kind: str) -> None:
    kernels = make(variant)
    heads = prepared(kernels, make_heads(kind, 90, 70, 24, 20, "markov"))
    logits, hidden, anchors = block(3, 5, 90, 70, 24, 0)
    graph = CpuGraph(kernels.executor)
    with graph.capture():
        recorded = kernels.draft_chain(logits, hidden, anchors, heads, 1)
        blocks = kernels.draft_inputs(anchors, anchors, 5, 9)
    for seed in range(20):
        for static, fresh in zip((logits, hidden, anchors), block(3, 5, 90, 70, 24, seed), strict=True):
            static.copy_(fresh)
        graph.replay()
        expected = kernels.draft_chain(logits, hidden, anchors, heads, 1)
        for a, b in zip(recorded, expected, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(blocks, kernels.draft_inputs(anchors, anchors, 5, 9), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": torch.zeros(2, 9, dtype=torch.bfloat16)}, "base must be float32"),
        ({"base": torch.zeros(2, 0)}, "at least one feature"),
        ({"bias": torch.zeros(2, 8)}, r"bias must be \[2, 9\]"),
        ({"target_ids": torch.zeros(8, dtype=torch.int64)}, "target_ids"),
        ({"target_ids": torch.zeros(9, dtype=torch.int32)}, "target_ids"),
        ({"token_ids": torch.zeros(2)}, "token_ids"),
        ({"scores": torch.zeros(3)}, "scores"),
    ],
)
def test_wrong_operands_are_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    operands = {
        "base": torch.zeros(2, 9),
        "bias": None,
        "target_ids": None,
        "token_ids": torch.zeros(2, dtype=torch.int64),
        "scores": torch.zeros(2),
    }
    kernels = NativeKernels(threads=1)
    kernels.executor.draft_pick(**operands)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        kernels.executor.draft_pick(**(operands | changes))  # type: ignore[arg-type]
