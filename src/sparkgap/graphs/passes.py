"""The passes of a round, computed eagerly."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparkgap.models.batch import ForwardBatch
from sparkgap.models.heads import Proposal
from sparkgap.models.interfaces import Draft, DraftNetwork, Target
from sparkgap.ops.operands import KVCache


@dataclass(frozen=True)
class TargetOutput:
    """What a target pass gave.

    Attributes:
        hidden: `[rows, hidden_size]` after the final norm.
        logits: float32 `[rows, vocab]`; None where not all rows' were asked for.
        captured: `[rows, m * hidden_size]`, hidden states for the drafter; None without one.
        graph_captured: `captured` with the rows that pad a replay, which context graphs are bound to; None of an eager
            pass.
        eager_reason: why a pass that has graphs ran eagerly all the same.
    """

    hidden: Tensor
    logits: Tensor | None
    captured: Tensor | None
    graph_captured: Tensor | None = None
    eager_reason: str | None = None


@dataclass(frozen=True)
class DraftModel:
    """A drafter and what it drafts with.

    Attributes:
        drafter: proposes tokens.
        caches: its context KV, in blocks of the target's numbers and size.
        num_speculative_tokens: draft tokens a round (N).
    """

    drafter: DraftNetwork[Any]
    caches: Seq[KVCache]
    num_speculative_tokens: int


class Passes:
    """Target, draft and context passes, each computed when it is called.

    Args:
        target: the network.
        caches: its KV caches, one a layer.
        draft: the drafter; None without speculation.
    """

    def __init__(self, target: Target, caches: Seq[KVCache], draft: DraftModel | None = None) -> None:
        self.target = target
        self.caches = caches
        self.drafting = draft
        self.captured_layers: tuple[int, ...] = () if draft is None else draft.drafter.target_layer_ids

    def prefill(self, batch: ForwardBatch) -> TargetOutput:
        """A target pass over prompt chunks, without logits."""
        result = self.target.forward(batch, self.caches, self.captured_layers)
        return TargetOutput(result.hidden, None, result.captured)

    def decode(self, batch: ForwardBatch) -> TargetOutput:
        """A target pass with as many rows of each sequence, and logits of all.

        The output may lie in memory of the passes' own, and holds until the next `decode`.
        """
        result = self.target.forward(batch, self.caches, self.captured_layers)
        return TargetOutput(result.hidden, self.target.logits(result.hidden), result.captured)

    def draft(self, anchors: Tensor, context_lengths: Tensor, block_tables: Tensor, max_length: int) -> Draft:
        """See `DraftNetwork.draft`; the output holds until the next draft pass."""
        model = self._draft_model
        draft: Draft = model.drafter.draft(
            anchors, context_lengths, block_tables, model.caches, model.num_speculative_tokens, max_length
        )
        return draft

    def propose(self, anchors: Tensor, context_lengths: Tensor, block_tables: Tensor, max_length: int) -> Proposal:
        """A draft of the tokens with the largest logits; the output holds until the next draft pass."""
        draft = Passes.draft(self, anchors, context_lengths, block_tables, max_length)
        return self._draft_model.drafter.propose(anchors, draft)

    def update_context(self, output: TargetOutput, positions: Tensor, slots: Tensor, following: Tensor) -> None:
        """Write the drafter's context KV of a target pass's rows; computes the rows that are written and no other.

        Args:
            output: what the pass gave; the last one, if it came from `decode`.
            positions: int64 `[rows]`.
            slots: int64 `[rows]`; -1 writes nothing.
            following: int64 `[rows]`, the token after each row's, where the row is written.
        """
        assert output.captured is not None
        captured, model = output.captured, self._draft_model
        written = (slots >= 0).nonzero()[:, 0]
        if not len(written):
            return
        if len(written) < len(slots):
            captured, positions, slots, following = (t[written] for t in (captured, positions, slots, following))
        model.drafter.context_update(captured, positions, slots, model.caches, following)

    @property
    def _draft_model(self) -> DraftModel:
        assert self.drafting is not None, "these passes have no drafter"
        return self.drafting
