"""The verbs that only drafters use: rows of a draft, the heads' chain, the choice of its tokens."""

from torch import Tensor

from sparkgap.ops import draft
from sparkgap.ops.draft import DraftChain, DraftHeads, DraftStep, StepRows
from sparkgap.ops.network_kernels import NetworkKernels


class DraftKernels(NetworkKernels):
    """Drafts, made of a network's verbs where a device has no kernels of its own; see `Kernels`."""

    def draft_inputs(
        self, anchors: Tensor, context_lengths: Tensor, block_rows: int, mask_token_id: int
    ) -> tuple[Tensor, Tensor]:
        """Token ids and positions, int64 `[sequences * block_rows]` each, of draft blocks.

        A block is its anchor (int64 `[sequences]`), then mask tokens, at positions from its context length
        (int64 `[sequences]`) on.
        """
        return draft.draft_inputs(anchors, context_lengths, block_rows, mask_token_id)

    def step_rows(
        self, context_lengths: Tensor, block_tables: Tensor, steps: int, block_size: int, max_length: int
    ) -> StepRows:
        """Rows of `steps` draft passes of one row a sequence: the first stands at the last position of its context.

        Rows from position `max_length` or the end of the block table on stand at the last position before and write
        nothing, as do the rows of a sequence without context, which only pads.

        Args:
            context_lengths: int64 `[sequences]`, live lengths.
            block_tables: int32 `[sequences, max_blocks]`.
            steps: passes.
            block_size: positions in a block.
            max_length: most positions of a sequence.
        """
        return draft.step_rows(context_lengths, block_tables, steps, block_size, max_length)

    def draft_pick(self, logits: Tensor, target_ids: Tensor | None, token_ids: Tensor, scores: Tensor) -> None:
        """The token with the largest logit of each row.

        Args:
            logits: float32 `[sequences, draft_vocab]`.
            target_ids: int64 `[draft_vocab]`, target id of each draft id; None when they are the same.
            token_ids: int64 `[sequences]`, filled with target ids.
            scores: float32 `[sequences]`, filled with the largest logits; NaN if any logit of the row is NaN.
        """
        draft.draft_pick(logits, target_ids, token_ids, scores)

    def draft_step(
        self, base_logits: Tensor, hidden: Tensor, previous: Tensor, state: Tensor | None, heads: DraftHeads
    ) -> DraftStep:
        """One step of the heads' chain, for a caller that picks the token itself.

        Args:
            base_logits: float32 `[sequences, draft_vocab]`; may be a view of every block's row.
            hidden: `[sequences, hidden]`; may be a view of every block's row.
            previous: int64 `[sequences]`, target id of the token before.
            state: what the step before gave; None at a block's start.
            heads: the heads' weights, at the step's place (`DraftHeads.at`).
        """
        return draft.draft_step(self.linear, base_logits, hidden, previous, state, heads)

    def draft_chain(
        self, base_logits: Tensor, hidden: Tensor, anchors: Tensor, heads: DraftHeads, lead_rows: int = 0
    ) -> DraftChain:
        """The heads' whole chain over draft blocks, where each step takes the token with the largest logit.

        Args:
            base_logits: float32 `[sequences, block_rows, draft_vocab]`.
            hidden: `[sequences, block_rows, hidden]`.
            anchors: int64 `[sequences]`, the token before the first step.
            heads: the heads' weights.
            lead_rows: rows at the block's start that predict nothing: they advance the rnn's state, with the
                anchor as the token before, and give no step.
        """
        return draft.draft_chain(self.linear, base_logits, hidden, anchors, heads, lead_rows)
