"""What runners share that verify draft tokens, wherever these come from."""

from collections.abc import Sequence as Seq

from torch import Tensor

from sparkgap.graphs.passes import Passes, TargetOutput
from sparkgap.models.batch import ForwardBatch
from sparkgap.models.interfaces import Target
from sparkgap.ops.operands import KVCache
from sparkgap.rounds.batching import RowSpan, forward_batch
from sparkgap.rounds.plain import PlainRunner
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import RoundOutput
from sparkgap.rounds.verification import Drafted, Settlement, exact_match, rejection

SWITCHED_OFF = "switched off for the request"
"""Reason for a plain round: the request's parameters say so."""


class VerifyingRunner(PlainRunner):
    """Runs a target over anchors and draft tokens, and settles what it accepts.

    Args:
        target, caches, sampler, passes: as `PlainRunner`.
        num_speculative_tokens: most draft tokens a round (N).
        max_model_len: most positions of a sequence; rows beyond write no KV.
    """

    def __init__(
        self,
        target: Target,
        caches: Seq[KVCache],
        sampler: Sampler,
        num_speculative_tokens: int,
        max_model_len: int,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(target, caches, sampler, passes)
        self.num_speculative_tokens, self.max_model_len = num_speculative_tokens, max_model_len
        self.num_lookahead_tokens = num_speculative_tokens + 1

    def _verify(
        self, drafted: Seq[Drafted], finite: Seq[bool] | None = None, draft_probabilities: Tensor | None = None
    ) -> list[RoundOutput]:
        """Verify and settle drafts of one length.

        Args:
            drafted: sequences and their draft tokens.
            finite: whether each draft's logits were finite numbers; None where no drafter proposed them.
            draft_probabilities: float32 `[sequences, N, vocab]` that the tokens were drawn from, which verifies by
                rejection; None verifies by exact match.
        """
        batch = self._verification_batch(drafted)
        output = self.passes.decode(batch)
        assert output.logits is not None
        if draft_probabilities is None:
            settlements = exact_match(self.sampler, output.logits, drafted)
        else:
            settlements = rejection(self.sampler, output.logits, drafted, draft_probabilities)
        self._after_verification(settlements, output, batch)
        for draft, settlement in zip(drafted, settlements, strict=True):
            draft.sequence.num_computed_tokens += len(settlement.tokens)
        return [
            self._output(settlement, len(draft.token_ids), is_finite)
            for draft, settlement, is_finite in zip(drafted, settlements, finite or [True] * len(drafted), strict=True)
        ]

    def _after_verification(self, settlements: Seq[Settlement], output: TargetOutput, batch: ForwardBatch) -> None:
        """What is to be done with the accepted rows of a pass over as many rows of each sequence."""

    def _verification_batch(self, drafted: Seq[Drafted]) -> ForwardBatch:
        """Anchor and draft tokens of each sequence, as many rows of each."""
        spans = [
            RowSpan(
                draft.sequence,
                draft.sequence.num_computed_tokens,
                [draft.sequence.output_token_ids[-1], *draft.token_ids],
            )
            for draft in drafted
        ]
        return forward_batch(spans, self._block_size, self.target.device, self.max_model_len)

    def _output(self, settlement: Settlement, num_draft_tokens: int, drafter_is_finite: bool) -> RoundOutput:
        error = settlement.error
        if error is None and not drafter_is_finite:
            error = self.drafter_not_finite()
        if error is not None:
            return RoundOutput(error=error)
        return RoundOutput(
            settlement.tokens,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=settlement.num_accepted,
        )
