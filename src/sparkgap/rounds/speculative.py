"""Speculative decoding: draft, propose, verify, settle, context update.

One round of a sequence with P committed positions and N speculative tokens:

1. *draft*: the block (anchor and mask tokens) at positions P ... reads the drafter's context KV of positions < P.
2. *propose*: N draft tokens, each from its row's logits and the token before it.
3. *verify*: the target computes anchor and draft tokens, N + 1 rows at positions P ... P + N.
4. *settle*: the accepted draft tokens and the target's own token after them; P grows by as many.
5. *context update*: the drafter's context KV of the accepted rows' positions, from the hidden states that the
   target had there; slots of rejected rows are -1.

Rejected rows leave target KV behind at positions that the next round rewrites before it reads them.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparkgap.errors import EngineError
from sparkgap.graphs.passes import DraftModel, Passes, TargetOutput
from sparkgap.models.batch import ForwardBatch
from sparkgap.models.heads import Proposal
from sparkgap.models.interfaces import BlockDrafter, Target
from sparkgap.ops.kernels import KVCache
from sparkgap.rounds.batching import RowSpan, block_tables, forward_batch
from sparkgap.rounds.logits import probabilities
from sparkgap.rounds.plain import PlainRunner
from sparkgap.rounds.random import Purpose
from sparkgap.rounds.sampling import Sampler, draw
from sparkgap.rounds.sequence import RoundOutput, Sequence
from sparkgap.rounds.verification import Drafted, Settlement, exact_match, rejection

DraftSampleMethod = Literal["greedy", "probabilistic"]

CONTEXT_TOO_LONG = "context longer than the drafter's capacity"
"""Reason for a plain round: the drafter cannot see so many positions."""

SWITCHED_OFF = "switched off for the request"
"""Reason for a plain round: the request's parameters say so."""


@dataclass(frozen=True)
class Speculation:
    """How a runner speculates.

    Attributes:
        drafter: proposes tokens.
        caches: its context KV, one cache a draft layer, in blocks of the target's numbers and size.
        num_speculative_tokens: draft tokens a round (N).
        sample_method: for sampled requests, `greedy` drafts the most probable tokens and verifies by exact match,
            so that the output is the one without speculation; `probabilistic` samples them and verifies by
            rejection.
        max_model_len: most positions of a sequence; rows beyond write no KV.
    """

    drafter: BlockDrafter
    caches: Seq[KVCache]
    num_speculative_tokens: int
    sample_method: DraftSampleMethod
    max_model_len: int

    @property
    def draft_model(self) -> DraftModel:
        """What its passes compute."""
        return DraftModel(self.drafter, self.caches, self.num_speculative_tokens)


class SpeculativeRunner(PlainRunner):
    """Runs a target with a block drafter; a sequence that it does not draft for takes plain rounds, with the reason."""

    def __init__(
        self,
        target: Target,
        caches: Seq[KVCache],
        sampler: Sampler,
        speculation: Speculation,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(target, caches, sampler, passes or Passes(target, caches, speculation.draft_model))
        self.speculation = speculation
        self.num_lookahead_tokens = speculation.num_speculative_tokens + 1

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence]) -> list[RoundOutput]:
        """One round of each sequence: its accepted draft tokens and the target's own."""
        reasons = [self._reason_against(sequence) for sequence in sequences]
        drafted = [s for s, reason in zip(sequences, reasons, strict=True) if reason is None]
        plain = [s for s, reason in zip(sequences, reasons, strict=True) if reason is not None]
        from_rounds = iter(self._round(drafted) if drafted else [])
        from_plain = iter(super().decode(plain) if plain else [])
        return [
            next(from_rounds) if reason is None else replace(next(from_plain), not_speculated=reason)
            for reason in reasons
        ]

    def _reason_against(self, sequence: Sequence) -> str | None:
        """Why a sequence takes a plain round; None when it is drafted for."""
        if not sequence.params.speculation:
            return SWITCHED_OFF
        if sequence.num_computed_tokens > self.speculation.drafter.max_context_length:
            return CONTEXT_TOO_LONG
        return None

    def _after_pass(self, output: TargetOutput, batch: ForwardBatch) -> None:
        """Prompt chunks and plain rounds: every row is committed, so its context KV is written at once."""
        self._update_context(output, batch.attention.positions, batch.slots)

    def _update_context(self, output: TargetOutput, positions: Tensor, slots: Tensor) -> None:
        """Write context KV; positions that no block can follow are left out."""
        beyond = positions >= self.speculation.drafter.max_context_length
        self.passes.update_context(output, positions.masked_fill(beyond, 0), slots.masked_fill(beyond, -1))

    def _round(self, sequences: Seq[Sequence]) -> list[RoundOutput]:
        anchors = self._integers([sequence.output_token_ids[-1] for sequence in sequences])
        sampled = self.speculation.sample_method == "probabilistic" and not all(
            sequence.params.greedy for sequence in sequences
        )
        proposal, draft_probabilities = self._propose(sequences, anchors, sampled)
        drafted = [
            Drafted(sequence, tuple(token_ids))
            for sequence, token_ids in zip(sequences, proposal.token_ids.tolist(), strict=True)
        ]
        batch = self._verification_batch(drafted)
        output = self.passes.decode(batch)
        assert output.logits is not None
        if draft_probabilities is None:
            settlements = exact_match(self.sampler, output.logits, drafted)
        else:
            settlements = rejection(self.sampler, output.logits, drafted, draft_probabilities)
        self._commit(drafted, settlements, output, batch)
        finite = proposal.scores.isfinite().all(-1).tolist()
        return [self._output(settlement, is_finite) for settlement, is_finite in zip(settlements, finite, strict=True)]

    def _propose(self, sequences: Seq[Sequence], anchors: Tensor, sampled: bool) -> tuple[Proposal, Tensor | None]:
        """Draft tokens, with the distribution they are drawn from when it is needed.

        That is float32 `[sequences, N, vocab]`, all mass on the token for greedy sequences.
        """
        drafter = self.speculation.drafter
        lengths = [sequence.num_computed_tokens for sequence in sequences]
        tables = block_tables(
            [sequence.block_table for sequence in sequences], max(lengths), self._block_size, self.target.device
        )
        inputs = (anchors, self._integers(lengths), tables, max(lengths))
        if not sampled:
            return self.passes.propose(*inputs), None
        steps: list[Tensor] = []

        def pick(step: int, logits: Tensor) -> Tensor:
            step_probabilities = probabilities(logits, [sequence.params for sequence in sequences]).nan_to_num(0.0)
            steps.append(step_probabilities)
            return draw(step_probabilities, [(s.seed, s.num_tokens + step) for s in sequences], Purpose.DRAFT)

        proposal = drafter.propose(anchors, self.passes.draft(*inputs), pick)
        chosen_from = torch.stack(steps, dim=1)
        if drafter.target_ids is None:
            return proposal, chosen_from
        vocabulary = torch.zeros(*chosen_from.shape[:2], drafter.vocab_size, device=chosen_from.device)
        return proposal, vocabulary.index_copy_(2, drafter.target_ids, chosen_from)

    def _verification_batch(self, drafted: Seq[Drafted]) -> ForwardBatch:
        """Anchor and draft tokens of each sequence, N + 1 rows."""
        spans = [
            RowSpan(
                draft.sequence,
                draft.sequence.num_computed_tokens,
                [draft.sequence.output_token_ids[-1], *draft.token_ids],
            )
            for draft in drafted
        ]
        return forward_batch(spans, self._block_size, self.target.device, self.speculation.max_model_len)

    def _commit(
        self, drafted: Seq[Drafted], settlements: Seq[Settlement], output: TargetOutput, batch: ForwardBatch
    ) -> None:
        """Advance the sequences and write the context KV of the accepted rows."""
        accepted = self._integers([settlement.num_accepted for settlement in settlements])
        row = torch.arange(self.speculation.num_speculative_tokens + 1, device=accepted.device)
        rejected = (row > accepted[:, None]).flatten()
        self._update_context(output, batch.attention.positions, batch.slots.masked_fill(rejected, -1))
        for draft, settlement in zip(drafted, settlements, strict=True):
            draft.sequence.num_computed_tokens += settlement.num_accepted + 1

    def _output(self, settlement: Settlement, drafter_is_finite: bool) -> RoundOutput:
        error = settlement.error
        if error is None and not drafter_is_finite:
            error = self.drafter_not_finite()
        if error is not None:
            return RoundOutput(error=error)
        return RoundOutput(
            settlement.tokens,
            num_draft_tokens=self.speculation.num_speculative_tokens,
            num_accepted_tokens=settlement.num_accepted,
        )

    def drafter_not_finite(self) -> EngineError:
        """See `PlainRunner.drafter_not_finite`."""
        return EngineError(
            f"drafter {self.speculation.drafter.name} gave logits that are not finite numbers; its weights "
            "may be damaged, or its values may not fit its dtype: try dtype float32, or run without speculation"
        )

    def _integers(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)
