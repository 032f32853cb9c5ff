"""What rounds need of networks."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sparkgap.models.batch import ForwardBatch, ForwardResult
from sparkgap.models.heads import DraftOutput, Pick, Proposal
from sparkgap.ops.kernels import KVCache


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


class BlockDrafter(Protocol):
    """What a round needs of a drafter (`models.drafter.Drafter`)."""

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
        """Longest context that a block can follow."""
        ...

    def context_update(self, captured: Tensor, positions: Tensor, slots: Tensor, caches: Sequence[KVCache]) -> None:
        """Write context KV of positions that the target has computed."""
        ...

    def draft(
        self,
        anchors: Tensor,
        context_lengths: Tensor,
        block_tables: Tensor,
        caches: Sequence[KVCache],
        num_speculative_tokens: int,
        max_length: int = 0,
    ) -> DraftOutput:
        """One pass over each sequence's block."""
        ...

    def propose(self, anchors: Tensor, draft: DraftOutput, pick: Pick | None = None) -> Proposal:
        """Draft tokens of each sequence."""
        ...
