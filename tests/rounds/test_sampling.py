"""Sampling against an independent reference: a plain numpy loop over one row's sorted tokens."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sparkgap.config import SamplingParams
from sparkgap.errors import EngineError
from sparkgap.rounds import logits as logits_module
from sparkgap.rounds.logits import SamplingRow, inverse_cdf, probabilities
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import Sequence

VOCAB = 12
EOS = (3,)


def sequence(params, prompt=(1, 2, 2), output=(4, 4, 5), seed=1, sequence_id=0):
    return Sequence(sequence_id, params, seed, list(prompt), list(output))


def random_logits(rows, vocab=VOCAB, seed=0, scale=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def reference(logits, params, prompt, output):
    """The distribution of one row, in float64, tokens taken one by one."""
    x = [float(value) for value in logits]
    if len(output) < params.min_tokens:
        for token in (*EOS, *(params.stop_token_ids or ())):
            x[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    counts = Counter(output)
    for token in range(len(x)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= params.frequency_penalty * counts[token]
        x[token] -= params.presence_penalty * (counts[token] > 0)
    if params.greedy:
        result = np.zeros(len(x))
        result[int(np.argmax(x))] = 1
        return result
    weights = np.exp((np.array(x) - max(x)) / params.temperature)
    probs = weights / weights.sum()
    probs[probs < params.min_p * probs.max()] = 0
    if 0 < params.top_k < len(x):
        probs[probs < np.sort(probs)[-params.top_k]] = 0
    probs /= probs.sum()
    if params.top_p < 1:
        kept, mass = [], 0.0
        for token in np.argsort(-probs, kind="stable"):
            if mass >= params.top_p:
                break
            kept.append(token)
            mass += probs[token]
        mask = np.zeros(len(x))
        mask[kept] = 1
        probs = probs * mask / mass
    return probs


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.513, 0.871, 0.99, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, VOCAB, VOCAB + 5]),
    min_p=st.sampled_from([0.0, 0.07, 0.41, 1.0]),
    min_tokens=st.sampled_from([0, 3, 4]),
    stop_token_ids=st.sampled_from([None, [0], [7, 8]]),
    presence_penalty=st.sampled_from([0.0, 1.3, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.9, -1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.6, 0.5]),
    logit_bias=st.sampled_from([None, {2: 3.0, 9: -4.5}]),
)
tokens_strategy = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@given(
    st.lists(st.tuples(params_strategy, tokens_strategy, tokens_strategy), min_size=1, max_size=4),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=300)
def test_target_probabilities(rows, seed):
    logits = random_logits(len(rows), seed=seed)
    sequences = [sequence(p, prompt, output, sequence_id=i) for i, (p, prompt, output) in enumerate(rows)]
    got = Sampler("m", EOS).target_probabilities(logits, [SamplingRow(s) for s in sequences]).numpy()
    for row, (params, prompt, output) in enumerate(rows):
        np.testing.assert_allclose(got[row], reference(logits[row], params, prompt, output), atol=2e-6)


@given(params_strategy, tokens_strategy, tokens_strategy, st.lists(st.integers(0, VOCAB - 1), max_size=4))
@settings(deadline=None, max_examples=200)
def test_rows_see_the_draft_tokens_before_them(params, prompt, output, drafts):
    logits = random_logits(len(drafts) + 1)
    target = sequence(params, prompt, output)
    rows = [SamplingRow(target, tuple(drafts[:i])) for i in range(len(drafts) + 1)]
    sampler = Sampler("m", EOS)
    got = sampler.target_probabilities(logits, rows).numpy()
    for i in range(len(rows)):
        assert rows[i].position == len(prompt) + len(output) + i
        np.testing.assert_allclose(got[i], reference(logits[i], params, prompt, [*output, *drafts[:i]]), atol=2e-6)
    # Draft tokens seen in one round must not count in the next one.
    again = sampler.target_probabilities(logits[:1], rows[:1]).numpy()
    assert np.array_equal(again[0], got[0])


def test_penalties_follow_the_output_as_it_grows():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.2)
    target, sampler, logits = sequence(params, output=()), Sampler("m", EOS), random_logits(1)
    for token in (4, 4, 5, 1, 4):
        got = sampler.target_probabilities(logits, [SamplingRow(target)])[0].numpy()
        expected = reference(logits[0], params, target.prompt_token_ids, target.output_token_ids)
        np.testing.assert_allclose(got, expected, atol=2e-6)
        target.output_token_ids.append(token)
    sampler.release(target)
    other = sequence(params, prompt=(7,), output=(8,))
    got = sampler.target_probabilities(logits, [SamplingRow(other)])[0].numpy()
    np.testing.assert_allclose(got, reference(logits[0], params, [7], [8]), atol=2e-6)


CHI_SQUARE_CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(repetition_penalty=1.8),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(logit_bias={6: 2.0, 7: -100.0}),
    SamplingParams(min_tokens=10, stop_token_ids=[5]),
    SamplingParams(
        temperature=1.3, top_k=8, top_p=0.95, min_p=0.02, repetition_penalty=1.1, frequency_penalty=0.3,
        logit_bias={0: 1.0}, min_tokens=4,
    ),
]  # fmt: skip


@pytest.mark.parametrize("params", CHI_SQUARE_CASES)
def test_frequencies(params):
    draws, batch = 20_000, 2_000
    logits = random_logits(1, seed=5, scale=1.0)
    sampler, counts = Sampler("m", EOS), Counter()
    # One sequence a seed: what varies between the draws is the seed alone.
    shared = sequence(params)
    for start in range(0, draws, batch):
        rows = []
        for seed in range(start, start + batch):
            rows.append(SamplingRow(Sequence(0, params, seed, shared.prompt_token_ids, shared.output_token_ids)))
        counts.update(token.token_id for token in sampler.sample(logits.expand(batch, VOCAB), rows))
    expected = reference(logits[0], params, shared.prompt_token_ids, shared.output_token_ids) * draws
    assert all(expected[token] > 0 for token in counts)
    support = expected > 0
    assert support.sum() > 2
    observed = np.array([counts[token] for token in range(VOCAB)])
    assert stats.chisquare(observed[support], expected[support]).pvalue > 0.001


def test_frequencies_over_positions():
    logits, params, counts = random_logits(1, seed=6), SamplingParams(), Counter()
    rows = [SamplingRow(sequence(params, output=[0] * n, seed=99)) for n in range(4_000)]
    counts.update(t.token_id for t in Sampler("m", EOS).sample(logits.expand(len(rows), VOCAB), rows))
    expected = logits[0].double().softmax(-1).numpy() * len(rows)
    assert stats.chisquare([counts[token] for token in range(VOCAB)], expected).pvalue > 0.001


def test_top_k_keeps_ties_and_top_p_keeps_smallest_ids():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert (probabilities(logits, [SamplingParams(top_k=2)])[0] > 0).tolist() == [0, 1, 1, 1, 1, 0]
    flat = torch.zeros(1, 4)
    assert (probabilities(flat, [SamplingParams(top_p=0.5)])[0] > 0).tolist() == [1, 1, 0, 0]
    assert (probabilities(flat, [SamplingParams(top_p=0.51)])[0] > 0).tolist() == [1, 1, 1, 0]
    assert (probabilities(flat, [SamplingParams(top_p=1e-9)])[0] > 0).tolist() == [1, 0, 0, 0]
    assert (probabilities(flat, [SamplingParams(min_p=1.0)])[0] > 0).all()


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-4])
def test_tiny_temperatures_are_greedy(temperature):
    logits = random_logits(5)
    probs = probabilities(logits, [SamplingParams(temperature=temperature)] * 5)
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert torch.equal(probs.amax(-1), torch.ones(5))


def test_huge_temperature_is_uniform_over_what_is_not_masked():
    logits = torch.tensor([[5.0, -math.inf, 1.0, -3.0]])
    probs = probabilities(logits, [SamplingParams(temperature=1e300)])
    torch.testing.assert_close(probs, torch.tensor([[1 / 3, 0, 1 / 3, 1 / 3]]))


@given(st.floats(0.01, 1.0), st.integers(0, 10_000), st.sampled_from([0.01, 0.3, 1.0, 4.0]))
@settings(deadline=None, max_examples=60)
def test_top_p_candidates_equal_the_whole_sort(top_p, seed, scale):
    logits = random_logits(3, vocab=400, seed=seed, scale=scale).round(decimals=1)
    params = [SamplingParams(top_p=top_p), SamplingParams(top_p=0.5), SamplingParams()]
    whole = probabilities(logits, params)
    original = logits_module._TOP_P_CANDIDATES
    logits_module._TOP_P_CANDIDATES = 50
    try:
        assert torch.equal(probabilities(logits, params), whole)
    finally:
        logits_module._TOP_P_CANDIDATES = original


def test_inverse_cdf_edges():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for number, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3)):
        assert inverse_cdf(probs, torch.tensor([number], dtype=torch.float64)).tolist() == [token]


def mixed_rows(count):
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.7, logprobs=3),
        SamplingParams(temperature=0, repetition_penalty=1.4, logprobs=0),
        SamplingParams(top_k=5, presence_penalty=1.0),
        SamplingParams(min_p=0.05, logit_bias={2: 1.5}),
        SamplingParams(min_tokens=8, stop_token_ids=[1]),
    ]
    return [SamplingRow(sequence(kinds[i % 6], output=[i % 9, 4], seed=i, sequence_id=i)) for i in range(count)]


@pytest.mark.parametrize("vocab", [VOCAB, 3000])
def test_a_row_does_not_depend_on_its_neighbours(vocab):
    rows, logits = mixed_rows(13), random_logits(13, vocab=vocab)
    together = Sampler("m", EOS).sample(logits, rows)
    alone = [Sampler("m", EOS).sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(13)]
    assert together == alone
    backwards = Sampler("m", EOS).sample(logits.flip(0), rows[::-1])
    assert together == backwards[::-1]


def test_all_greedy_rows_do_no_work_but_argmax(monkeypatch):
    for name in ("probabilities", "inverse_cdf", "penalize", "mask_and_bias_"):
        monkeypatch.setattr(f"sparkgap.rounds.sampling.{name}", None)
    logits = random_logits(4)
    rows = [SamplingRow(sequence(SamplingParams(temperature=0), sequence_id=i)) for i in range(4)]
    assert [token.token_id for token in Sampler("m", EOS).sample(logits, rows)] == logits.argmax(-1).tolist()


def test_logprobs_are_of_the_raw_logits():
    params = SamplingParams(temperature=0, logprobs=4, logit_bias={11: 100.0})
    logits = random_logits(2)
    rows = [SamplingRow(sequence(params)), SamplingRow(sequence(SamplingParams(logprobs=2), sequence_id=1))]
    first, second = Sampler("m", EOS).sample(logits, rows)
    expected = logits.double().log_softmax(-1).numpy()
    assert first.token_id == 11
    for token, row, number in ((first, 0, 4), (second, 1, 2)):
        order = np.argsort(-expected[row], kind="stable")
        assert token.logprobs.chosen == pytest.approx(expected[row][token.token_id], abs=1e-5)
        assert order[token.logprobs.rank - 1] == token.token_id
        assert [token_id for token_id, _ in token.logprobs.top] == order[:number].tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(expected[row][order[:number]], abs=1e-5)


def test_logits_are_not_changed():
    logits = random_logits(13)
    copy = logits.clone()
    Sampler("m", EOS).sample(logits, mixed_rows(13))
    assert torch.equal(logits, copy)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_fail_their_row_only(bad):
    rows, logits = mixed_rows(6), random_logits(6)
    expected = Sampler("m", EOS).sample(logits, rows)
    for broken in range(6):
        damaged = logits.clone()
        damaged[broken, 9] = bad
        got = Sampler("bad-model", EOS).sample(damaged, rows)
        assert isinstance(got[broken], EngineError)
        assert "bad-model" in str(got[broken])
        assert got[:broken] + got[broken + 1 :] == expected[:broken] + expected[broken + 1 :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_masked_fails(temperature):
    stops = [token for token in range(VOCAB) if token not in EOS]
    params = SamplingParams(min_tokens=9, stop_token_ids=stops, temperature=temperature, top_p=0.5, top_k=3)
    rows = [SamplingRow(sequence(params)), SamplingRow(sequence(SamplingParams(), sequence_id=1))]
    failed, fine = Sampler("m", EOS).sample(random_logits(2), rows)
    assert isinstance(failed, EngineError)
    assert "min_tokens" in str(failed)
    assert not isinstance(fine, EngineError)
