"""A drafter's sequential heads: from the block's logits to draft tokens, one after the other."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparkgap.catalog.drafter_settings import DrafterSettings
from sparkgap.catalog.weights import WeightSource, read_weight
from sparkgap.ops.draft import DraftHeads
from sparkgap.ops.kernels import Kernels
from sparkgap.ops.operands import LinearWeight

Pick = Callable[[int, Tensor], Tensor]
"""Takes a step's number and its logits float32 `[sequences, draft_vocab]`; gives draft ids int64 `[sequences]`."""


class DraftOutput(NamedTuple):
    """What a draft block's pass gives.

    Attributes:
        row_logits: float32 `[sequences, block_rows, draft_vocab]`, before any Markov bias.
        row_hidden: `[sequences, block_rows, hidden]`, after the final norm.
        lead_rows: rows at the block's start that predict nothing.
    """

    row_logits: Tensor
    row_hidden: Tensor
    lead_rows: int

    def first(self, count: int) -> "DraftOutput":
        """The first `count` sequences' part."""
        return DraftOutput(self.row_logits[:count], self.row_hidden[:count], self.lead_rows)

    @property
    def base_logits(self) -> Tensor:
        """float32 `[sequences, num_speculative_tokens, draft_vocab]`, a view."""
        return self.row_logits[:, self.lead_rows :]

    @property
    def hidden(self) -> Tensor:
        """`[sequences, num_speculative_tokens, hidden]`, a view."""
        return self.row_hidden[:, self.lead_rows :]


class Proposal(NamedTuple):
    """Draft tokens of each sequence.

    Attributes:
        token_ids: int64 `[sequences, num_speculative_tokens]`, target ids.
        scores: float32, same shape: the largest logit of each step.
        confidences: float32, same shape: probability that the draft token survives given that all before it did;
            None without a confidence head.
        draft_logits: float32 `[sequences, num_speculative_tokens, draft_vocab]`, what each token was picked from;
            None when the drafter itself took the largest.
    """

    token_ids: Tensor
    scores: Tensor
    confidences: Tensor | None
    draft_logits: Tensor | None

    def is_finite(self) -> bool:
        """False if a step has a NaN or an infinite largest logit; reads only `scores` from the device."""
        return bool(torch.isfinite(self.scores).all())


def load_heads(
    settings: DrafterSettings,
    weights: WeightSource,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    target_ids: Tensor | None,
) -> DraftHeads:
    """The heads of a checkpoint; the confidence head, calibrated, in float32, the rest in `dtype`."""
    names = set(weights.names())

    def tensor(name: str, dtype: torch.dtype = dtype) -> Tensor:
        return read_weight(weights, name).to(device=device, dtype=dtype, copy=True)

    def linear(module: str) -> LinearWeight:
        bias = f"{module}.bias"
        return kernels.prepare_linear(tensor(f"{module}.weight"), tensor(bias) if bias in names else None)

    confidence_weight = confidence_bias = None
    if settings.confidence_head:
        confidence_weight = tensor("confidence_head.proj.weight", torch.float32).flatten()
        bias = "confidence_head.proj.bias"
        confidence_bias = tensor(bias, torch.float32) if bias in names else torch.zeros(1, device=device)
    ids = None if target_ids is None else target_ids.to(device)
    if not settings.markov_rank:
        heads = DraftHeads(confidence_weight=confidence_weight, confidence_bias=confidence_bias, target_ids=ids)
        return heads.calibrate(settings.confidence_scaling)
    projections = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
    projection = projections.get(settings.markov_head_type)
    heads = DraftHeads(
        head_type=settings.markov_head_type,
        w1=tensor("markov_head.markov_w1.weight"),
        w2=linear("markov_head.markov_w2"),
        projection=None if projection is None else linear(projection),
        confidence_weight=confidence_weight,
        confidence_bias=confidence_bias,
        target_ids=ids,
    )
    return heads.calibrate(settings.confidence_scaling)


def propose(
    kernels: Kernels, heads: DraftHeads, anchors: Tensor, draft: DraftOutput, pick: Pick | None = None
) -> Proposal:
    """Draft tokens of a block, each from its row's logits and the token before.

    Args:
        kernels: what computes it.
        heads: the drafter's heads.
        anchors: int64 `[sequences]`, the token before the first draft token.
        draft: the block's pass.
        pick: chooses each token; None takes the largest logit.
    """
    if pick is None:
        chain = kernels.draft_chain(draft.row_logits, draft.row_hidden, anchors, heads, draft.lead_rows)
        return Proposal(chain.token_ids, chain.scores, chain.confidences, None)
    state: Tensor | None = None
    if heads.head_type == "rnn":
        for row in range(draft.lead_rows):
            step = kernels.draft_step(draft.row_logits[:, row], draft.row_hidden[:, row], anchors, state, heads)
            state = step.state
    previous = anchors
    token_ids, logits, confidences = [], [], []
    for number in range(draft.base_logits.shape[1]):
        place = heads.at(number)
        step = kernels.draft_step(draft.base_logits[:, number], draft.hidden[:, number], previous, state, place)
        draft_ids = pick(number, step.logits)
        previous = draft_ids if heads.target_ids is None else heads.target_ids[draft_ids]
        state = step.state
        token_ids.append(previous)
        logits.append(step.logits)
        if step.confidences is not None:
            confidences.append(step.confidences)
    draft_logits = torch.stack(logits, dim=1)
    return Proposal(
        torch.stack(token_ids, dim=1),
        draft_logits.amax(dim=-1),
        torch.stack(confidences, dim=1) if confidences else None,
        draft_logits,
    )
