"""Prepare, launch, consume: two rounds in flight, first in, first out."""

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from sparkgap import _native
from sparkgap.device.stream import CpuStream
from sparkgap.graphs.counters import GraphCounters
from sparkgap.graphs.family import buckets_up_to
from sparkgap.graphs.passes import Passes
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.rounds.pipeline.programs import SlotPrograms
from sparkgap.rounds.pipeline.scheduling import RoundCosts, scheduled_widths
from sparkgap.rounds.pipeline.slot import RoundShape, RoundState, SequenceResult, Slot
from sparkgap.rounds.pipeline.texts import TextRows
from sparkgap.rounds.sequence import Sequence

_logger = logging.getLogger(__name__)

NUM_SLOTS = 2
"""Rounds in flight: one that runs, and one that waits for it, so that the device finds its next work at once."""

DEADLINE_S = 300.0
"""Longest wait for a round."""


class RoundFailedError(RuntimeError):
    """A round in flight gave no result."""


@dataclass(frozen=True)
class RoundInFlight:
    """A round that was submitted and not consumed.

    Attributes:
        sequences: in the order of the round's rows.
        slot: index of the Slot that it runs in.
        widths: rows that each sequence may have, which the device chooses from; 1 in a round that does not draft.
        launch: what the stream knows of it.
    """

    sequences: tuple[Sequence, ...]
    slot: int
    widths: tuple[int, ...]
    launch: _native.Launch


class Pipeline:
    """Rounds chained on the device. One thread at a time calls it, as it does the engine.

    `submit` stages the inputs of a round and returns when the pipeline owns them; the stream patches in what the round
    before left, drafts, verifies, settles, updates the context and hands the state on; `consume` waits for the oldest
    round and returns values that the caller owns. Between the verification of a round and the draft of the next lies
    neither a copy to the host, nor a wait, nor any Python.

    Args:
        passes: target, caches and drafter.
        kernels: that compute them.
        max_sequences: most sequences decoded together.
        max_model_len: most positions of a sequence.
        counters: told of captures and replays.
        lookup_lengths: fewest and most last tokens whose earlier place in the text gives drafts; None looks nothing up.
        lookup_tokens: without a drafter, draft tokens of a round that finds some.
        max_drafting: most sequences of a round that drafts; None lets all draft.
        prefix_scheduling: whether the device chooses how many draft tokens a round verifies, by what to expect of them.

    Attributes:
        buckets: numbers of sequences that there are programs for, smallest first.
        slots: what rounds run in.
        state: what one round leaves to the next.
        texts: which row of the state's texts is whose.
        stream: where they run.
        nbytes: memory of Slots and programs.
        capture_ms: time that capturing the programs took.
        prefix_scheduling: as given.
        costs: what the choice of draft tokens goes by; None without one. Of what is only looked up, all is verified
            without prefix scheduling: they are not measured.
    """

    def __init__(
        self,
        passes: Passes,
        kernels: NativeKernels,
        *,
        max_sequences: int,
        max_model_len: int,
        counters: GraphCounters,
        lookup_lengths: tuple[int, int] | None = None,
        lookup_tokens: int = 0,
        max_drafting: int | None = None,
        prefix_scheduling: bool = False,
    ) -> None:
        self.buckets = buckets_up_to(max_sequences)
        if max_drafting is not None and max_drafting < self.buckets[-1]:
            # Padded to the next bucket, the largest round that is to draft would not.
            self.buckets = tuple(sorted({*self.buckets, max_drafting}))
        width = 1 + (lookup_tokens if passes.drafting is None else passes.drafting.num_speculative_tokens)
        shape = RoundShape(self.buckets[-1], width, passes.caches[0].block_size, max_model_len)
        self.texts = TextRows(0 if lookup_lengths is None else (NUM_SLOTS + 1) * shape.max_sequences)
        self.state = RoundState(shape, self.texts.count)
        self.slots = tuple(Slot(shape) for _ in range(NUM_SLOTS))
        self.stream = CpuStream()
        self._counters = counters
        self._drafts = passes.drafting is not None
        drafting = [bucket for bucket in self.buckets if max_drafting is None or bucket <= max_drafting]
        widths = scheduled_widths(width - 1) if prefix_scheduling else (width,)
        if width > 1 and not self._drafts:
            widths = (1, *widths)  # nothing may be found
        self.costs = RoundCosts(widths, drafting) if len(widths) > 1 else None
        self._programs = tuple(
            SlotPrograms(slot, self.state, passes, kernels, counters, lookup_lengths, max_drafting, self.costs)
            for slot in self.slots
        )
        started_s = time.perf_counter()
        with torch.inference_mode():
            for programs in self._programs:
                programs.capture(self.buckets)
        self.capture_ms = (time.perf_counter() - started_s) * 1000
        self.prefix_scheduling = prefix_scheduling
        if self.costs is not None and prefix_scheduling:
            self._programs[0].measure(self.costs)
        self.nbytes = sum(slot.nbytes for slot in self.slots) + sum(programs.nbytes for programs in self._programs)
        self._rounds: deque[RoundInFlight] = deque()
        self._in_flight: Counter[int] = Counter()
        self._next_slot = 0

    @property
    def rounds(self) -> tuple[RoundInFlight, ...]:
        """Rounds in flight, oldest first."""
        return tuple(self._rounds)

    @property
    def is_full(self) -> bool:
        """Whether a round must be consumed before another is submitted."""
        return len(self._rounds) == NUM_SLOTS

    @property
    def in_flight(self) -> Mapping[int, int]:
        """Rounds in flight that each sequence takes part in, by its id; those of none are left out."""
        return self._in_flight

    def submit(self, sequences: Seq[Sequence]) -> None:
        """Stage a round and launch it. Either the pipeline owns the round afterwards, or it has changed nothing.

        An error in the launch itself drops all rounds in flight, as `reset` does.

        A sequence goes on from the last round submitted where that has it, and otherwise from its own tokens: it must
        not be in another round in flight then.

        Args:
            sequences: at least one and at most the largest of `buckets`, with blocks for all positions that the round
                may write.

        Raises:
            RuntimeError: the pipeline is full, or has been closed.
            MissingBindingError: no program is bound to the round's Slot.
        """
        if self.is_full:
            raise RuntimeError(f"{NUM_SLOTS} rounds are in flight; consume one first")
        bucket = next((bucket for bucket in self.buckets if bucket >= len(sequences)), None)
        if bucket is None or not sequences:
            raise ValueError(f"a round has 1 to {self.buckets[-1]} sequences, not {len(sequences)}")
        programs = self._programs[self._next_slot]
        program, widths = programs.of(bucket), programs.widths(bucket)
        before = self._rounds[-1].sequences if self._rounds else ()
        rows = {sequence.sequence_id: row for row, sequence in enumerate(before)}
        sources = [rows.get(sequence.sequence_id, -1) for sequence in sequences]
        text_rows = [self._text_row(sequence, source) for sequence, source in zip(sequences, sources, strict=True)]
        self.slots[self._next_slot].stage(sequences, sources, text_rows, bucket)
        try:
            launch = self.stream.launch(program)
            self._rounds.append(RoundInFlight(tuple(sequences), self._next_slot, widths, launch))
            for sequence in sequences:
                self._in_flight[sequence.sequence_id] += 1
            self._next_slot = (self._next_slot + 1) % NUM_SLOTS
        except BaseException:
            # It may run, and the rounds in flight with it go on from a state that nobody knows.
            self.reset()
            raise
        replays = self._counters.replays
        replays["target"] += 1
        if self._drafts:
            replays["context"] += 1

    def consume(self) -> list[SequenceResult]:
        """Wait for the oldest round; what it gave each of its sequences.

        Raises:
            RoundFailedError: it failed, or has not ended in time. The pipeline is to be `reset`.
        """
        oldest = self._rounds[0]
        if not oldest.launch.wait(DEADLINE_S):
            raise RoundFailedError(f"a round has not ended after {DEADLINE_S:.0f} s")
        if oldest.launch.error:
            raise RoundFailedError(oldest.launch.error)
        slot = self.slots[oldest.slot]
        results = slot.read_results(len(oldest.sequences), oldest.widths, self._drafts)
        self._counters.replays["draft"] += self._drafts and oldest.widths[-1] > 1 and slot.has_drafted
        self._rounds.popleft()
        for sequence in oldest.sequences:
            self._in_flight[sequence.sequence_id] -= 1
            if not self._in_flight[sequence.sequence_id]:
                del self._in_flight[sequence.sequence_id]
        self._free_texts()
        return results

    def reset(self) -> None:
        """Wait for what runs, and drop all rounds in flight; their sequences are where they were on the host.

        Raises:
            RoundFailedError: what runs does not end.
        """
        if self._rounds:
            _logger.debug("dropping %d rounds in flight", len(self._rounds))
        if not self.stream.reset(DEADLINE_S):
            raise RoundFailedError(f"a round has not ended after {DEADLINE_S:.0f} s")
        self._drop_rounds()
        self._free_texts()

    def forget(self, sequence: Sequence) -> None:
        """The sequence gives its blocks back."""
        for slot in self.slots:
            slot.forget(sequence)
        self.texts.retire(sequence.sequence_id)
        self._free_texts()

    def _text_row(self, sequence: Sequence, source: int) -> int:
        """Row of the sequence's text, which is written where the sequence begins from its own tokens."""
        if not self.texts.count:
            return -1
        row = self.texts.of(sequence.sequence_id)
        if source < 0:
            self.state.write_text(row, sequence)
        return row

    def _free_texts(self) -> None:
        """Rounds in flight write to the texts of sequences that have ended, too."""
        self.texts.free_retired(self._in_flight.keys())

    def _drop_rounds(self) -> None:
        self._rounds.clear()
        self._in_flight.clear()

    def close(self) -> None:
        """End the stream; nothing can be submitted any more."""
        self.stream.stop()
        self._drop_rounds()
