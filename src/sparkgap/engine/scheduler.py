"""Which sequences a step computes: first come, first served, with chunked prompts and preemption by recompute."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sparkgap.engine.blocks import BlockManager
from sparkgap.engine.pacing import PrefillPacer
from sparkgap.engine.prefix import PrefixCache
from sparkgap.rounds.sequence import PrefillChunk, Sequence


@dataclass(frozen=True)
class Schedule:
    """What one step does.

    Attributes:
        decodes: sequences that take a decode round.
        chunks: prompt chunks; none of a sequence in `decodes`.
        preempted: sequences that gave up their blocks and wait to be recomputed.
        admitted: sequences that got their first blocks in this step, with the number of their tokens whose KV was
            found in them.
    """

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)


class Scheduler:
    """Keeps waiting and running sequences and their KV blocks.

    A sequence is admitted when all its tokens and one round fit in the free blocks and those that hold the beginning
    of its tokens already. Running sequences then grow round by round; when no block is left, the one admitted last
    gives way. A sequence whose next block is being computed by another that reads the same prompt waits for it.

    Attributes:
        blocks: the KV blocks.
        prefixes: finds blocks with known content.
        pacer: says how many prompt tokens a step computes.
        max_num_seqs: most running sequences.
        max_model_len: most positions of a sequence.
        num_lookahead_tokens: positions that one decode round may write.
        num_rounds_ahead: most rounds of a sequence that are submitted before their results are known.
    """

    def __init__(
        self,
        blocks: BlockManager,
        prefixes: PrefixCache,
        pacer: PrefillPacer,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_lookahead_tokens: int,
        num_rounds_ahead: int = 1,
    ) -> None:
        self.blocks = blocks
        self.prefixes = prefixes
        self.pacer = pacer
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.num_lookahead_tokens = num_lookahead_tokens
        self.num_rounds_ahead = num_rounds_ahead
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._retired: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that have no blocks yet or no more."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have blocks."""
        return len(self._running)

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence needs to grow to `num_tokens` tokens: its last token's round included."""
        return self.blocks.blocks_for(self._reach(num_tokens))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running, and take its blocks back."""
        self._take_out(sequence)
        self.blocks.free(sequence.block_table)
        self.prefixes.forget(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Forget a sequence that rounds in flight still write for: its blocks are kept until `free_retired`."""
        self._take_out(sequence)
        self.prefixes.forget(sequence)
        self._retired.append(sequence)

    def free_retired(self, in_flight: Mapping[int, int]) -> None:
        """Take back the blocks of retired sequences that have no round in flight any more."""
        for sequence in self._retired:
            if not in_flight.get(sequence.sequence_id):
                self.blocks.free(sequence.block_table)
        self._retired = [sequence for sequence in self._retired if sequence.block_table]

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Let all `sequences`, which are all there are, wait to be computed from their first token.

        No block's content is trusted any more.
        """
        self._running.clear()
        for sequence in self._retired:
            sequence.block_table.clear()
        self._retired.clear()
        self._waiting = deque(sequences)
        for sequence in self._waiting:
            sequence.block_table.clear()
            sequence.num_computed_tokens = 0
        self.blocks.reset()
        self.prefixes.retain(self._waiting)

    def _take_out(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def schedule(self, in_flight: Mapping[int, int] | None = None) -> Schedule:
        """Decide the next step, taking the blocks it needs.

        Args:
            in_flight: rounds in flight of each sequence, by its id. Nobody is preempted while there are any, since they
                write to blocks: when blocks run out, no round is scheduled until all have been consumed.
        """
        schedule = Schedule()
        is_short = self._schedule_ahead(schedule, in_flight) if in_flight else self._schedule_decodes(schedule)
        budget = self._schedule_running_chunks(schedule)
        # What a preemption freed, and what is short, is for those who run.
        if not is_short:
            self._admit(schedule, budget)
        return schedule

    def _reach(self, num_tokens: int, rounds: int = 1) -> int:
        """Positions that must have blocks for so many rounds, the first of which computes the last of `num_tokens`."""
        return min(num_tokens - 1 + rounds * self.num_lookahead_tokens, self.max_model_len)

    def _schedule_decodes(self, schedule: Schedule) -> bool:
        """Schedule decodes, preempting for them; whether anyone was."""
        for sequence in [s for s in self._running if _is_decoding(s)]:
            # Making room for an older sequence may have taken this one's blocks.
            if sequence.block_table and self._make_room(sequence, schedule):
                schedule.decodes.append(sequence)
        self._reserve_ahead(schedule)
        return bool(schedule.preempted)

    def _schedule_ahead(self, schedule: Schedule, in_flight: Mapping[int, int]) -> bool:
        """Schedule decodes behind rounds in flight; whether blocks are short."""
        for sequence in [s for s in self._running if _is_decoding(s)]:
            rounds = min(in_flight.get(sequence.sequence_id, 0) + 1, self.num_rounds_ahead)
            if not self.blocks.extend(sequence.block_table, self._reach(sequence.num_tokens, rounds)):
                schedule.decodes.clear()
                return True
            schedule.decodes.append(sequence)
        self._reserve_ahead(schedule)
        return False

    def _reserve_ahead(self, schedule: Schedule) -> None:
        """Blocks for all the rounds that may be submitted ahead, for whom there are any."""
        if self.num_rounds_ahead > 1:
            for sequence in schedule.decodes:
                self.blocks.extend(sequence.block_table, self._reach(sequence.num_tokens, self.num_rounds_ahead))

    def _make_room(self, sequence: Sequence, schedule: Schedule) -> bool:
        while not self.blocks.extend(sequence.block_table, self._reach(sequence.num_tokens)):
            newest = self._running[-1]
            if newest is sequence and len(self._running) == 1:
                raise RuntimeError(
                    f"sequence {sequence.sequence_id} of {sequence.num_tokens} tokens does not fit in "
                    f"{self.blocks.num_blocks} KV blocks, though it was admitted"
                )
            self._preempt(newest)
            schedule.preempted.append(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.blocks.free(sequence.block_table)
        sequence.num_computed_tokens = 0
        self._waiting.appendleft(sequence)

    def _schedule_running_chunks(self, schedule: Schedule) -> int:
        budget = self.pacer.num_tokens(len(schedule.decodes))
        for sequence in self._running:
            if budget and not _is_decoding(sequence):
                budget -= _add_chunk(schedule, sequence, budget)
        return budget

    def _admit(self, schedule: Schedule, budget: int) -> None:
        while budget and self._waiting and len(self._running) < self.max_num_seqs:
            sequence = self._waiting[0]
            found = self.prefixes.find(sequence)
            if self.prefixes.is_underway(sequence, len(found), self._reading()):
                return
            self.blocks.share(sequence.block_table, found)
            if not self.blocks.extend(sequence.block_table, self._reach(sequence.num_tokens + 1)):
                self.blocks.free(sequence.block_table)
                return
            self.prefixes.admit(sequence, len(found))
            sequence.num_computed_tokens = len(found) * self.blocks.block_size
            self._running.append(self._waiting.popleft())
            schedule.admitted.append((sequence, sequence.num_computed_tokens))
            budget -= _add_chunk(schedule, sequence, budget)

    def _reading(self) -> list[Sequence]:
        """Running sequences whose prompts are not computed yet."""
        return [sequence for sequence in self._running if not _is_decoding(sequence)]


def _is_decoding(sequence: Sequence) -> bool:
    """Whether all tokens but the last, an output token, are computed."""
    return bool(sequence.output_token_ids) and sequence.num_computed_tokens == sequence.num_tokens - 1


def _add_chunk(schedule: Schedule, sequence: Sequence, budget: int) -> int:
    end = min(sequence.num_tokens, sequence.num_computed_tokens + budget)
    schedule.chunks.append(PrefillChunk(sequence, end))
    return end - sequence.num_computed_tokens
