"""How many draft tokens a network would have accepted, by replaying greedy rounds over known answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkgap.models.cache import allocate_caches
from sparkgap.models.drafter import Drafter
from sparkgap.models.heads import Proposal
from sparkgap.models.mtp import MTPDrafter
from sparkgap.train.batches import anchor_range
from sparkgap.train.features import Example
from sparkgap.train.mtp_network import MtpBatch, MtpNetwork
from sparkgap.train.network import AnchorBatch, DraftNetwork

Answer = tuple[Tensor, int, Tensor]
"""Token ids int64 `[length]` of a conversation, its first answer position, captured states `[>= length - 1, width]`."""

_REPLAYED_ANCHORS = 64
"""Anchors of one conversation that are drafted in one pass."""


@dataclass(frozen=True)
class Acceptance:
    """Greedy rounds over some answers.

    Attributes:
        rounds: draft rounds.
        accepted: draft tokens accepted in them.
        by_position: share of rounds that accepted the token at each position.
        first_position: share of *all* positions (not only those where a round starts) whose next token is drafted.
    """

    rounds: int
    accepted: int
    by_position: list[float]
    first_position: float

    @property
    def per_round(self) -> float:
        """Mean accepted draft tokens a round, without the bonus token."""
        return self.accepted / max(self.rounds, 1)


def draft_greedily(network: DraftNetwork, batch: AnchorBatch, ids: Tensor) -> Tensor:
    """Target ids of the tokens drafted after each anchor: int64 `[anchors, tokens]`.

    Args:
        network: the drafter.
        batch: anchors and their context.
        ids: target id of each draft id.
    """
    tokens = batch.rows - network.shape.lead_rows
    hidden = network(batch).view(-1, tokens, network.shape.hidden_size)
    previous, drafted, state = batch.anchor_tokens, [], None
    for row in range(tokens):
        latent, state = network.markov_step(hidden[:, row], network.markov_states(previous), state)
        logits = hidden[:, row] @ network.head.T + latent @ network.markov_output().T
        previous = ids[logits.argmax(-1)]
        drafted.append(previous)
    return torch.stack(drafted, dim=1)


def accepted_lengths(network: DraftNetwork, example: Example, taps: Tensor, ids: Tensor, tokens: int) -> Tensor:
    """Accepted draft tokens of a round at every possible anchor of an answer: int64 `[anchors]`."""
    places = anchor_range(example)
    anchors = torch.arange(places.start, places.stop, device=taps.device)
    token_ids = example.token_ids.to(taps.device)
    batch = AnchorBatch(taps, [taps.shape[0]], [anchors], token_ids[anchors], tokens + network.shape.lead_rows)
    return _agreement(draft_greedily(network, batch, ids), token_ids, anchors)


def mtp_lengths(network: MtpNetwork, token_ids: Tensor, start: int, taps: Tensor, tokens: int) -> Tensor:
    """Accepted draft tokens of a round of a multi-token prediction module at every place of an answer.

    Args:
        network: the module.
        token_ids: int64 `[length]`, the conversation.
        start: first answer position.
        taps: `[>= length - 2, hidden]`, captured hidden states.
        tokens: draft tokens a round.

    Returns:
        int64 `[length - 1 - start]`.
    """
    last = token_ids.shape[0] - 1
    anchors = torch.arange(start, last, device=taps.device)
    batch = MtpBatch(taps[: last - 1], token_ids[1:last], [last - 1], [anchors], token_ids[anchors, None])
    return _agreement(network.draft(batch, tokens), token_ids, anchors)


def _agreement(drafted: Tensor, token_ids: Tensor, anchors: Tensor) -> Tensor:
    """Length of the drafts `[anchors, tokens]` that agree with what follows each anchor: int64 `[anchors]`."""
    following = anchors[:, None] + 1 + torch.arange(drafted.shape[1], device=anchors.device)
    inside = following < token_ids.shape[0]
    truth = token_ids[following.clamp_max(token_ids.shape[0] - 1)]
    return ((drafted == truth) & inside).long().cumprod(1).sum(1)


def round_starts(lengths: Sequence[int]) -> list[int]:
    """Where the rounds of an answer start, walking it by the accepted length at each place plus the target's token."""
    starts, place = [], 0
    while place < len(lengths):
        starts.append(place)
        place += lengths[place] + 1
    return starts


def acceptance(replays: Sequence[Sequence[int]], tokens: int) -> Acceptance:
    """Acceptance in the rounds of some answers.

    Args:
        replays: of each answer, the accepted length of a round at every place.
        tokens: draft tokens a round.
    """
    lengths = [answer[place] for answer in replays for place in round_starts(answer)]
    by_position = [sum(length > k for length in lengths) / max(len(lengths), 1) for k in range(tokens)]
    positions = sum(len(answer) for answer in replays)
    first = sum(length > 0 for answer in replays for length in answer)
    return Acceptance(len(lengths), sum(lengths), by_position, first / max(positions, 1))


@dataclass(frozen=True)
class ServedAnswer:
    """What the serving drafter drafts at every place of one answer.

    Attributes:
        lengths: accepted draft tokens of a round there.
        confidences: float32 `[places, tokens]` on the host; None without a confidence head.
    """

    lengths: list[int]
    confidences: Tensor | None


@torch.inference_mode()
def serving_replay(drafter: Drafter | MTPDrafter, chosen: Sequence[Answer], tokens: int) -> list[ServedAnswer]:
    """Draft at every place of answers with the drafter that serves: its context update, draft pass and heads.

    Args:
        drafter: the served draft model.
        chosen: the answers.
        tokens: draft tokens a round.
    """
    device = drafter.device
    # An MTP draft writes its rows behind its context, so that each needs a context of its own.
    own_context = isinstance(drafter, MTPDrafter)
    answers = []
    for token_ids, start, taps in chosen:
        count, ids = token_ids.shape[0] - 1, token_ids.to(device)
        places = torch.arange(count, device=device)
        groups = torch.split(places[start:], _REPLAYED_ANCHORS)
        size = count + tokens
        blocks = 1 + (max(map(len, groups)) if own_context else 0)
        caches = [
            cache
            for layers, heads, head_dim in drafter.cache_shapes
            for cache in allocate_caches(layers, heads, head_dim, blocks, size, drafter.dtype, device)
        ]
        drafter.context_update(taps[:count].to(device, drafter.dtype), places, places, caches, ids[1:])
        lengths, confidences = [], []
        for anchors in groups:
            tables = torch.zeros(anchors.shape[0], 1, dtype=torch.int32, device=device)
            if own_context:
                tables[:, 0] = torch.arange(1, anchors.shape[0] + 1)
                for held in (part for cache in caches for part in (cache.keys, cache.values)):
                    held[1:] = held[:1]
            proposal = _propose(drafter, ids[anchors], anchors, tables, caches, tokens, count)
            lengths += _agreement(proposal.token_ids, ids, anchors).tolist()
            if proposal.confidences is not None:
                confidences.append(proposal.confidences.to("cpu", torch.float32))
        answers.append(ServedAnswer(lengths, torch.cat(confidences) if confidences else None))
    return answers


def _propose(drafter: Drafter | MTPDrafter, anchors: Tensor, lengths: Tensor, tables: Tensor, *rest: Any) -> Proposal:
    """Both passes of a draft."""
    if isinstance(drafter, MTPDrafter):
        return drafter.propose(anchors, drafter.draft(anchors, lengths, tables, *rest))
    return drafter.propose(anchors, drafter.draft(anchors, lengths, tables, *rest))
