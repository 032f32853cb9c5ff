"""Rounds as native operations."""

from typing import Any

from torch import Tensor

from sparkgap.ops.native_base import NativeOperations
from sparkgap.ops.round_kernels import RoundKernels


class NativeRoundKernels(NativeOperations, RoundKernels):
    """`RoundKernels` as native operations, and the drawing of tokens."""

    def draw_tokens(
        self,
        logits: Tensor,
        temperatures: Tensor,
        log_min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        scores: Tensor,
    ) -> None:
        """A token of each row, drawn by the random number of its sequence's seed and its position.

        What it is drawn from is `rounds.logits.probabilities`; random numbers are `rounds.random.uniform`'s.

        Args:
            logits: float32 `[sequences * W, vocab]`.
            temperatures: float32 `[sequences]`; 0 takes the largest logit, the first of equals.
            log_min_p: float32 `[sequences]`, least scaled logit that stays, the largest being 0; -inf keeps all.
            top_k: int64 `[sequences]`; 0 keeps all.
            top_p: float64 `[sequences]`; 1 keeps all.
            seeds: int64 `[sequences]`.
            positions: int64 `[sequences]`, of each sequence's first row: its token will be at the next.
            token_ids: int64 `[sequences * W]`, filled.
            scores: float32 `[sequences * W]`, filled with the largest logits; NaN where any of the row is NaN.
        """
        self.executor.draw_tokens(logits, temperatures, log_min_p, top_k, top_p, seeds, positions, token_ids, scores)

    def begin_round(self, *tensors: Tensor) -> None:
        """See `Kernels.begin_round`."""
        self.executor.begin_round(*tensors)

    def verify_rows(self, *operands: Any) -> None:
        """See `Kernels.verify_rows`."""
        self.executor.verify_rows(*operands)

    def settle_round(self, *operands: Any) -> None:
        """See `Kernels.settle_round`."""
        self.executor.settle_round(*operands)

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
        """See `Kernels.look_up`."""
        self.executor.look_up(texts, text_rows, positions, *lengths, drafts, runs, wants_draft)

    def fill_drafts(self, proposed: Tensor, runs: Tensor, drafts: Tensor) -> None:
        """See `Kernels.fill_drafts`."""
        self.executor.fill_drafts(proposed, runs, drafts)

    def choose_length(self, *operands: Any) -> None:
        """See `Kernels.choose_length`."""
        self.executor.choose_length(*operands)

    def remember(self, texts: Tensor, text_rows: Tensor, positions: Tensor, results: Tensor) -> None:
        """See `Kernels.remember`."""
        self.executor.remember(texts, text_rows, positions, results)

    def hand_off(
        self, next_anchors: Tensor, next_positions: Tensor, state_anchors: Tensor, state_positions: Tensor
    ) -> None:
        """See `Kernels.hand_off`."""
        self.executor.hand_off(next_anchors, next_positions, state_anchors, state_positions)
