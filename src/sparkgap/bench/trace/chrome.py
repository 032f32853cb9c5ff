"""Trace files in Chrome's trace event format, which Perfetto and chrome://tracing open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Every slice is one complete
event (`X`), a round's way through the tracks is a flow (`s`, `t`, `f`), names of tracks are metadata (`M`). Times are
microseconds from the first event of the recording.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from sparkgap.bench.trace.rounds import STAGES, TracedRound, find_rounds, span_of
from sparkgap.device.trace import KernelCall
from sparkgap.engine.tracing import HostCall, Recording
from sparkgap.errors import OutputError

Event = dict[str, Any]
"""One trace event."""

OPERATIONS = "operations"
"""Track of what no graph holds."""

_GRAPH_TRACKS = (*STAGES, OPERATIONS)


class _Process(NamedTuple):
    """A group of tracks."""

    number: int
    name: str


ROUNDS, GRAPHS, KERNELS, SLOTS, HOST = (
    _Process(number, name) for number, name in enumerate(("rounds", "graphs", "kernels", "Slots", "host"), start=1)
)
_PROCESSES = (ROUNDS, SLOTS, HOST, GRAPHS, KERNELS)


def write_trace(path: Path, recordings: Mapping[str, Recording], facts: Mapping[str, Any]) -> None:
    """Write recordings into one file, each from time 0, their tracks one below the other.

    Args:
        path: the file; one that is there is replaced.
        recordings: by the name of the execution mode.
        facts: what else the file is to tell, in JSON's types.

    Raises:
        OutputError: it cannot be written.
    """
    events = [
        event
        for index, (name, recording) in enumerate(recordings.items())
        for event in trace_events(recording, name, index)
    ]
    document = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(facts)}
    try:
        path.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write trace {path}: {error.strerror}; check the path") from error


def trace_events(recording: Recording, name: str, index: int = 0) -> list[Event]:
    """The events of one recording.

    Args:
        recording: complete.
        name: in front of the names of its tracks.
        index: of the recording in its file, which tells its tracks and flows apart from others'.
    """
    begins = [call.begin_ns for call in recording.kernels[:1]] + [call.begin_ns for call in recording.host[:1]]
    writer = _Writer(index, min(begins, default=0))
    rounds = find_rounds(recording)
    return [
        *writer.track_names(recording, name),
        *writer.kernels(recording.kernels),
        *writer.graphs(recording.kernels),
        *writer.host(recording.host),
        *writer.rounds(rounds),
        *writer.slots(recording, rounds),
        *writer.flows(rounds),
    ]


class _Writer:
    """Makes events whose times are from one origin and whose tracks are one recording's."""

    def __init__(self, index: int, origin_ns: int) -> None:
        self._index = index
        self._origin_ns = origin_ns

    def track_names(self, recording: Recording, name: str) -> Iterator[Event]:
        """What viewers call the recording's processes and tracks, and their order."""
        threads = sorted({call.thread for call in recording.kernels})
        tracks = {
            ROUNDS: ["decode rounds"],
            SLOTS: [f"Slot {slot}" for slot in sorted({round_.slot for round_ in recording.rounds})],
            HOST: ["engine"],
            GRAPHS: list(_GRAPH_TRACKS),
            KERNELS: [f"thread {thread}" for thread in threads],
        }
        for order, process in enumerate(_PROCESSES):
            if not tracks[process]:
                continue
            yield self._metadata(process, 0, "process_name", {"name": f"{name}: {process.name}"})
            place = self._index * len(_PROCESSES) + order
            yield self._metadata(process, 0, "process_sort_index", {"sort_index": place})
            for thread, track in enumerate(tracks[process]):
                yield self._metadata(process, thread, "thread_name", {"name": track})
                yield self._metadata(process, thread, "thread_sort_index", {"sort_index": thread})

    def kernels(self, calls: Sequence[KernelCall]) -> Iterator[Event]:
        """A slice for each thread's part of each kernel call, on the thread's track."""
        for call in calls:
            facts = {"graph": call.graph or OPERATIONS, "run": call.run, "call": call.call}
            yield self._slice(KERNELS, call.thread, call.kind, call.begin_ns, call.end_ns, facts)

    def graphs(self, calls: Sequence[KernelCall]) -> Iterator[Event]:
        """A slice for each replay of a graph and each single operation, over all of its calls and threads."""
        for (run, _), part in groupby(sorted(calls, key=_run_and_part), key=_run_and_part):
            listed = list(part)
            span, first = span_of(listed), listed[0]
            track = _GRAPH_TRACKS.index(first.graph if first.graph in STAGES else OPERATIONS)
            name = first.graph or first.kind
            facts = {"run": run, "kernel_calls": len({call.call for call in listed})}
            yield self._slice(GRAPHS, track, name, span.begin_ns, span.end_ns, facts)

    def host(self, calls: Sequence[HostCall]) -> Iterator[Event]:
        """A slice for each call on the host."""
        for call in calls:
            yield self._slice(HOST, 0, call.name, call.begin_ns, call.end_ns)

    def rounds(self, rounds: Sequence[TracedRound]) -> Iterator[Event]:
        """A slice for each round, from its first kernel call to the last one's end."""
        for round_ in rounds:
            end_ns = max(span_of(calls).end_ns for calls in round_.stages.values())
            facts = {} if round_.slot is None else {"slot": round_.slot}
            yield self._slice(ROUNDS, 0, _name(round_), _begin_ns(round_), end_ns, facts)

    def slots(self, recording: Recording, rounds: Sequence[TracedRound]) -> Iterator[Event]:
        """A Slot is taken from the submission of a round until its results are read."""
        indices = sorted({pipelined.slot for pipelined in recording.rounds})
        for round_ in rounds:
            if round_.pipelined is None:
                continue
            taken, end_ns = round_.pipelined, max(span_of(calls).end_ns for calls in round_.stages.values())
            if taken.consume is not None:
                end_ns = taken.consume.end_ns
            yield self._slice(SLOTS, indices.index(taken.slot), _name(round_), taken.submit.begin_ns, end_ns)

    def flows(self, rounds: Sequence[TracedRound]) -> Iterator[Event]:
        """A round's way: where the host gives it away, its passes, and where the host takes its results."""
        for round_ in rounds:
            steps = [_place(stage, round_.stages[stage][0]) for stage in STAGES if stage in round_.stages]
            if round_.pipelined is not None:
                steps.insert(0, (HOST, 0, round_.pipelined.submit.begin_ns))
                if round_.pipelined.consume is not None:
                    steps.append((HOST, 0, _taken_ns(round_, round_.pipelined.consume)))
            elif round_.host is not None:
                steps.insert(0, (HOST, 0, round_.host.begin_ns))
            steps.sort(key=lambda step: step[2])
            for place, (process, track, time_ns) in enumerate(steps):
                phase = "s" if place == 0 else "f" if place == len(steps) - 1 else "t"
                yield self._flow(phase, process, track, time_ns, round_)

    def _slice(
        self,
        process: _Process,
        track: int,
        name: str,
        begin_ns: int,
        end_ns: int,
        facts: Mapping[str, Any] | None = None,
    ) -> Event:
        event = self._event("X", process, track, name, begin_ns) | {"dur": (end_ns - begin_ns) / 1e3}
        return event | {"args": dict(facts)} if facts else event

    def _flow(self, phase: str, process: _Process, track: int, time_ns: int, round_: TracedRound) -> Event:
        number = f"{self._index}.{round_.number}"
        event = self._event(phase, process, track, "round", time_ns) | {"cat": "round", "id": number}
        return event | {"bp": "e"} if phase == "f" else event

    def _event(self, phase: str, process: _Process, track: int, name: str, time_ns: int) -> Event:
        place = {"pid": self._process_id(process), "tid": track}
        return {"ph": phase, "name": name, "cat": process.name, "ts": (time_ns - self._origin_ns) / 1e3, **place}

    def _metadata(self, process: _Process, track: int, name: str, facts: Mapping[str, Any]) -> Event:
        return {"ph": "M", "name": name, "pid": self._process_id(process), "tid": track, "args": dict(facts)}

    def _process_id(self, process: _Process) -> int:
        return self._index * (len(_PROCESSES) + 1) + process.number


def _run_and_part(call: KernelCall) -> tuple[int, int]:
    return call.run, call.part


def _name(round_: TracedRound) -> str:
    return f"round {round_.number}"


def _begin_ns(round_: TracedRound) -> int:
    return min(calls[0].begin_ns for calls in round_.stages.values())


def _taken_ns(round_: TracedRound, consume: HostCall) -> int:
    """When the host has a round's results: at their end, or when it asks for them later."""
    end_ns = max(span_of(calls).end_ns for calls in round_.stages.values())
    return max(consume.begin_ns, min(end_ns, consume.end_ns - 1))


def _place(stage: str, first: KernelCall) -> tuple[_Process, int, int]:
    """Where a stage's first call is seen: on the stage's own track, or without a graph on its thread's."""
    if first.graph == stage:
        return GRAPHS, _GRAPH_TRACKS.index(stage), first.begin_ns
    return KERNELS, first.thread, first.begin_ns
