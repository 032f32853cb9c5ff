"""What rounds need of networks."""

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from sparkgap.models.batch import ForwardBatch, ForwardResult
from sparkgap.models.heads import Pick, Proposal
from sparkgap.ops.operands import KVCache


class Target(Protocol):
    """What a round needs of a target network (`models.decoder.Decoder`)."""

    device: torch.device
    """Where its rows are computed."""

    def forward(
        self, batch: ForwardBatch, caches: Sequence[KVCache], captured_layers: tuple[int, ...] = ()
    ) -> ForwardResult:
        """One pass over rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 `[rows, vocab]` of rows of hidden states."""
        ...


class Draft(Protocol):
    """What a drafter computes before it picks a token: a whole block's logits, or where the first pass begins."""

    def first(self, count: int) -> Self:
        """The first `count` sequences' part."""
        ...


DraftT = TypeVar("DraftT", bound=Draft)


class DraftNetwork(Protocol[DraftT]):
    """What a round needs of a drafter. There are two kinds.

    A block drafter (`models.drafter.Drafter`: DSpark, DFlash) computes all rows in `draft`, and `propose` runs its
    sequential heads over them. An MTP drafter (`models.mtp.MTPDrafter`) needs each token for the pass that gives the
    next one, so that `propose` makes the passes.
    """

    reads_ahead: bool
    """Whether a position's context is made of the token after it, too: equal contexts need one equal token more."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        ...

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Layers whose hidden states it reads."""
        ...

    @property
    def target_ids(self) -> Tensor | None:
        """int64 `[draft_vocab]`, target id of each draft id; None when they are the same."""
        ...

    @property
    def max_context_length(self) -> int:
        """Longest context that a draft can follow."""
        ...

    def context_update(
        self,
        captured: Tensor,
        positions: Tensor,
        slots: Tensor,
        caches: Sequence[KVCache],
        following: Tensor | None = None,
    ) -> None:
        """Write context KV of positions that the target has computed; `following` are the tokens after them."""
        ...

    def draft(
        self,
        anchors: Tensor,
        context_lengths: Tensor,
        block_tables: Tensor,
        caches: Sequence[KVCache],
        num_speculative_tokens: int,
        max_length: int = 0,
    ) -> DraftT:
        """What can be computed of each sequence's draft before its first token is picked."""
        ...

    def propose(self, anchors: Tensor, draft: DraftT, pick: Pick | None = None) -> Proposal:
        """Draft tokens of each sequence."""
        ...
