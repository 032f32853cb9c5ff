"""Intervals of recordings made by hand are what a hand computes."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.bench.trace.intervals import INTERVALS, busy_spans, interval_reports, steady_rounds, uncovered_ns
from sparkgap.bench.trace.rounds import Span, find_rounds
from sparkgap.device.trace import KernelCall
from sparkgap.engine.tracing import Recording
from sparkgap.errors import ConfigError

from .recordings import carried, kernel, pipelined


def test_pipelined_rounds() -> None:
    recording = pipelined(6)
    rounds = steady_rounds(recording).of[True]
    assert len(rounds) == 3
    for number, found in enumerate(rounds):
        assert (found.context_graphs, found.context_kv_writes) == (1, 2)
        assert found.projection_to_last_write_ms == pytest.approx((950 - 858) / 1000)
        assert found.draft_ms == pytest.approx((100 - 5) / 1000)
        assert found.target_ms == pytest.approx((800 - 110) / 1000)
        assert found.draft_to_target_ms == pytest.approx((110 - 5) / 1000)
        assert found.verification_to_next_ms == pytest.approx((1005 - 805) / 1000)
        assert found.round_ms == pytest.approx(1.0)
        # 850-851, 855-858, 900-905, 930-931, 950-952, 953-1000 and 1002-1005
        assert found.uncovered_ms == pytest.approx((1 + 3 + 5 + 1 + 2 + 47 + 3) / 1000)
        assert found.verification_to_next_share == pytest.approx(0.2)
        assert found.uncovered_share == pytest.approx(0.062)
        # The round after the next, if there is one, is launched at 973. The next wait begins at 980.
        launches = 0 if number == 2 else 1
        assert asdict(found.host) == {"launches": launches, "waits": 1, "copies": None, "other_operations": None}
        assert found.host.total == launches + 1


def test_rounds_that_the_host_carries() -> None:
    recording = carried(6)
    for found in steady_rounds(recording).of[True]:
        assert (found.context_graphs, found.context_kv_writes) == (0, 2)
        assert found.projection_to_last_write_ms == pytest.approx((940 - 860) / 1000)
        assert found.draft_ms == pytest.approx(0.09)
        assert found.target_ms == pytest.approx(0.66)
        assert found.draft_to_target_ms == pytest.approx(0.12)
        assert found.verification_to_next_ms == pytest.approx((1020 - 810) / 1000)
        assert found.uncovered_ms == pytest.approx((50 + 10 + 5 + 80) / 1000)
        assert found.round_ms == pytest.approx(1.0)
        # Three operations of the context, the next draft; the draft's copy, argmax and index.
        assert asdict(found.host) == {"launches": 4, "waits": 0, "copies": 1, "other_operations": 2}
        assert found.host.total == 7


def test_a_report_has_times_of_one_recording_and_counts_of_the_other() -> None:
    report = interval_reports({"mode": (pipelined(7), carried(7))})["mode"]
    assert report.rounds == 4
    assert set(report.intervals) == set(INTERVALS)
    round_ms = report.intervals["round_ms"]
    assert round_ms is not None
    assert (round_ms.lower, round_ms.median, round_ms.upper) == (1.0, 1.0, 1.0)
    assert report.host_calls == {"launches": 4, "waits": 0, "copies": 1, "other_operations": 2, "total": 7}


def test_plain_rounds_have_no_intervals_of_drafts() -> None:
    recording = pipelined(6)
    recording.kernels = [call for call in recording.kernels if call.graph not in ("draft", "context")]
    report = interval_reports({"mode": (recording, recording)})["mode"]
    assert [name for name, value in report.intervals.items() if value is None] == [
        "projection_to_last_write_ms",
        "draft_ms",
        "draft_to_target_ms",
    ]
    next_launch = report.intervals["verification_to_next_ms"]
    assert next_launch is not None
    assert next_launch.median == pytest.approx((1110 - 805) / 1000)


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"had 3 decode rounds, and none after the first 2 is followed.*--max-tokens"):
        interval_reports({"mode": (pipelined(3), pipelined(6))})


def test_rounds_of_another_kind_are_left_out() -> None:
    recording = pipelined(8)
    # The fifth round drafts nothing.
    recording.kernels = [call for call in recording.kernels if call.run != 5 or call.graph not in ("draft", "context")]
    assert len(find_rounds(recording)) == 8
    assert len(steady_rounds(recording).of[True]) == 5 - 2


def without_drafts(rounds: int, runs: set[int]) -> Recording:
    """As if the draft tokens of some rounds were looked up."""
    recording = pipelined(rounds)
    recording.kernels = [call for call in recording.kernels if call.run not in runs or call.graph != "draft"]
    return recording


def test_requests_are_compared_by_rounds_of_one_kind() -> None:
    mostly, partly, all_drafted = without_drafts(14, {*range(6, 15)}), without_drafts(14, {3, 4, 5}), pipelined(14)
    alone = interval_reports({"mostly": (mostly, mostly)})["mostly"]
    assert (alone.drafted, alone.rounds, alone.other_rounds) == (False, 8, 3)
    assert alone.intervals["draft_ms"] is None
    together = interval_reports({"mostly": (mostly, mostly), "partly": (partly, partly)})
    assert [(r.drafted, r.rounds, r.other_rounds) for r in together.values()] == [(True, 2, 9), (True, 8, 3)]
    # Nothing in common: each has its own.
    never = without_drafts(14, {*range(1, 15)})
    apart = interval_reports({"never": (never, never), "always": (all_drafted, all_drafted)})
    assert [(r.drafted, r.rounds, r.other_rounds) for r in apart.values()] == [(False, 11, 0), (True, 11, 0)]


def test_rounds_whose_calls_were_given_up_are_left_out() -> None:
    recording = pipelined(6)
    recording.kernels = recording.kernels[5:]
    recording.num_dropped = 5
    assert [round_.pipelined.run for round_ in find_rounds(recording) if round_.pipelined] == [2, 3, 4, 5, 6]


def calls_on_threads(lengths: list[tuple[int, int, int]]) -> list[KernelCall]:
    ends = [0, 0, 0]
    calls = []
    for thread, pause, length in lengths:
        begin = ends[thread] + pause
        ends[thread] = begin + length
        calls.append(kernel("", "Any", begin, ends[thread], run=1, thread=thread))
    return sorted(calls, key=lambda call: call.begin_ns)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)), max_size=30),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_uncovered_time_is_that_of_every_microsecond(
    lengths: list[tuple[int, int, int]], begin: int, length: int
) -> None:
    calls = calls_on_threads(lengths)
    idle = [not any(call.begin_ns <= at * 1000 < call.end_ns for call in calls) for at in range(begin, begin + length)]
    window = Span(begin * 1000, (begin + length) * 1000)
    assert uncovered_ns(window, busy_spans(calls)) == 1000 * sum(idle)
