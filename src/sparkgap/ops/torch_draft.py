"""Reference of the operations that only drafters use, in plain torch."""

import torch
from torch import Tensor

from sparkgap.ops.kernels import DraftChain, DraftHeads, DraftStep, LinearWeight


def draft_inputs(
    anchors: Tensor, context_lengths: Tensor, block_rows: int, mask_token_id: int
) -> tuple[Tensor, Tensor]:
    """See `Kernels.draft_inputs`."""
    token_ids = torch.full(
        (len(anchors), block_rows), mask_token_id, dtype=torch.int64, device=anchors.device
    )
    token_ids[:, 0] = anchors
    positions = context_lengths[:, None] + torch.arange(block_rows, device=anchors.device)
    return token_ids.flatten(), positions.flatten()


def draft_step(
    base_logits: Tensor, hidden: Tensor, previous: Tensor, state: Tensor | None, heads: DraftHeads
) -> DraftStep:
    """See `Kernels.draft_step`."""
    embedded = None if heads.w1 is None else heads.w1[previous]
    logits = base_logits
    if embedded is not None:
        latent, state = _latent(embedded, hidden, state, heads)
        assert heads.w2 is not None
        logits = base_logits + _linear(latent, heads.w2).float()
    return DraftStep(logits, state, _confidences(hidden, embedded, heads))


def draft_chain(
    base_logits: Tensor, hidden: Tensor, anchors: Tensor, heads: DraftHeads, lead_rows: int
) -> DraftChain:
    """See `Kernels.draft_chain`."""
    state = lead_state(hidden[:, :lead_rows], anchors, heads)
    previous = anchors
    token_ids, scores, confidences = [], [], []
    for row in range(lead_rows, base_logits.shape[1]):
        step = draft_step(base_logits[:, row], hidden[:, row], previous, state, heads)
        draft_ids = step.logits.argmax(dim=-1)
        previous = draft_ids if heads.target_ids is None else heads.target_ids[draft_ids]
        state = step.state
        token_ids.append(previous)
        scores.append(step.logits.amax(dim=-1))
        confidences.append(step.confidences)
    known = [c for c in confidences if c is not None]
    return DraftChain(
        torch.stack(token_ids, dim=1), torch.stack(scores, dim=1), torch.stack(known, dim=1) if known else None
    )


def lead_state(lead_hidden: Tensor, anchors: Tensor, heads: DraftHeads) -> Tensor | None:
    """State after the rows at a block's start that predict nothing, `lead_hidden` `[sequences, rows, hidden]`."""
    state: Tensor | None = None
    if heads.head_type == "rnn" and heads.w1 is not None:
        for row in range(lead_hidden.shape[1]):
            _, state = _latent(heads.w1[anchors], lead_hidden[:, row], state, heads)
    return state


def _latent(
    embedded: Tensor, hidden: Tensor, state: Tensor | None, heads: DraftHeads
) -> tuple[Tensor, Tensor | None]:
    """What `w2` multiplies, `[sequences, rank]`, and the next state."""
    if heads.head_type == "vanilla":
        return embedded, None
    assert heads.projection is not None
    if heads.head_type == "gated":
        gate = torch.sigmoid(_linear(torch.cat([hidden, embedded], dim=-1), heads.projection))
        return gate * embedded, None
    if state is None:
        state = torch.zeros_like(embedded)
    features = torch.cat([state, embedded, hidden], dim=-1)
    gate, candidate, output = _linear(features, heads.projection).chunk(3, dim=-1)
    keep = torch.sigmoid(gate)
    return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)


def _confidences(hidden: Tensor, embedded: Tensor | None, heads: DraftHeads) -> Tensor | None:
    weight = heads.confidence_weight
    if weight is None:
        return None
    features = hidden
    if weight.shape[0] > hidden.shape[-1]:
        assert embedded is not None
        features = torch.cat([hidden, embedded], dim=-1)
    assert heads.confidence_bias is not None
    return torch.sigmoid(features.float() @ weight + heads.confidence_bias)


def _linear(x: Tensor, weight: LinearWeight) -> Tensor:
    return torch.nn.functional.linear(x, weight.weight, weight.bias)
