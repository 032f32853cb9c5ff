"""A recording cut into rounds, and these into their stages."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from sparkgap.device.trace import KernelCall
from sparkgap.engine.tracing import CONTEXT, DRAFT, ROUND, TARGET, VERIFY, HostCall, PipelinedRound, Recording

SETTLE = "settle"
"""Stage that verifies draft tokens: the target's tokens are drawn, and drafts accepted."""

STAGES = ("begin", "look up", DRAFT, "fill", "choose", "lay out", TARGET, SETTLE, CONTEXT, "remember", "hand off")
"""Stages of a round in their order. Rounds that the host carries have draft, target, settle and context."""

_STAGE_OF_CALL = {DRAFT: DRAFT, TARGET: TARGET, VERIFY: SETTLE, CONTEXT: CONTEXT}


@dataclass(frozen=True)
class Span:
    """Some time.

    Attributes:
        begin_ns, end_ns: in the recording's time.
    """

    begin_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """How long it is."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class TracedRound:
    """One decode round.

    Attributes:
        number: counts from 0.
        stages: kernel calls of each stage that the round has, by begin; at least those of `TARGET`.
        verification_ns: when verification began.
        host: the round's call, of a round that the host carried.
        pipelined: how the pipeline ran it; None of a round that the host carried.
    """

    number: int
    stages: dict[str, list[KernelCall]]
    verification_ns: int
    host: HostCall | None = None
    pipelined: PipelinedRound | None = None

    @property
    def launch_ns(self) -> int:
        """When its first pass began: the draft, or the target where nothing is drafted."""
        return self.stages.get(DRAFT, self.stages[TARGET])[0].begin_ns

    @property
    def slot(self) -> int | None:
        """Index of its Slot; None of a round that the host carried."""
        return None if self.pipelined is None else self.pipelined.slot

    def envelope(self, stage: str) -> Span | None:
        """From the first begin to the last end of a stage's kernel calls; None where it has none."""
        calls = self.stages.get(stage)
        return span_of(calls) if calls else None


def span_of(calls: Sequence[KernelCall]) -> Span:
    """From the first begin to the last end of at least one call."""
    return Span(min(call.begin_ns for call in calls), max(call.end_ns for call in calls))


@dataclass
class _Parts:
    """What is known of a round before all of its kernel calls are."""

    host: HostCall | None = None
    pipelined: PipelinedRound | None = None
    stages: dict[str, list[KernelCall]] = field(default_factory=dict)

    def add(self, stage: str, call: KernelCall) -> None:
        self.stages.setdefault(stage, []).append(call)


def find_rounds(recording: Recording) -> list[TracedRound]:
    """The decode rounds of a recording, by their launch. Rounds whose kernel calls are not all there are left out."""
    kernels = recording.kernels
    parts = [*_pipelined(recording.rounds, kernels), *_carried(recording.host, kernels)]
    complete_from = _complete_from(recording)
    found = []
    for part in parts:
        if TARGET not in part.stages or min(calls[0].begin_ns for calls in part.stages.values()) < complete_from:
            continue
        found.append((_verification_ns(part, recording.host), part))
    found.sort(key=lambda item: item[0])
    return [
        TracedRound(number, part.stages, verification_ns, part.host, part.pipelined)
        for number, (verification_ns, part) in enumerate(found)
    ]


def _complete_from(recording: Recording) -> int:
    """From when on no thread's calls were given up."""
    if not recording.num_dropped:
        return 0
    first: dict[int, int] = {}
    for call in recording.kernels:
        first.setdefault(call.thread, call.begin_ns)
    return max(first.values(), default=0)


def _pipelined(rounds: Sequence[PipelinedRound], kernels: Sequence[KernelCall]) -> list[_Parts]:
    by_run = {round_.run: _Parts(pipelined=round_) for round_ in rounds if round_.run}
    for call in kernels:
        if call.run in by_run:
            by_run[call.run].add(call.graph, call)
    return list(by_run.values())


def _carried(host: Sequence[HostCall], kernels: Sequence[KernelCall]) -> list[_Parts]:
    begins = [call.begin_ns for call in kernels]
    stages = [call for call in host if call.name in _STAGE_OF_CALL]
    stage_begins = [call.begin_ns for call in stages]
    parts = []
    for call in host:
        if call.name != ROUND:
            continue
        part = _Parts(host=call)
        inside = stages[bisect_left(stage_begins, call.begin_ns) : bisect_right(stage_begins, call.end_ns)]
        for kernel in kernels[bisect_left(begins, call.begin_ns) : bisect_right(begins, call.end_ns)]:
            stage = kernel.graph or _enclosing(inside, kernel)
            if stage:
                part.add(stage, kernel)
        parts.append(part)
    return parts


def _enclosing(stages: Sequence[HostCall], kernel: KernelCall) -> str:
    """Stage of the innermost host call around a kernel call; empty outside of all."""
    around = [call for call in stages if call.begin_ns <= kernel.begin_ns <= call.end_ns]
    return _STAGE_OF_CALL[around[-1].name] if around else ""


def _verification_ns(part: _Parts, host: Sequence[HostCall]) -> int:
    """When tokens were first looked at: on the device, by the host, or else at the end of the target's pass."""
    if part.pipelined is not None and SETTLE in part.stages:
        return part.stages[SETTLE][0].begin_ns
    target_end_ns = span_of(part.stages[TARGET]).end_ns
    if part.host is not None:
        begin = bisect_left(host, target_end_ns, key=lambda call: call.begin_ns)
        for call in host[begin:]:
            if call.begin_ns > part.host.end_ns:
                break
            if call.name == VERIFY:
                return call.begin_ns
    return target_end_ns
