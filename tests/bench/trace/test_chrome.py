"""Trace files of recordings made by hand."""

import json
from collections import Counter
from pathlib import Path

import pytest

from sparkgap.bench.trace.chrome import trace_events, write_trace
from sparkgap.engine.tracing import Recording
from sparkgap.errors import OutputError

from .event_format import check_events
from .recordings import carried, pipelined


def names_of(events: list[dict], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == kind}


def test_a_pipelined_recording() -> None:
    events = trace_events(pipelined(4), "pipeline")
    check_events(events)
    processes, threads = names_of(events, "process_name"), names_of(events, "thread_name")
    tracks = Counter(
        (processes[e["pid"], 0].removeprefix("pipeline: "), threads[e["pid"], e["tid"]])
        for e in events
        if e["ph"] == "X"
    )
    graphs = ("begin", "draft", "lay out", "target", "settle", "context", "hand off")
    assert tracks == {
        ("kernels", "thread 0"): 4 * 10,
        ("kernels", "thread 1"): 4 * 4,
        ("host", "engine"): 4 * 3,
        ("rounds", "decode rounds"): 4,
        ("Slots", "Slot 0"): 2,
        ("Slots", "Slot 1"): 2,
        **{("graphs", name): 4 for name in graphs},
    }
    draft = next(e for e in events if e["ph"] == "X" and e["name"] == "draft")
    assert (draft["ts"], draft["dur"], draft["args"]) == (1040.0, 95.0, {"run": 1, "kernel_calls": 1})
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 4
    assert Counter(e["ph"] for e in events if e["ph"] in "stf") == {"s": 4, "t": 4 * 7, "f": 4}


def test_a_recording_of_rounds_that_the_host_carries() -> None:
    events = trace_events(carried(4), "graphs")
    check_events(events)
    # The host's call, draft, target, and the first operation of the context, which is no graph here.
    assert Counter(e["ph"] for e in events if e["ph"] in "stf") == {"s": 4, "t": 8, "f": 4}
    last = [e for e in events if e["ph"] == "f"]
    processes, threads = names_of(events, "process_name"), names_of(events, "thread_name")
    operations = [e for e in events if e["ph"] == "X" and threads[e["pid"], e["tid"]] == "operations"]
    assert {processes[e["pid"], 0] for e in last} == {"graphs: kernels"}
    assert {processes[e["pid"], 0] for e in operations} == {"graphs: graphs"}
    assert Counter(e["name"] for e in operations) == {"LinearInt8": 4, "RotaryWrite": 8}


def test_several_recordings_share_a_file_and_no_track(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, {"graphs": carried(3), "pipeline": pipelined(3), "nothing": Recording()}, {"model": "tiny"})
    document = json.loads(path.read_text())
    assert document["otherData"] == {"model": "tiny"}
    events = document["traceEvents"]
    check_events(events)
    names = Counter(names_of(events, "process_name").values())
    assert set(names.values()) == {1}
    assert {"graphs: kernels", "pipeline: kernels", "pipeline: Slots"} < set(names)
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 6


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write trace .*missing/trace\.json"):
        write_trace(tmp_path / "missing" / "trace.json", {}, {})
