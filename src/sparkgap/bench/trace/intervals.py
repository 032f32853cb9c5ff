"""Where the time of a round goes, from its kernel calls and the host's."""

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from sparkgap.bench.trace.rounds import Span, TracedRound, find_rounds
from sparkgap.device.trace import KernelCall
from sparkgap.engine.tracing import CONSUME, CONTEXT, DRAFT, LAUNCH, TARGET, Recording
from sparkgap.errors import ConfigError

SKIPPED_ROUNDS = 2
"""First rounds of a request, which are not steady yet: caches are cold, and the pipeline fills."""

KV_WRITES = frozenset({"KvWrite", "RotaryWrite"})
"""Kinds of kernel calls that scatter keys and values into a cache."""

_COPIES = frozenset({"copy_", "_to_copy", "clone", "_local_scalar_dense", "index_copy_"})


@dataclass(frozen=True)
class HostCalls:
    """Calls of the host in some time.

    Attributes:
        launches: passes, programs and single operations that Python gave the device.
        waits: for the device.
        copies, other_operations: of torch. None where the recording is without torch operations.
    """

    launches: int
    waits: int
    copies: int | None = None
    other_operations: int | None = None

    @property
    def total(self) -> int:
        """All of them."""
        return self.launches + self.waits + (self.copies or 0) + (self.other_operations or 0)


@dataclass(frozen=True)
class RoundIntervals:
    """One round that is followed by another. Intervals are None where a round has no such stage.

    Attributes:
        context_graphs: replays of context graphs.
        context_kv_writes: kernel calls that scattered context keys and values, one a draft layer.
        projection_to_last_write_ms: from the begin of the context's projection to the end of its last scatter.
        draft_ms: from the first begin to the last end of the draft's kernel calls.
        target_ms: the same of the target's.
        draft_to_target_ms: from the draft's begin to the target's.
        verification_to_next_ms: from the begin of verification to the launch of the next round's first pass.
        round_ms: from launch to launch.
        uncovered_ms: time in the former in which no thread ran a kernel call.
        host: calls of the host that began in it.
    """

    context_graphs: int
    context_kv_writes: int
    projection_to_last_write_ms: float | None
    draft_ms: float | None
    target_ms: float
    draft_to_target_ms: float | None
    verification_to_next_ms: float
    round_ms: float
    uncovered_ms: float
    host: HostCalls

    @property
    def verification_to_next_share(self) -> float:
        """`verification_to_next_ms` of the round."""
        return self.verification_to_next_ms / self.round_ms

    @property
    def uncovered_share(self) -> float:
        """`uncovered_ms` of the round."""
        return self.uncovered_ms / self.round_ms


INTERVALS = (
    "context_graphs",
    "context_kv_writes",
    "projection_to_last_write_ms",
    "draft_ms",
    "target_ms",
    "draft_to_target_ms",
    "verification_to_next_ms",
    "verification_to_next_share",
    "round_ms",
    "uncovered_ms",
    "uncovered_share",
)
"""Names of a round's numbers, in the order of reports."""


@dataclass(frozen=True)
class Quartiles:
    """Several measurements of one thing.

    Attributes:
        median: half of them are below.
        lower, upper: a quarter of them are below, and above.
    """

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quartiles":
        """Of at least one value."""
        listed = sorted(values)
        if len(listed) == 1:
            return cls(listed[0], listed[0], listed[0])
        lower, median, upper = statistics.quantiles(listed, n=4, method="inclusive")
        return cls(median, lower, upper)


@dataclass(frozen=True)
class IntervalReport:
    """Steady rounds of one request.

    Attributes:
        rounds: how many there are.
        drafted: whether they have a draft; those whose draft tokens were all looked up have none.
        other_rounds: steady rounds of other kinds, or that one of another kind follows, which are left out.
        intervals: each of `INTERVALS` over them; None where the rounds have no such stage.
        host_calls: mean number of calls of the host in the window after verification, by kind (the fields of
            `HostCalls`, and `total`).
    """

    rounds: int
    drafted: bool
    other_rounds: int
    intervals: dict[str, Quartiles | None]
    host_calls: dict[str, float]


def interval_reports(requests: Mapping[str, tuple[Recording, Recording]]) -> dict[str, IntervalReport]:
    """What the steady rounds of requests show, by the same names.

    All reports are of rounds with a draft, or all of rounds without, whichever the requests have more of in common;
    only where they have neither in common, each is of what it has most of.

    Args:
        requests: of each two recordings, without torch operations, where times are taken from, and with them, where
            the host's calls are taken from.

    Raises:
        ConfigError: a request had too few rounds.
    """
    found = {name: (steady_rounds(timed), steady_rounds(counted)) for name, (timed, counted) in requests.items()}
    common = {
        drafted: min(len(steady.of[drafted]) for pair in found.values() for steady in pair) for drafted in (True, False)
    }
    drafted = max((True, False), key=lambda drafted: common[drafted])
    reports = {}
    for name, (timed, counted) in found.items():
        kind = drafted if common[drafted] else max((True, False), key=lambda drafted: len(timed.of[drafted]))
        if not timed.of[kind] or not counted.of[kind]:
            raise ConfigError(
                f"the request had {timed.all_rounds} decode rounds, and none after the first {SKIPPED_ROUNDS} is "
                "followed by one of the same kind, which an interval report needs; raise --max-tokens, or add "
                "--ignore-eos"
            )
        other_rounds = timed.all_rounds - SKIPPED_ROUNDS - 1 - len(timed.of[kind])
        reports[name] = _report(timed.of[kind], [round_.host for round_ in counted.of[kind]], kind, other_rounds)
    return reports


def _report(
    rounds: Sequence[RoundIntervals], counts: Sequence[HostCalls], drafted: bool, other_rounds: int
) -> IntervalReport:
    return IntervalReport(
        len(rounds),
        drafted,
        other_rounds,
        {name: _quartiles([getattr(round_, name) for round_ in rounds]) for name in INTERVALS},
        {
            name: statistics.fmean(getattr(count, name) or 0 for count in counts)
            for name in (*(field.name for field in fields(HostCalls)), "total")
        },
    )


@dataclass(frozen=True)
class SteadyRounds:
    """Rounds after the first `SKIPPED_ROUNDS` that are followed by another of their kind.

    Attributes:
        all_rounds: how many the recording has, of all kinds and at all places.
        of: those with a draft (True), and those without: of each, the kind that most rounds are of.
    """

    all_rounds: int
    of: dict[bool, list[RoundIntervals]]


def steady_rounds(recording: Recording) -> SteadyRounds:
    """The steady rounds of a recording."""
    rounds = find_rounds(recording)
    kinds = Counter(frozenset(round_.stages) for round_ in rounds)
    busy = busy_spans(recording.kernels)
    steady: dict[bool, list[RoundIntervals]] = {}
    for drafted in (True, False):
        usual = next((kind for kind, _ in kinds.most_common() if (DRAFT in kind) == drafted), None)
        steady[drafted] = [
            measure(round_, following, recording, busy)
            for round_, following in pairwise(rounds[SKIPPED_ROUNDS:])
            if usual == frozenset(round_.stages) == frozenset(following.stages)
        ]
    return SteadyRounds(len(rounds), steady)


def measure(round_: TracedRound, following: TracedRound, recording: Recording, busy: Sequence[Span]) -> RoundIntervals:
    """The intervals of a round that `following` comes after, in a recording with these `busy_spans`."""
    draft, target = round_.envelope(DRAFT), round_.envelope(TARGET)
    assert target is not None, "a round has a target pass"
    window = Span(round_.verification_ns, following.launch_ns)
    context = round_.stages.get(CONTEXT, [])
    writes = [call for call in context if call.kind in KV_WRITES]
    return RoundIntervals(
        context_graphs=len({(call.run, call.part) for call in context if call.graph}),
        context_kv_writes=len({(call.run, call.part, call.call) for call in writes}),
        projection_to_last_write_ms=(max(call.end_ns for call in writes) - context[0].begin_ns) / 1e6
        if writes
        else None,
        draft_ms=None if draft is None else draft.duration_ns / 1e6,
        target_ms=target.duration_ns / 1e6,
        draft_to_target_ms=None if draft is None else (target.begin_ns - draft.begin_ns) / 1e6,
        verification_to_next_ms=window.duration_ns / 1e6,
        round_ms=(following.launch_ns - round_.launch_ns) / 1e6,
        uncovered_ms=uncovered_ns(window, busy) / 1e6,
        host=_host_calls(window, recording),
    )


def busy_spans(kernels: Iterable[KernelCall]) -> list[Span]:
    """The times in which any thread ran one of `kernels`, which are sorted by begin: disjoint, and sorted."""
    spans: list[Span] = []
    for call in kernels:
        if spans and call.begin_ns <= spans[-1].end_ns:
            spans[-1] = Span(spans[-1].begin_ns, max(spans[-1].end_ns, call.end_ns))
        else:
            spans.append(Span(call.begin_ns, call.end_ns))
    return spans


def uncovered_ns(window: Span, busy: Sequence[Span]) -> int:
    """Time of a window outside of `busy_spans`."""
    covered = 0
    for span in busy[bisect_right(busy, window.begin_ns, key=lambda span: span.end_ns) :]:
        if span.begin_ns >= window.end_ns:
            break
        covered += min(span.end_ns, window.end_ns) - max(span.begin_ns, window.begin_ns)
    return window.duration_ns - covered


def _host_calls(window: Span, recording: Recording) -> HostCalls:
    def began(time_ns: int) -> bool:
        return window.begin_ns <= time_ns < window.end_ns

    programs = {round_.run for round_ in recording.rounds}
    first = bisect_left(recording.kernels, window.begin_ns, key=lambda call: call.begin_ns)
    runs = set()
    for call in recording.kernels[first:]:
        # The next draft's launch ends the window, and is the host's own where the host carries rounds.
        if call.begin_ns > window.end_ns:
            break
        if call.run not in programs:
            runs.add(call.run)
    begin = bisect_left(recording.host, window.begin_ns, key=lambda call: call.begin_ns)
    names: Counter[str] = Counter()
    operations: Counter[bool] = Counter()
    has_operations = any(call.is_torch for call in recording.host)
    for host_call in recording.host[begin:]:
        if not began(host_call.begin_ns):
            break
        if host_call.is_torch:
            operations[_is_copy(host_call.name)] += 1
        else:
            names[host_call.name] += 1
    return HostCalls(
        launches=len(runs) + names[LAUNCH],
        waits=names[CONSUME],
        copies=operations[True] if has_operations else None,
        other_operations=operations[False] if has_operations else None,
    )


def _is_copy(name: str) -> bool:
    """Whether a torch operation such as `aten.copy_.default` moves data only."""
    parts = name.split(".")
    return len(parts) > 1 and parts[1] in _COPIES


def _quartiles(values: Sequence[float | None]) -> Quartiles | None:
    present = [value for value in values if value is not None]
    return Quartiles.of(present) if present else None
