"""A drafter's sequential heads: their weights, and the reference of the operations that only drafters use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparkgap.ops.operands import LinearWeight

    Linear = Callable[[Tensor, LinearWeight], Tensor]


@dataclass(frozen=True)
class DraftHeads:
    """Weights of a drafter's sequential heads: how one draft token changes the logits of the next.

    With `e = w1[token before]` and the row's hidden state `h`, the bias on the draft logits is `w2` times `e`
    (vanilla), `sigmoid(projection [h; e]) * e` (gated), or `tanh(o)` (rnn), where
    `[g; c; o] = projection [s; e; h]` and the state becomes `sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)`, zero at
    the block's start. The confidence is `sigmoid(confidence_weight . [h; e] + confidence_bias)`.
    Source: arXiv 2607.05147.

    Attributes:
        head_type: `none` for no bias.
        w1: `[vocab, rank]`, indexed by target ids; None without a Markov head.
        w2: `[draft_vocab, rank]`; None without a Markov head.
        projection: `[rank, hidden + rank]` (gated) or `[3 * rank, 2 * rank + hidden]` (rnn).
        confidence_weight: float32 `[hidden + rank]`, or `[hidden]` for a head that does not read `e`; None
            without a confidence head.
        confidence_bias: float32 `[1]`; None without a confidence head.
        target_ids: int64 `[draft_vocab]`, target id of each draft id; None when they are the same.
        calibrated: the confidence's weights `[places, width of confidence_weight]` and biases `[places, 1]` at each
            place of the block, with the place's calibration in them; None when they are the same everywhere.
    """

    head_type: Literal["none", "vanilla", "gated", "rnn"] = "none"
    w1: Tensor | None = None
    w2: LinearWeight | None = None
    projection: LinearWeight | None = None
    confidence_weight: Tensor | None = None
    confidence_bias: Tensor | None = None
    target_ids: Tensor | None = None
    calibrated: tuple[Tensor, Tensor] | None = None

    @property
    def has_confidences(self) -> bool:
        """Whether there is a confidence head."""
        return self.confidence_weight is not None and self.confidence_bias is not None

    def confidence_places(self) -> tuple[Tensor, Tensor]:
        """`calibrated`, or one place that stands for all."""
        if self.calibrated is not None:
            return self.calibrated
        assert self.confidence_weight is not None
        assert self.confidence_bias is not None
        return self.confidence_weight[None], self.confidence_bias[None]

    def calibrate(self, scaling: Sequence[tuple[float, float]]) -> DraftHeads:
        """The heads with the confidence's logit divided by a temperature and moved by an offset.

        Args:
            scaling: temperature and offset of each place of the block; empty leaves the heads as they are.
        """
        weight, bias = self.confidence_weight, self.confidence_bias
        if weight is None or bias is None or not scaling:
            return self
        weights = torch.stack([weight / t for t, _ in scaling])
        return replace(self, calibrated=(weights, torch.stack([bias / t + offset for t, offset in scaling])))

    def at(self, place: int) -> DraftHeads:
        """The heads for the draft token at a place of the block, from 0."""
        if self.calibrated is None:
            return self
        weights, biases = self.calibrated
        return replace(self, confidence_weight=weights[place], confidence_bias=biases[place], calibrated=None)


class DraftStep(NamedTuple):
    """One step of the heads' chain.

    Attributes:
        logits: float32 `[sequences, draft_vocab]`, base logits and bias.
        state: `[sequences, rank]`, what the next step takes (rnn), else None.
        confidences: float32 `[sequences]`, or None without a confidence head.
    """

    logits: Tensor
    state: Tensor | None
    confidences: Tensor | None


class DraftChain(NamedTuple):
    """All steps of the heads' chain.

    Attributes:
        token_ids: int64 `[sequences, steps]`, target ids.
        scores: float32 `[sequences, steps]`, the largest logit of each step; NaN if any logit of the step is NaN.
        confidences: float32 `[sequences, steps]`, or None without a confidence head.
    """

    token_ids: Tensor
    scores: Tensor
    confidences: Tensor | None


def draft_inputs(
    anchors: Tensor, context_lengths: Tensor, block_rows: int, mask_token_id: int
) -> tuple[Tensor, Tensor]:
    """See `Kernels.draft_inputs`."""
    token_ids = torch.full((len(anchors), block_rows), mask_token_id, dtype=torch.int64, device=anchors.device)
    token_ids[:, 0] = anchors
    positions = context_lengths.unsqueeze(1) + torch.arange(block_rows, device=anchors.device)
    return token_ids.flatten(), positions.flatten()


class StepRows(NamedTuple):
    """Rows of draft passes that have one row of each sequence.

    Attributes:
        sources: int64 `[sequences]`, slot of the last position of each context; 0 of a sequence without one.
        positions: int64 `[steps, sequences]`, that position, then one further each step.
        slots: int64 `[steps, sequences]`, their slots; -1 in the first step, whose entry the context has.
    """

    sources: Tensor
    positions: Tensor
    slots: Tensor


def step_rows(context_lengths: Tensor, block_tables: Tensor, steps: int, block_size: int, max_length: int) -> StepRows:
    """See `Kernels.step_rows`."""
    limit = min(max_length, block_tables.shape[1] * block_size)
    pads = context_lengths <= 0
    step = torch.arange(steps, device=context_lengths.device)[:, None]
    wanted = (context_lengths - 1).clamp(min=0) + step
    positions = wanted.clamp(max=limit - 1).masked_fill(pads, 0)
    blocks = block_tables.long().gather(1, positions.t() // block_size).t()
    slots = blocks * block_size + positions % block_size
    writes = ~pads & (wanted < limit) & (step > 0)
    return StepRows(slots[0].masked_fill(pads, 0), positions, slots.masked_fill(~writes, -1))


def draft_pick(logits: Tensor, target_ids: Tensor | None, token_ids: Tensor, scores: Tensor) -> None:
    """See `Kernels.draft_pick`."""
    draft_ids = logits.argmax(dim=-1)
    token_ids.copy_(draft_ids if target_ids is None else target_ids[draft_ids])
    scores.copy_(logits.amax(dim=-1))


def draft_step(
    linear: Linear, base_logits: Tensor, hidden: Tensor, previous: Tensor, state: Tensor | None, heads: DraftHeads
) -> DraftStep:
    """See `Kernels.draft_step`."""
    if heads.w1 is None or heads.w2 is None:
        return DraftStep(base_logits, None, _confidences(hidden, None, heads))
    embedded = heads.w1[previous]
    latent, state = _latent(linear, embedded, hidden, state, heads)
    logits = base_logits + linear(latent, heads.w2).to(torch.float32)
    return DraftStep(logits, state, _confidences(hidden, embedded, heads))


def draft_chain(
    linear: Linear, base_logits: Tensor, hidden: Tensor, anchors: Tensor, heads: DraftHeads, lead_rows: int
) -> DraftChain:
    """See `Kernels.draft_chain`."""
    state: Tensor | None = None
    if heads.head_type == "rnn" and heads.w1 is not None:
        for row in range(lead_rows):
            _, state = _latent(linear, heads.w1[anchors], hidden[:, row], state, heads)
    previous = anchors
    token_ids, scores, confidences = [], [], []
    for row in range(lead_rows, base_logits.shape[1]):
        place = heads.at(row - lead_rows)
        step = draft_step(linear, base_logits[:, row], hidden[:, row], previous, state, place)
        draft_ids = step.logits.argmax(dim=-1)
        previous = draft_ids if heads.target_ids is None else heads.target_ids[draft_ids]
        state = step.state
        token_ids.append(previous)
        scores.append(step.logits.amax(dim=-1))
        if step.confidences is not None:
            confidences.append(step.confidences)
    return DraftChain(
        torch.stack(token_ids, dim=1),
        torch.stack(scores, dim=1),
        torch.stack(confidences, dim=1) if confidences else None,
    )


def _latent(
    linear: Linear, embedded: Tensor, hidden: Tensor, state: Tensor | None, heads: DraftHeads
) -> tuple[Tensor, Tensor | None]:
    """What `w2` multiplies, `[sequences, rank]`, and the next state."""
    if heads.head_type == "vanilla":
        return embedded, None
    if heads.projection is None:
        raise ValueError(f"a {heads.head_type} head needs a projection")
    if heads.head_type == "gated":
        gate = torch.sigmoid(linear(torch.cat((hidden, embedded), dim=-1), heads.projection))
        return gate * embedded, None
    if state is None:
        state = torch.zeros_like(embedded)
    gate, candidate, output = linear(torch.cat((state, embedded, hidden), dim=-1), heads.projection).chunk(3, dim=-1)
    keep = torch.sigmoid(gate)
    return torch.tanh(output), keep * state + (1.0 - keep) * torch.tanh(candidate)


def _confidences(hidden: Tensor, embedded: Tensor | None, heads: DraftHeads) -> Tensor | None:
    weight, bias = heads.confidence_weight, heads.confidence_bias
    if weight is None or bias is None:
        return None
    reads_embedding = weight.shape[0] > hidden.shape[-1]
    features = torch.cat((hidden, embedded), dim=-1) if reads_embedding and embedded is not None else hidden
    return torch.sigmoid(features.to(torch.float32) @ weight + bias)
