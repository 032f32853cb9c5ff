"""What rounds cost, for a device that chooses how many draft tokens each of them verifies."""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from sparkgap.device.cpu import CpuGraph
from sparkgap.rounds.draft_length import draft_lengths

_REPEATS = 2
"""Replays of which the shorter counts: what else the machine does makes them longer, never shorter."""

_FAR_POSITION = 1023
"""Where passes are timed again, for what attention adds to them."""


def scheduled_widths(num_speculative_tokens: int) -> tuple[int, ...]:
    """Rows of each sequence that a round may verify, anchor and draft tokens, rising."""
    return tuple(length + 1 for length in reversed(draft_lengths(num_speculative_tokens)))


class RoundCosts:
    """Times of rounds by the rows that they verify, on this machine: measured at startup, read by the device.

    They are those of the draft, where a round has one, and of the pass that verifies, which are nearly all of a round.

    Args:
        widths: rows of each sequence that a round may verify, rising.
        buckets: numbers of sequences of rounds that may verify draft tokens.

    Attributes:
        widths: those.
        lengths: int64 `[choices]`, draft tokens that go with them.
        growth: float64 `[choices]`, milliseconds that each position of a sequence adds to a round: attention reads
            them all.
        measure_ms: time that measuring took.
    """

    def __init__(self, widths: Seq[int], buckets: Iterable[int]) -> None:
        self.widths = tuple(widths)
        self.lengths = torch.tensor([width - 1 for width in widths])
        self.growth = torch.zeros(len(self.widths), dtype=torch.float64)
        self._by_bucket = {bucket: torch.ones(len(self.widths), dtype=torch.float64) for bucket in buckets}
        self._draft_by_bucket = {bucket: torch.zeros(1, dtype=torch.float64) for bucket in self._by_bucket}
        self.measure_ms = 0.0
        self._pass_ms: dict[int, float] = {}
        self._draft_ms: dict[int, float] = {}

    @property
    def buckets(self) -> list[int]:
        """The numbers of sequences, rising."""
        return sorted(self._by_bucket)

    @property
    def timed_buckets(self) -> list[int]:
        """Those of which passes are to be timed: powers of two, and the last."""
        return [bucket for bucket in self.buckets if bucket & (bucket - 1) == 0 or bucket == self.buckets[-1]]

    def of(self, bucket: int) -> Tensor:
        """float64 `[choices]`: milliseconds of the pass that verifies at position 0, for each of `widths`.

        Args:
            bucket: number of sequences.

        Returns:
            The same tensor at each call, so that graphs can be captured over it; it holds ones until `measure`.
        """
        return self._by_bucket[bucket]

    def draft_of(self, bucket: int) -> Tensor:
        """float64 `[1]`: milliseconds of the draft of `bucket` sequences, at each call the same tensor, as of `of`."""
        return self._draft_by_bucket[bucket]

    def as_dict(self) -> dict[int, list[float]]:
        """Milliseconds of draft and verification at position 0 by number of sequences, in the order of `widths`."""
        return {bucket: (self.draft_of(bucket) + self.of(bucket)).tolist() for bucket in self.buckets}

    def measure(self, bucket: int, draft: CpuGraph | None, targets: Seq[CpuGraph]) -> None:
        """Time a draft and the passes that verify. What is known of them says what all other buckets cost.

        Of more sequences than the first that are measured, only the narrowest and the widest pass are timed; what lies
        between is interpolated by the number of rows. Passes of as many rows as were timed before are not timed again.

        Args:
            bucket: number of sequences.
            draft: their draft; None where there is none.
            targets: their target passes, one for each of `widths`. All graphs can run, with all rows at position 0:
                they write nowhere.
        """
        started_s = time.perf_counter()
        rows = [bucket * width for width in self.widths]
        wanted = dict(zip(rows, targets, strict=True))
        if self._pass_ms:
            wanted = {number: wanted[number] for number in (rows[0], rows[-1])}
        new = {number: graph for number, graph in wanted.items() if number not in self._pass_ms}
        self._pass_ms |= zip(new, _shortest_ms(new.values()), strict=True)
        self._draft_ms[bucket] = 0.0 if draft is None else _shortest_ms([draft])[0]
        known_rows = sorted(self._pass_ms)
        # Fewer rows never take longer: a pass that seems to was disturbed.
        known_ms = np.minimum.accumulate([self._pass_ms[number] for number in reversed(known_rows)])[::-1]
        known_buckets = sorted(self._draft_ms)
        drafts_ms = [self._draft_ms[known] for known in known_buckets]
        for each in self.buckets:
            self.of(each).copy_(torch.from_numpy(np.interp(np.multiply(self.widths, each), known_rows, known_ms)))
            self.draft_of(each).fill_(float(np.interp(each, known_buckets, drafts_ms)))
        self.measure_ms += (time.perf_counter() - started_s) * 1000

    def measure_growth(self, targets: Seq[CpuGraph], move_to: Callable[[int], None], max_model_len: int) -> None:
        """Time passes that verify one sequence again, far from position 0.

        Attention takes as long as there are rows, so the narrowest and the widest pass say what all others take.

        Args:
            targets: one for each of `widths`, which were measured at position 0.
            move_to: sets the position of all their rows.
            max_model_len: most positions of a sequence.
        """
        started_s = time.perf_counter()
        far = min(_FAR_POSITION, max_model_len - 1)
        move_to(far)
        ends = [self.widths[0], self.widths[-1]]
        far_ms = _shortest_ms([targets[0], targets[-1]])
        grown_ms = [max(ms - self._pass_ms[width], 0.0) for ms, width in zip(far_ms, ends, strict=True)]
        grown_ms[1] = max(grown_ms)
        self.growth.copy_(torch.from_numpy(np.interp(self.widths, ends, grown_ms) / max(far, 1)))
        self.measure_ms += (time.perf_counter() - started_s) * 1000


def _shortest_ms(graphs: Iterable[CpuGraph]) -> list[float]:
    """Time of a replay of each, in turns."""
    listed = list(graphs)
    turns = [[_replay_ms(graph) for graph in listed] for _ in range(_REPEATS)]
    return [min(times) for times in zip(*turns, strict=True)]


def _replay_ms(graph: CpuGraph) -> float:
    started_s = time.perf_counter()
    graph.replay()
    return (time.perf_counter() - started_s) * 1000
