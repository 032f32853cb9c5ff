"""Speculative decoding: draft, propose, verify, settle, context update.

One round of a sequence with P committed positions and N speculative tokens:

1. *draft*: the block (anchor and mask tokens) at positions P ... reads the drafter's context KV of positions < P.
2. *propose*: N draft tokens, each from its row's logits and the token before it.
   An MTP drafter has no block: each of its N passes takes the token before and gives the next, from position P - 1 on.
   With a `PromptLookup`, sequences whose last tokens stood before draft what followed them there, in place of 1 and 2.
3. *verify*: the target computes anchor and draft tokens, N + 1 rows at positions P ... P + N.
   With a `DraftLengthPolicy` only as many draft tokens as pay, or a plain round in place of all this.
4. *settle*: the accepted draft tokens and the target's own token after them; P grows by as many.
5. *context update*: the drafter's context KV of the accepted rows' positions, from the hidden states that the
   target had there and, for MTP, the tokens that follow them; slots of rejected rows are -1.

Rejected rows leave target KV behind at positions that the next round rewrites before it reads them.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sparkgap.errors import EngineError
from sparkgap.graphs.passes import DraftModel, Passes, TargetOutput
from sparkgap.models.batch import ForwardBatch
from sparkgap.models.heads import Proposal
from sparkgap.models.interfaces import DraftNetwork, Target
from sparkgap.ops.operands import KVCache
from sparkgap.rounds.batching import RowSpan, block_tables
from sparkgap.rounds.draft_length import DOES_NOT_PAY, DraftLengthPolicy
from sparkgap.rounds.logits import probabilities
from sparkgap.rounds.lookup import PromptLookup
from sparkgap.rounds.random import Purpose
from sparkgap.rounds.sampling import Sampler, draw
from sparkgap.rounds.sequence import RoundOutput, SampledToken, Sequence
from sparkgap.rounds.verification import Drafted, Settlement
from sparkgap.rounds.verifying import SWITCHED_OFF, VerifyingRunner

DraftSampleMethod = Literal["greedy", "probabilistic"]

CONTEXT_TOO_LONG = "context longer than the drafter's capacity"
"""Reason for a plain round: the drafter cannot see so many positions."""

TOO_MANY_TO_DRAFT = "more sequences than drafting pays for"
"""Reason for a plain round: it has more than `disable_by_batch_size` sequences."""


@dataclass(frozen=True)
class Speculation:
    """How a runner speculates.

    Attributes:
        drafter: proposes tokens.
        caches: its context KV, in blocks of the target's numbers and size.
        num_speculative_tokens: draft tokens a round (N).
        sample_method: for sampled requests, `greedy` drafts the most probable tokens and verifies by exact match,
            so that the output is the one without speculation; `probabilistic` samples them and verifies by
            rejection.
        max_model_len: most positions of a sequence; rows beyond write no KV.
        lookup: finds drafts in a sequence's own past, which are verified instead of the drafter's; None looks nothing
            up. Not with `probabilistic`.
        length_policy: chooses how many of the draft tokens a round verifies; None verifies all. Only for drafts that
            are not sampled: with those, the tokens of a seeded request would depend on the choice.
        max_sequences: most sequences of a round that drafts; None lets all draft. Only for drafts that are not
            sampled, for the same reason.
    """

    drafter: DraftNetwork[Any]
    caches: Seq[KVCache]
    num_speculative_tokens: int
    sample_method: DraftSampleMethod
    max_model_len: int
    lookup: PromptLookup | None = None
    length_policy: DraftLengthPolicy | None = None
    max_sequences: int | None = None

    @property
    def draft_model(self) -> DraftModel:
        """What its passes compute."""
        return DraftModel(self.drafter, self.caches, self.num_speculative_tokens)


class SpeculativeRunner(VerifyingRunner):
    """Runs a target with a drafter; a sequence that it does not draft for takes plain rounds, with the reason."""

    def __init__(
        self,
        target: Target,
        caches: Seq[KVCache],
        sampler: Sampler,
        speculation: Speculation,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(
            target,
            caches,
            sampler,
            speculation.num_speculative_tokens,
            speculation.max_model_len,
            passes or Passes(target, caches, speculation.draft_model),
        )
        self.speculation = speculation

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence]) -> list[RoundOutput]:
        """One round of each sequence: its accepted draft tokens and the target's own."""
        reasons = [self._reason_against(sequence) for sequence in sequences]
        most = self.speculation.max_sequences
        if most is not None and len(sequences) > most:
            reasons = [reason or TOO_MANY_TO_DRAFT for reason in reasons]
        policy, length = self.speculation.length_policy, self.speculation.num_speculative_tokens
        found = self._look_up([s for s, reason in zip(sequences, reasons, strict=True) if reason is None])
        looked_up = {draft.sequence.sequence_id for draft in found}
        wanted = [
            s for s, reason in zip(sequences, reasons, strict=True) if reason is None and s.sequence_id not in looked_up
        ]
        if policy is not None and wanted:
            length = policy.choose(wanted)
            if length == 0:
                reasons = [
                    reason if s.sequence_id in looked_up else reason or DOES_NOT_PAY
                    for s, reason in zip(sequences, reasons, strict=True)
                ]
        drafted = wanted if length else []
        plain = [s for s, reason in zip(sequences, reasons, strict=True) if reason is not None]
        started_s = time.perf_counter()
        from_rounds = self._round(drafted, length) if drafted else []
        from_plain = iter(super().decode(plain) if plain else [])
        if policy is not None:
            # A round in which some sequences may not speculate has two passes, and tells nothing of either kind.
            if len(wanted) == len(sequences):
                policy.add_round(len(wanted), length, time.perf_counter() - started_s)
            for sequence, output in zip(drafted, from_rounds, strict=True):
                policy.add_acceptance(sequence, output.num_draft_tokens, output.num_accepted_tokens)
        rounds, lookups = iter(from_rounds), iter(self._verify(found) if found else [])
        return [
            replace(next(from_plain), not_speculated=reason)
            if reason is not None
            else next(lookups if s.sequence_id in looked_up else rounds)
            for s, reason in zip(sequences, reasons, strict=True)
        ]

    def release(self, sequence: Sequence) -> None:
        """Forget what sampling and the choice of draft lengths keep of a sequence."""
        super().release(sequence)
        if self.speculation.lookup is not None:
            self.speculation.lookup.release(sequence)
        if self.speculation.length_policy is not None:
            self.speculation.length_policy.forget(sequence)

    def _reason_against(self, sequence: Sequence) -> str | None:
        """Why a sequence takes a plain round; None when it is drafted for."""
        if not sequence.params.speculation:
            return SWITCHED_OFF
        if sequence.num_computed_tokens > self.speculation.drafter.max_context_length:
            return CONTEXT_TOO_LONG
        return None

    def _look_up(self, sequences: Seq[Sequence]) -> list[Drafted]:
        """Drafts of the sequences whose past has some."""
        lookup, count = self.speculation.lookup, self.speculation.num_speculative_tokens
        if lookup is None:
            return []
        return [
            Drafted(sequence, found)
            for sequence in sequences
            if (found := lookup.continuation(sequence, count)) is not None
        ]

    def _after_pass(
        self, output: TargetOutput, batch: ForwardBatch, spans: Seq[RowSpan], outputs: Seq[RoundOutput | None]
    ) -> None:
        """Prompt chunks and plain rounds: every row is committed, so its context KV is written at once."""
        following: list[int] = []
        for span, given in zip(spans, outputs, strict=True):
            after = span.sequence.token_ids(span.end, span.end + 1) if given is None else _padded(given.tokens, 1)
            following += [*span.token_ids[1:], *after]
        self._update_context(output, batch.attention.positions, batch.slots, following)

    def _update_context(self, output: TargetOutput, positions: Tensor, slots: Tensor, following: Seq[int]) -> None:
        """Write context KV; positions that no draft can follow are left out."""
        beyond = positions >= self.speculation.drafter.max_context_length
        self.passes.update_context(
            output, positions.masked_fill(beyond, 0), slots.masked_fill(beyond, -1), self._integers(following)
        )

    def _round(self, sequences: Seq[Sequence], length: int) -> list[RoundOutput]:
        """A round that verifies the first `length` draft tokens."""
        anchors = self._integers([sequence.output_token_ids[-1] for sequence in sequences])
        sampled = self.speculation.sample_method == "probabilistic" and not all(
            sequence.params.greedy for sequence in sequences
        )
        proposal, draft_probabilities = self._propose(sequences, anchors, sampled)
        drafted = [
            Drafted(sequence, tuple(token_ids[:length]))
            for sequence, token_ids in zip(sequences, proposal.token_ids.tolist(), strict=True)
        ]
        finite = proposal.scores.isfinite().all(-1).tolist()
        return self._verify(drafted, finite, None if draft_probabilities is None else draft_probabilities[:, :length])

    def _propose(self, sequences: Seq[Sequence], anchors: Tensor, sampled: bool) -> tuple[Proposal, Tensor | None]:
        """Draft tokens, with the distribution they are drawn from when it is needed.

        That is float32 `[sequences, N, vocab]`, all mass on the token for greedy sequences.
        """
        drafter = self.speculation.drafter
        lengths = [sequence.num_computed_tokens for sequence in sequences]
        # An MTP drafter writes entries of its own, as far as N - 1 positions behind the context.
        longest = max(lengths) + self.speculation.num_speculative_tokens
        tables = block_tables(
            [sequence.block_table for sequence in sequences],
            min(longest, self.speculation.max_model_len),
            self._block_size,
            self.target.device,
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

    def _after_verification(self, settlements: Seq[Settlement], output: TargetOutput, batch: ForwardBatch) -> None:
        """Write the context KV of the accepted rows."""
        accepted = self._integers([settlement.num_accepted for settlement in settlements])
        width = batch.attention.max_rows
        row = torch.arange(width, device=accepted.device)
        rejected = (row > accepted[:, None]).flatten()
        following = [token_id for settlement in settlements for token_id in _padded(settlement.tokens, width)]
        self._update_context(output, batch.attention.positions, batch.slots.masked_fill(rejected, -1), following)

    def drafter_not_finite(self) -> EngineError:
        """See `PlainRunner.drafter_not_finite`."""
        return EngineError(
            f"drafter {self.speculation.drafter.name} gave logits that are not finite numbers; its weights "
            "may be damaged, or its values may not fit its dtype: try dtype float32, or run without speculation"
        )

    def _integers(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)


def _padded(tokens: Seq[SampledToken], count: int) -> list[int]:
    """Ids of `count` tokens; 0 for those that are not there, whose rows are rejected or belong to no result."""
    return [*(token.token_id for token in tokens), *[0] * (count - len(tokens))]
