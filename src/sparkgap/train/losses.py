"""The losses of DSpark training (arXiv 2607.05147) on a reduced draft vocabulary.

The target's distribution at a row is known by its most probable tokens (the cached top k). What lies outside them,
and what lies outside the draft vocabulary, can never be accepted, so it counts as distance.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowTargets:
    """What the target says at each draft row.

    Attributes:
        labels: int64 `[rows]`, draft id of the token that follows; -1 where it is outside the draft vocabulary.
        top_ids: int64 `[rows, k]`, draft ids of the target's most probable tokens; -1 outside the vocabulary.
        top_probabilities: float32 `[rows, k]`, their probabilities.
        weights: float32 `[rows]`, weight of each row in the loss; 0 for rows past the end of an answer.
    """

    labels: Tensor
    top_ids: Tensor
    top_probabilities: Tensor
    weights: Tensor


@dataclass(frozen=True)
class LossWeights:
    """Weights of cross-entropy, total variation and confidence (the paper's are 0.1, 0.9 and 1)."""

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0


def position_weights(num_positions: int, gamma: float) -> Tensor:
    """`exp(-(k - 1) / gamma)` for k = 1 ... `num_positions`: float32 `[num_positions]`."""
    return torch.exp(-torch.arange(num_positions, dtype=torch.float32) / gamma)


class _HeadLoss(torch.autograd.Function):
    """Weighted CE and TV of `softmax(features @ head.T + markov @ w2.T)`, a chunk of rows at a time.

    The gradient is computed with the value, so that a chunk's logits live in cache once and are never stored.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        markov: Tensor,
        w2: Tensor,
        head: Tensor,
        targets: RowTargets,
        weights: LossWeights,
        normalizer: float,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, width = features.shape
        joined = torch.cat([head, w2], dim=1)
        inputs = torch.cat([features, markov], dim=1)
        input_gradients = torch.empty_like(inputs)
        w2_gradient = torch.zeros(w2.shape, dtype=torch.float32, device=w2.device)
        cross_entropy, overlap = (torch.empty(rows, device=features.device) for _ in range(2))
        correct = torch.empty(rows, dtype=torch.bool, device=features.device)
        for start in range(0, rows, chunk_rows):
            part = slice(start, min(start + chunk_rows, rows))
            logits = (inputs[part] @ joined.T).float()
            labels, top_ids = targets.labels[part], targets.top_ids[part]
            known, top_known = labels >= 0, top_ids >= 0
            safe_labels, safe_top = labels.clamp_min(0)[:, None], top_ids.clamp_min(0)
            # The label's logit is compared with the largest, which the exponentials need anyway: no argmax.
            largest = logits.amax(-1)
            label_logits = logits.gather(1, safe_labels)[:, 0]
            correct[part] = (label_logits == largest) & known
            # Left unnormalized: dividing by the sum is left to each row's weight, which saves passes over the logits.
            exponentials = logits.sub_(largest[:, None]).exp_()
            total = exponentials.sum(-1)
            cross_entropy[part] = torch.where(known, total.log() + largest - label_logits, 0.0)
            top_draft = exponentials.gather(1, safe_top) / total[:, None] * top_known
            top_target = targets.top_probabilities[part] * top_known
            overlap[part] = torch.minimum(top_draft, top_target).sum(-1)
            # d overlap / d logits = p * (below - sum(p * below)), below = 1 where the draft is under the target.
            below = torch.where(top_draft < top_target, top_draft, 0.0)
            row_weight = targets.weights[part] / normalizer
            ce_weight = row_weight * weights.cross_entropy * known
            tv_weight = row_weight * weights.total_variation
            gradient = exponentials.mul_(((ce_weight + tv_weight * below.sum(-1)) / total)[:, None])
            gradient.scatter_add_(1, safe_top, below * -tv_weight[:, None])
            gradient.scatter_add_(1, safe_labels, -ce_weight[:, None])
            gradient = gradient.to(inputs.dtype)
            input_gradients[part] = gradient @ joined
            w2_gradient += (gradient.T @ markov[part]).float()
        row_loss = weights.cross_entropy * cross_entropy + weights.total_variation * (1 - overlap)
        loss = (row_loss * targets.weights).sum() / normalizer
        ctx.save_for_backward(input_gradients[:, :width], input_gradients[:, width:], w2_gradient.to(w2.dtype))
        ctx.mark_non_differentiable(overlap, correct, cross_entropy)
        return loss, overlap, correct, cross_entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        features, markov, w2 = ctx.saved_tensors
        scale = gradients[0]
        return features * scale, markov * scale, w2 * scale, None, None, None, None, None


@dataclass(frozen=True)
class HeadLoss:
    """Result of `head_loss`.

    Attributes:
        loss: weighted sum over rows divided by the normalizer, differentiable.
        overlap: `[rows]`, `1 - ½‖p_draft - p_target‖₁`: the chance that a sampled draft token is accepted.
        correct: bool `[rows]`, the most probable draft token is the one that follows.
        cross_entropy: `[rows]`, 0 where the label is outside the draft vocabulary.
    """

    loss: Tensor
    overlap: Tensor
    correct: Tensor
    cross_entropy: Tensor


def head_loss(
    features: Tensor,
    markov: Tensor,
    w2: Tensor,
    head: Tensor,
    targets: RowTargets,
    weights: LossWeights,
    normalizer: float,
    chunk_rows: int = 256,
) -> HeadLoss:
    """Loss of draft rows without keeping their logits.

    Args:
        features: `[rows, hidden]`, the drafter's normed hidden states.
        markov: `[rows, rank]`, `W1[previous token]` (after any gate).
        w2: `[draft_vocab, rank]`.
        head: `[draft_vocab, hidden]`, the frozen LM head; it gets no gradient.
        targets: what the target says.
        weights: of the loss's terms.
        normalizer: divides the weighted sum over rows: the sum of all row weights of a step.
        chunk_rows: rows whose logits exist at a time.
    """
    loss, overlap, correct, cross_entropy = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        features, markov, w2, head, targets, weights, normalizer, chunk_rows
    )
    return HeadLoss(loss, overlap, correct, cross_entropy)


def confidence_loss(logits: Tensor, overlap: Tensor, row_weights: Tensor, normalizer: float) -> Tensor:
    """Weighted binary cross-entropy of confidence `logits` `[rows]` against `overlap` `[rows]` (a constant)."""
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, overlap.clamp(0, 1), reduction="none")
    return (each * row_weights).sum() / normalizer
