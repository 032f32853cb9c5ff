"""What a trace file must be for Chrome and Perfetto: their format document, as checks."""

from collections import defaultdict
from typing import Any


def check_events(events: list[dict[str, Any]]) -> None:
    """Every event is of a phase we write, with what the format asks of it; slices nest; flows connect slices."""
    tracks = defaultdict(list)
    flows = defaultdict(list)
    named = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        phase = event["ph"]
        if phase == "M":
            named.add((event["name"], event["pid"], event["tid"]))
            value = event["args"]["sort_index" if event["name"].endswith("_sort_index") else "name"]
            assert isinstance(value, int if event["name"].endswith("_sort_index") else str)
            continue
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        if phase == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
        else:
            assert phase in ("s", "t", "f"), phase
            assert phase != "f" or event["bp"] == "e"
            flows[event["cat"], event["id"]].append(event)
    for pid, tid in tracks:
        assert ("process_name", pid, 0) in named
        assert ("thread_name", pid, tid) in named
        _check_nesting(tracks[pid, tid])
    for steps in flows.values():
        times = [step["ts"] for step in steps]
        assert times == sorted(times)
        assert [step["ph"] for step in steps] == ["s", *["t"] * (len(steps) - 2), "f"]
        for step in steps:
            assert any(
                slice_["ts"] <= step["ts"] <= slice_["ts"] + slice_["dur"]
                for slice_ in tracks[step["pid"], step["tid"]]
            ), step


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """A slice ends before the one around it does. Times are whole nanoseconds."""
    open_ends: list[int] = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], event
        open_ends.append(end)
