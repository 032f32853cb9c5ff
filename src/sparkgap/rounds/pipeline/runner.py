"""Rounds through the pipeline where it takes them, and through the host where it does not."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from sparkgap.ops.rounds import RoundStatus
from sparkgap.rounds.draft_length import DOES_NOT_PAY
from sparkgap.rounds.lookup import NOT_FOUND
from sparkgap.rounds.pipeline.admission import EngineFacts, Refusal, refusals
from sparkgap.rounds.pipeline.pipeline import NUM_SLOTS, Pipeline
from sparkgap.rounds.pipeline.slot import SequenceResult
from sparkgap.rounds.plain import PlainRunner
from sparkgap.rounds.sequence import PrefillChunk, RoundOutput, SampledToken, Sequence
from sparkgap.rounds.speculative import TOO_MANY_TO_DRAFT


class Split(NamedTuple):
    """Sequences that are to decode, by the way they take.

    Attributes:
        pipelined: the pipeline takes their next round, now or when it has room.
        direct: the host carries their next round.
    """

    pipelined: list[Sequence]
    direct: list[Sequence]


class PipelinedRunner:
    """A runner whose rounds are submitted ahead of their results.

    Results come one round late. What a round gives a sequence that has ended meanwhile is dropped, and its KV lies at
    positions that nobody reads before they are written again; its blocks must stay the sequence's until the round is
    consumed.

    Args:
        direct: computes prompts, and the rounds that the pipeline does not take.
        pipeline: computes the others.
        facts: what admission must know of the engine.

    Attributes:
        refused: rounds that the pipeline did not take, by reason.
    """

    num_rounds_ahead = NUM_SLOTS
    """Most rounds of a sequence that are in flight at once."""

    def __init__(self, direct: PlainRunner, pipeline: Pipeline, facts: EngineFacts) -> None:
        self.direct = direct
        self.pipeline = pipeline
        self.facts = facts
        self.num_lookahead_tokens = direct.num_lookahead_tokens
        self.refused: Counter[Refusal] = Counter()

    def prefill(self, chunks: Seq[PrefillChunk]) -> list[RoundOutput | None]:
        """See `Runner.prefill`."""
        return self.direct.prefill(chunks)

    def decode(self, sequences: Seq[Sequence]) -> list[RoundOutput]:
        """See `Runner.decode`: a round that the host waits for, of sequences that have none in flight."""
        return self.direct.decode(sequences)

    def release(self, sequence: Sequence) -> None:
        """See `Runner.release`."""
        self.pipeline.forget(sequence)
        self.direct.release(sequence)

    def in_flight(self) -> Mapping[int, int]:
        """Rounds in flight of each sequence, by its id; those that have none are left out."""
        return self.pipeline.in_flight

    def split(self, sequences: Seq[Sequence]) -> Split:
        """Which sequences the pipeline takes. A refused one with rounds in flight is in neither list: it must wait."""
        in_flight = self.in_flight()
        room = self.pipeline.buckets[-1] - sum(s.sequence_id in in_flight for s in sequences)
        split = Split([], [])
        for sequence in sequences:
            reasons = refusals(self.facts, sequence)
            if sequence.sequence_id in in_flight:
                if not reasons:
                    split.pipelined.append(sequence)
                continue
            if not reasons and room <= 0:
                reasons = (Refusal.TOO_MANY_SEQUENCES,)
            if reasons:
                split.direct.append(sequence)
                self.refused.update(reasons)
            else:
                split.pipelined.append(sequence)
                room -= 1
        return split

    def next_round(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Those of `sequences` whose next round can be submitted now.

        Nothing is known yet of rounds in flight but their bounds: a sequence waits for them when it may end meanwhile
        at a limit, reach the end of its context or of the drafter's capacity, or has no blocks for so many tokens.
        """
        if self.pipeline.is_full:
            return []
        in_flight = self.in_flight()
        return [s for s in sequences if self._can_go_on(s, in_flight.get(s.sequence_id, 0))]

    def submit(self, sequences: Seq[Sequence]) -> list[None]:
        """Launch a round of `next_round`'s sequences; its outputs come from `consume`."""
        self.pipeline.submit(sequences)
        return [None] * len(sequences)

    @property
    def oldest(self) -> tuple[Sequence, ...]:
        """Sequences of the round that `consume` gives next; empty when none is in flight."""
        rounds = self.pipeline.rounds
        return rounds[0].sequences if rounds else ()

    def consume(self) -> list[RoundOutput]:
        """Wait for the oldest round: an output for each of its sequences, which advance.

        Raises:
            RoundFailedError: the round failed. All rounds in flight are dropped, and the pipeline is ready again.
        """
        sequences = self.oldest
        try:
            results = self.pipeline.consume()
            outputs = [self._output(result) for result in results]
        except BaseException:
            self.pipeline.reset()
            raise
        for sequence, result in zip(sequences, results, strict=True):
            sequence.num_computed_tokens += len(result.token_ids)
        return outputs

    def reset(self) -> None:
        """Wait for the rounds in flight and drop them."""
        self.pipeline.reset()

    def close(self) -> None:
        """End the pipeline's thread."""
        self.pipeline.close()

    def _can_go_on(self, sequence: Sequence, rounds_ahead: int) -> bool:
        width, block_size = self.num_lookahead_tokens, self.pipeline.slots[0].shape.block_size
        limit = self.pipeline.slots[0].shape.max_model_len
        most = sequence.num_computed_tokens + rounds_ahead * width
        fewest_output_tokens = len(sequence.output_token_ids) + rounds_ahead
        if sequence.max_output_tokens is not None and fewest_output_tokens >= sequence.max_output_tokens:
            return False
        if rounds_ahead and most >= limit:
            return False
        if self.facts.max_context_length is not None and most > self.facts.max_context_length:
            return False
        return len(sequence.block_table) * block_size >= min(most + width, limit)

    def _output(self, result: SequenceResult) -> RoundOutput:
        if result.status is RoundStatus.TARGET_NOT_FINITE:
            return RoundOutput(error=self.direct.sampler.not_finite())
        if result.status is RoundStatus.DRAFTER_NOT_FINITE:
            return RoundOutput(error=self.direct.drafter_not_finite())
        return RoundOutput(
            [SampledToken(token_id, None) for token_id in result.token_ids],
            num_draft_tokens=result.num_draft_tokens,
            num_accepted_tokens=result.num_accepted,
            not_speculated=None if result.num_draft_tokens else self._reason_for_none(result),
        )

    def _reason_for_none(self, result: SequenceResult) -> str | None:
        """Why a round verified no draft tokens; None without speculation."""
        if result.has_drafts:
            return DOES_NOT_PAY
        if self.facts.looks_up:
            return NOT_FOUND
        return TOO_MANY_TO_DRAFT if self.facts.speculates else None
