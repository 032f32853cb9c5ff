"""Tokens drawn by the device: the distribution and the random number of the torch reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkgap.config import SamplingParams
from sparkgap.device.cpu import CpuGraph
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.rounds.drawing import DeviceDraw
from sparkgap.rounds.logits import probabilities
from sparkgap.rounds.random import Purpose, uniform_number

Make = Callable[..., NativeKernels]

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.05, 0.7, 1.0, 3.0, 1e30]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 10**6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


def assert_drawn_from(logits: torch.Tensor, params: SamplingParams, key: tuple[int, int], token: int) -> None:
    """`token` is what the reference draws, or its share of the unit interval ends within a rounding of the number."""
    probs = probabilities(logits[None], [params])[0].double()
    cumulative = probs.cumsum(0)
    number = uniform_number(*key, Purpose.TARGET) * cumulative[-1]
    begin = cumulative[token] - probs[token]
    tolerance = 2e-6
    if params.top_p < 1:
        # Where a sum reaches top_p up to a rounding, the set has one token more or less.
        tolerance += 1.01 * float(probs[probs > 0].min())
    assert begin - tolerance <= number <= cumulative[token] + tolerance


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=PARAMS,
    vocab=st.sampled_from([1, 2, 15, 16, 17, 300, 5000]),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 0.5, 4.0, 60.0]),
)
def test_as_the_reference(
    make: Make, variant: str, params: SamplingParams, vocab: int, seed: int, spread: float
) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    logits[1, : vocab // 2] = -torch.inf
    keys = [(seed * 7919 + row, row * 1000 + seed % 5) for row in range(3)]
    tokens = DeviceDraw(make(variant))(logits, [params] * 3, keys).token_ids.tolist()
    for row, token in enumerate(tokens):
        if params.greedy:
            assert token == int(logits[row].argmax())
        else:
            assert_drawn_from(logits[row], params, keys[row], token)


def test_exact_cases(make: Make, variant: str) -> None:
    """Equal logits have no rounding: the token is the reference's."""
    draw = DeviceDraw(make(variant))
    logits = torch.zeros(1, 64)
    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.25),
        SamplingParams(temperature=0.3, min_p=1.0),
        SamplingParams(temperature=1.0, top_k=5),
    ):
        for seed in range(40):
            kept = 16 if params.top_p < 1 else 64
            expected = int(uniform_number(seed, 9, Purpose.TARGET) * kept)
            assert draw(logits, [params], [(seed, 9)]).token_ids.tolist() == [expected]


def test_variants_threads_and_neighbours_do_not_show(make: Make, variant: str) -> None:
    logits = torch.randn(9, 3001, generator=torch.Generator().manual_seed(1)) * 3
    params = [
        SamplingParams(temperature=0.3 * row, top_p=0.9 if row % 2 else 1.0, top_k=50 * (row % 3)) for row in range(9)
    ]
    keys = [(2**63 + row, 10 * row) for row in range(9)]
    expected = DeviceDraw(make("portable", 1))(logits, params, keys)
    for threads in (1, 2, 4):
        draw = DeviceDraw(make(variant, threads))
        assert torch.equal(draw(logits, params, keys).token_ids, expected.token_ids)
        assert torch.equal(draw(logits, params, keys).largest, logits.amax(-1))
        assert torch.equal(draw(logits[4:6], params[4:6], keys[4:6]).token_ids, expected.token_ids[4:6])


def test_rows_of_one_sequence_and_rows_that_are_not_numbers(make: Make, variant: str) -> None:
    kernels = make(variant)
    logits = torch.randn(8, 70)
    logits[2, 9], logits[3] = torch.nan, -torch.inf
    logits[5, 3] = torch.inf
    operands: dict[str, Any] = {
        "temperatures": torch.tensor([1.0, 0.0]),
        "log_min_p": torch.full((2,), -torch.inf),
        "top_k": torch.tensor([0, 0]),
        "top_p": torch.tensor([1.0, 1.0], dtype=torch.float64),
        "seeds": torch.tensor([-5, 6]),
        "positions": torch.tensor([30, 2**40]),
        "token_ids": torch.full((8,), -1),
        "scores": torch.zeros(8),
    }
    graph = CpuGraph(kernels.executor)
    with graph.capture():
        kernels.draw_tokens(logits, **operands)
    graph.replay()
    torch.testing.assert_close(operands["scores"], logits.amax(-1), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(operands["token_ids"][4:], logits[4:].argmax(-1))
    params = SamplingParams(temperature=1.0)
    for row in (0, 1):
        assert_drawn_from(logits[row], params, (-5, 31 + row), int(operands["token_ids"][row]))
    assert ((operands["token_ids"] >= 0) & (operands["token_ids"] < 70)).all()
    for name, wrong in {"top_p": torch.ones(2), "seeds": torch.zeros(3), "scores": torch.zeros(7)}.items():
        with pytest.raises(ValueError, match=name):
            kernels.draw_tokens(logits, **(operands | {name: wrong}))
