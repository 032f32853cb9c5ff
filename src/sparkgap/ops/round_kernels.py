"""The verbs that chain rounds on the device."""

from torch import Tensor

from sparkgap.ops import rounds


class RoundKernels:
    """A round's begin, rows, settlement and end, which fill tensors of the caller's; see `Kernels`."""

    def begin_round(
        self,
        sources: Tensor,
        staged_anchors: Tensor,
        staged_positions: Tensor,
        state_anchors: Tensor,
        state_positions: Tensor,
        anchors: Tensor,
        positions: Tensor,
    ) -> None:
        """Where each sequence's round begins.

        Args:
            sources: int32 `[sequences]`, row of the state that the round before left; -1 takes what is staged.
            staged_anchors, staged_positions: int64 `[sequences]`.
            state_anchors, state_positions: int64, one entry a row of the state.
            anchors, positions: int64 `[sequences]`, filled.
        """
        rounds.begin_round(
            sources, staged_anchors, staged_positions, state_anchors, state_positions, anchors, positions
        )

    def verify_rows(
        self,
        anchors: Tensor,
        positions: Tensor,
        draft_ids: Tensor | None,
        block_tables: Tensor,
        num_blocks: Tensor,
        block_size: int,
        max_length: int,
        token_ids: Tensor,
        row_positions: Tensor,
        slots: Tensor,
    ) -> None:
        """Rows of a target pass: each sequence's anchor and its draft tokens, W of each.

        Rows from position `max_length` on stand at the last position and write nothing, as do all rows of a sequence
        that only pads.

        Args:
            anchors, positions: int64 `[sequences]`.
            draft_ids: int64 `[sequences, W - 1]`, any strides; None for W = 1.
            block_tables: int32 `[sequences, max_blocks]`.
            num_blocks: int32 `[sequences]`, entries of each table that hold; 0 for a sequence that only pads.
            block_size: positions in a block.
            max_length: most positions of a sequence.
            token_ids, row_positions, slots: int64 `[sequences * W]`, filled.

        Raises:
            IndexError: (native) a row that must be written lies beyond its sequence's blocks.
        """
        rounds.verify_rows(
            anchors,
            positions,
            draft_ids,
            block_tables,
            num_blocks,
            block_size,
            max_length,
            token_ids,
            row_positions,
            slots,
        )

    def settle_round(
        self,
        picks: Tensor,
        scores: Tensor,
        draft_ids: Tensor | None,
        draft_scores: Tensor | None,
        runs: Tensor | None,
        positions: Tensor,
        row_positions: Tensor,
        slots: Tensor,
        context_length: int,
        context_positions: Tensor | None,
        context_slots: Tensor | None,
        next_anchors: Tensor,
        next_positions: Tensor,
        results: Tensor,
    ) -> None:
        """Accept each sequence's draft tokens as long as they are the target's picks.

        Args:
            picks: int64 `[sequences * W]`, the target's token of each row.
            scores: float32 `[sequences * W]`, not finite where the target's logits give no token.
            draft_ids, draft_scores: int64 and float32 `[sequences, W - 1]`, any strides; None for W = 1. Without
                scores, but with `runs`, only what was looked up are draft tokens.
            runs: int32 `[sequences]`, see `look_up`: draft tokens that were looked up have no scores. None where
                nothing is looked up.
            positions: int64 `[sequences]`, of the anchors.
            row_positions, slots: int64 `[sequences * W]`, of the verified rows.
            context_length: rows from this position on give no context.
            context_positions, context_slots: int64 `[sequences * W]`, filled; slots of rejected rows are -1. None
                without a drafter.
            next_anchors, next_positions: int64 `[sequences]`, filled: the last token that counts, and its position.
            results: int64 `[sequences, W + 2]`, filled: accepted draft tokens, `RoundStatus`, picks.
        """
        rounds.settle_round(
            picks,
            scores,
            draft_ids,
            draft_scores,
            runs,
            positions,
            row_positions,
            slots,
            context_length,
            context_positions,
            context_slots,
            next_anchors,
            next_positions,
            results,
        )

    def look_up(
        self,
        texts: Tensor,
        text_rows: Tensor,
        positions: Tensor,
        lengths: tuple[int, int],
        drafts: Tensor,
        runs: Tensor,
        wants_draft: Tensor,
    ) -> None:
        """Drafts of each sequence whose last tokens stood before: what followed them there (`rounds.lookup`).

        Args:
            texts: int32 `[rows, capacity]`, tokens by position.
            text_rows: int32 `[sequences]`, row of each sequence's text; -1 where it only pads.
            positions: int64 `[sequences]`, of the anchors, whose tokens the texts have.
            lengths: fewest and most last tokens that are compared.
            drafts: int64 `[sequences, N]`, filled where something was found.
            runs: int32 `[sequences]`, filled: how many of the last tokens stood there, counted up to `LONGEST_RUN`; 0
                where nothing was found.
            wants_draft: int64 `[1]`, filled: 0 where something was found for every sequence, those that only pad
                apart, so that nothing need be drafted; 1 where not, and where all only pad.
        """
        rounds.look_up(texts, text_rows, positions, lengths, drafts, runs, wants_draft)

    def fill_drafts(self, proposed: Tensor, runs: Tensor, drafts: Tensor) -> None:
        """Take a drafter's tokens for the sequences for which nothing was found.

        Args:
            proposed: int64 `[sequences, N]`, any strides.
            runs: int32 `[sequences]`, see `look_up`.
            drafts: int64 `[sequences, N]`, filled where `runs` is 0.
        """
        rounds.fill_drafts(proposed, runs, drafts)

    def choose_length(
        self,
        confidences: Tensor,
        runs: Tensor | None,
        num_blocks: Tensor,
        positions: Tensor,
        lengths: Tensor,
        costs: Tensor,
        growth: Tensor,
        draft_cost: Tensor,
        wants_draft: Tensor | None,
        chosen: Tensor,
    ) -> None:
        """The number of draft tokens, the same for all sequences, with the most expected tokens for its cost.

        arXiv 2607.05147, Algorithm 1, for passes whose number of rows a sequence is one of a few. A sequence gives 1
        token and, of each draft token, the product of the confidences up to it; one that was looked up has
        `ops.rounds.continues_run` in place of a confidence. Of equals, the fewer draft tokens are taken; where nothing
        is a number, the most.

        Args:
            confidences: float32 `[sequences, N]`, any strides.
            runs: int32 `[sequences]`, see `look_up`; None where nothing is looked up.
            num_blocks: int32 `[sequences]`, 0 for a sequence that only pads.
            positions: int64 `[sequences]`, of the anchors.
            lengths: int64 `[choices]`, numbers of draft tokens, rising, at most N; fixed once captured.
            costs: float64 `[choices]`, of a round with so many at position 0, without its draft, in any unit.
            growth: float64 `[choices]`, what each position of each sequence adds to them.
            draft_cost: float64 `[1]`, of the draft.
            wants_draft: int64 `[1]`, see `look_up`: where it is 0, the round had no draft. None where each has one.
            chosen: int64 `[1]`, filled: index of the choice.
        """
        rounds.choose_length(
            confidences, runs, num_blocks, positions, lengths, costs, growth, draft_cost, wants_draft, chosen
        )

    def remember(self, texts: Tensor, text_rows: Tensor, positions: Tensor, results: Tensor) -> None:
        """Write a round's tokens behind the anchors, as far as `texts` reach; `results` as of `settle_round`.

        Raises:
            IndexError: a sequence with a text has fewer than 0 accepted tokens, or more than its round drafted.
        """
        rounds.remember(texts, text_rows, positions, results)

    def hand_off(
        self, next_anchors: Tensor, next_positions: Tensor, state_anchors: Tensor, state_positions: Tensor
    ) -> None:
        """Leave each sequence's new anchor and position, int64 `[sequences]`, in the first rows of the state."""
        rounds.hand_off(next_anchors, next_positions, state_anchors, state_positions)
