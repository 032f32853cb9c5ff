"""From conversations to training steps: the draft vocabulary, the anchors of each step, and their targets."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sparkgap.train.features import Example, Examples
from sparkgap.train.losses import RowTargets, position_weights
from sparkgap.train.mtp_network import MtpBatch
from sparkgap.train.network import AnchorBatch


@dataclass(frozen=True)
class DraftVocabulary:
    """The target tokens that can be drafted.

    Attributes:
        ids: int64 `[draft_vocab]`, ascending target ids.
        draft_ids: int64 `[vocab]`, draft id of each target id; -1 outside.
        coverage: share of the answers' tokens that are inside.
    """

    ids: Tensor
    draft_ids: Tensor
    coverage: float


def token_counts(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """How often each token stands in an answer: int64 `[vocab]`."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        counts += torch.bincount(example.token_ids[example.answer_start :], minlength=vocab_size)
    return counts


def draft_vocabulary(counts: Tensor, size: int) -> DraftVocabulary:
    """The `size` most frequent tokens; among equally frequent ones the lowest ids, which a BPE merged first."""
    vocab_size = counts.shape[0]
    order = torch.argsort(counts, descending=True, stable=True)
    ids = order[: min(size, vocab_size)].sort().values
    draft_ids = torch.full((vocab_size,), -1, dtype=torch.int64)
    draft_ids[ids] = torch.arange(ids.shape[0])
    return DraftVocabulary(ids, draft_ids, float(counts[ids].sum() / counts.sum().clamp_min(1)))


def tap_scale(taps: Tensor) -> Tensor:
    """What brings the usual size of each captured dimension to 1: float32 `[m * hidden]`.

    Medians, because the first positions of a conversation have a few dimensions hundreds of times their usual size.

    Args:
        taps: `[positions, m * hidden]`.
    """
    usual = taps.float().abs().median(dim=0).values
    return 0.6745 / usual.clamp_min(1e-6 * float(usual.max()) + 1e-12)


def normed_tap_scale(taps: Tensor, eps: float) -> Tensor:
    """`tap_scale` of captured states after an RMSNorm without weights: float32 `[hidden]`."""
    return tap_scale(functional.rms_norm(taps.float(), taps.shape[-1:], eps=eps))


@dataclass(frozen=True)
class Selection:
    """Anchors of one conversation in one step: positions, ascending."""

    example: Example
    anchors: Tensor


@dataclass(frozen=True)
class TrainingRows:
    """A packed part of a step.

    Attributes:
        batch: input of the network.
        previous_tokens: int64 `[blocks * tokens]`, target id of the token before each drafted one.
        targets: what the target says at each drafted token.
    """

    batch: AnchorBatch
    previous_tokens: Tensor
    targets: RowTargets


def anchor_range(example: Example) -> range:
    """Positions that can be anchors: answer tokens with at least one token after them."""
    return range(example.answer_start, example.computed)


def select(
    examples: Sequence[Example], seed: str, anchors_per_step: int, anchors_per_example: int
) -> list[list[Selection]]:
    """One epoch: every conversation once, in random order, a random part of its positions as anchors.

    Args:
        examples: conversations.
        seed: of the order and the anchors.
        anchors_per_step: a step takes conversations until it has this many.
        anchors_per_example: most anchors of one conversation in a step.
    """
    draw = random.Random(seed)
    steps: list[list[Selection]] = []
    current: list[Selection] = []
    count = 0
    for index in draw.sample(range(len(examples)), len(examples)):
        places = anchor_range(examples[index])
        chosen = sorted(draw.sample(places, min(len(places), anchors_per_example)))
        if not chosen:
            continue
        current.append(Selection(examples[index], torch.tensor(chosen)))
        count += len(chosen)
        if count >= anchors_per_step:
            steps.append(current)
            current, count = [], 0
    if not steps and current:
        steps.append(current)
    return steps


def rows_to_learn(
    selections: Sequence[Selection],
    examples: Examples,
    vocabulary: DraftVocabulary,
    tokens: int,
    gamma: float,
    device: torch.device,
) -> tuple[Tensor, RowTargets]:
    """What each drafted token follows, and what the target says there.

    Args:
        selections: anchors.
        examples: where their features are.
        vocabulary: draft vocabulary.
        tokens: tokens drafted after an anchor.
        gamma: decay of the weights by position.
        device: where the tensors go.

    Returns:
        int64 `[anchors, tokens]`, target ids of the tokens before, and the targets of as many rows.
    """
    offsets = torch.arange(tokens)
    weights_by_position = position_weights(tokens, gamma)
    previous, labels, top_ids, top_logprobs, weights = [], [], [], [], []
    for selection in selections:
        example, anchors = selection.example, selection.anchors
        places = anchors[:, None] + offsets
        inside = places < example.computed
        places = places.clamp_max(example.computed - 1)
        previous.append(example.token_ids[places])
        labels.append(torch.where(inside, vocabulary.draft_ids[example.token_ids[places + 1]], -1))
        ids, logprobs = examples.top(example)
        top_ids.append(vocabulary.draft_ids[ids[places].long()])
        top_logprobs.append(logprobs[places])
        weights.append(inside * weights_by_position)
    targets = RowTargets(
        torch.cat(labels).flatten().to(device),
        torch.cat(top_ids).flatten(0, 1).to(device),
        torch.cat(top_logprobs).flatten(0, 1).float().exp().to(device),
        torch.cat(weights).flatten().to(device),
    )
    return torch.cat(previous).to(device), targets


def pack(
    selections: Sequence[Selection],
    examples: Examples,
    vocabulary: DraftVocabulary,
    tokens: int,
    lead_rows: int,
    gamma: float,
    device: torch.device,
) -> TrainingRows:
    """Gather the rows of some conversations' blocks.

    Args:
        selections: anchors.
        examples: where their features are.
        vocabulary: draft vocabulary.
        tokens: tokens that a block predicts.
        lead_rows: rows of a block before those that predict.
        gamma: decay of the weights by position.
        device: where the tensors go.
    """
    taps = [examples.taps(s.example)[: int(s.anchors[-1]) + 1] for s in selections]
    previous, targets = rows_to_learn(selections, examples, vocabulary, tokens, gamma, device)
    batch = AnchorBatch(
        torch.cat(taps).to(device),
        [part.shape[0] for part in taps],
        [s.anchors.to(device) for s in selections],
        previous[:, 0],
        tokens + lead_rows,
    )
    return TrainingRows(batch, previous.flatten(), targets)


@dataclass(frozen=True)
class MtpRows:
    """A packed part of a step of a multi-token prediction module.

    Attributes:
        batch: input of the network.
        targets: what the target says at each drafted token.
    """

    batch: MtpBatch
    targets: RowTargets


def pack_mtp(
    selections: Sequence[Selection],
    examples: Examples,
    vocabulary: DraftVocabulary,
    tokens: int,
    gamma: float,
    device: torch.device,
) -> MtpRows:
    """Gather the rows of some conversations' drafts; arguments as `pack`."""
    previous, targets = rows_to_learn(selections, examples, vocabulary, tokens, gamma, device)
    taps, following = [], []
    for selection in selections:
        last = int(selection.anchors[-1])
        taps.append(examples.taps(selection.example)[:last])
        following.append(selection.example.token_ids[1 : last + 1])
    batch = MtpBatch(
        torch.cat(taps).to(device),
        torch.cat(following).to(device),
        [part.shape[0] for part in taps],
        [s.anchors.to(device) for s in selections],
        previous,
    )
    return MtpRows(batch, targets)
