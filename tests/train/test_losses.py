"""The fused loss against a naive one in float64 with autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkgap.train.losses import LossWeights, RowTargets, confidence_loss, head_loss, position_weights


def naive_loss(features, markov, w2, head, targets, weights):
    logits = features @ head.T + markov @ w2.T
    probabilities = logits.softmax(-1)
    rows = logits.shape[0]
    full = torch.zeros_like(probabilities)
    for row in range(rows):
        for draft_id, probability in zip(targets.top_ids[row], targets.top_probabilities[row], strict=True):
            if draft_id >= 0:
                full[row, draft_id] = probability
    # What is outside the draft vocabulary or the top k is distance that no draft can close.
    missing = 1 - full.sum(-1)
    total_variation = 0.5 * ((probabilities - full).abs().sum(-1) + missing)
    known = targets.labels >= 0
    cross_entropy = torch.where(
        known, -logits.log_softmax(-1).gather(1, targets.labels.clamp_min(0)[:, None])[:, 0], 0.0
    )
    each = weights.cross_entropy * cross_entropy + weights.total_variation * total_variation
    return (each * targets.weights).sum() / targets.weights.sum(), 1 - total_variation, cross_entropy


def random_rows(seed: int, rows: int, hidden: int = 6, rank: int = 3, vocabulary: int = 11, top: int = 4):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Places 0 ... 3 of a random order are the top tokens; half of them may lie outside the draft vocabulary.
    order = torch.stack([torch.randperm(vocabulary, generator=generator)[:top] for _ in range(rows)])
    outside = torch.rand(rows, top, generator=generator) < 0.25
    top_ids = torch.where(outside, -1, order)
    labels = torch.randint(-1, vocabulary, (rows,), generator=generator)
    probabilities = normal(rows, top + 1).softmax(-1)[:, :top]
    weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    weights[rows // 2] = 0
    targets = RowTargets(labels, top_ids, probabilities, weights + 1e-3 * (rows == 1))
    return normal(rows, hidden), normal(rows, rank), normal(vocabulary, rank), normal(vocabulary, hidden), targets


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 5), st.sampled_from([(0.1, 0.9), (1, 0), (0, 1)]))
def test_loss_and_gradients_equal_the_naive_ones(seed, rows, chunk, pair):
    features, markov, w2, head, targets = random_rows(seed, rows)
    weights = LossWeights(*pair)
    inputs = [x.clone().requires_grad_() for x in (features, markov, w2)]
    expected, overlap, cross_entropy = naive_loss(*inputs, head, targets, weights)
    wanted = torch.autograd.grad(expected, inputs)
    fused = [x.float().requires_grad_() for x in (features, markov, w2)]
    narrow = RowTargets(targets.labels, targets.top_ids, targets.top_probabilities.float(), targets.weights.float())
    result = head_loss(*fused, head.float(), narrow, weights, float(targets.weights.sum()), chunk)
    gradients = torch.autograd.grad(result.loss, fused)
    torch.testing.assert_close(result.loss, expected.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.overlap, overlap.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.cross_entropy, cross_entropy.float(), rtol=1e-4, atol=1e-5)
    for found, reference in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, reference.float(), rtol=1e-3, atol=1e-5)


def test_correct_says_where_the_most_probable_draft_token_is_the_label():
    head = torch.eye(3)
    features = torch.tensor([[9.0, 0, 0], [0, 9.0, 0], [0, 0, 9.0]])
    targets = RowTargets(torch.tensor([0, 2, -1]), torch.full((3, 1), -1), torch.ones(3, 1), torch.ones(3))
    empty = torch.zeros(3, 0)
    result = head_loss(features, empty, torch.zeros(3, 0), head, targets, LossWeights(), 3.0)
    assert result.correct.tolist() == [True, False, False]
    assert result.overlap.tolist() == [0, 0, 0]


def test_position_weights_decay_from_one():
    weights = position_weights(4, gamma=2.0)
    torch.testing.assert_close(weights, torch.exp(torch.tensor([0, -0.5, -1, -1.5])))


def test_confidence_loss_is_least_at_the_overlap():
    overlap = torch.tensor([0.2, 0.7])
    weights = torch.tensor([1.0, 0.5])
    best = torch.logit(overlap)
    least = confidence_loss(best, overlap, weights, 1.5)
    assert all(confidence_loss(best + shift, overlap, weights, 1.5) > least for shift in (-0.3, 0.3))
    expected = -(overlap * overlap.log() + (1 - overlap) * (1 - overlap).log())
    assert least == pytest.approx(float((expected * weights).sum() / 1.5), rel=1e-5)
