"""When the CPU device ran which kernel call."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from sparkgap import _native

CAPACITY = 1 << 18
"""Kernel calls that a trace keeps of each thread: some hundred rounds of a small model. They take 14 MiB a thread."""

now_ns = _native.now_ns
"""Nanoseconds of the clock that traces are of."""


class KernelCall(NamedTuple):
    """One thread's part of one kernel call.

    Attributes:
        kind: of the call, such as `LinearInt8`.
        graph: name of the graph that holds it; empty for an operation that ran at once.
        run: counts from 1 what the device was given: a graph, a program of graphs or an operation.
        part: the graph's place in its program.
        call: the call's place in its graph.
        thread: 0 is whoever gave the run.
        begin_ns, end_ns: in the time of `now_ns`; without what the thread then waits for the others.
    """

    kind: str
    graph: str
    run: int
    part: int
    call: int
    thread: int
    begin_ns: int
    end_ns: int


@dataclass
class KernelTrace:
    """Kernel calls of a span of time, by their begin. Empty until the recording has ended.

    Attributes:
        calls: the latest of them, at most `CAPACITY` of each thread.
        num_dropped: earlier ones that were given up.
    """

    calls: list[KernelCall] = field(default_factory=list)
    num_dropped: int = 0


@contextmanager
def record_kernels(capacity: int = CAPACITY) -> Iterator[KernelTrace]:
    """Record every kernel call of the process that runs inside the block.

    Raises:
        RuntimeError: another recording is under way; there is one for all engines of the process.
    """
    trace = KernelTrace()
    _native.start_trace(capacity)
    try:
        yield trace
    finally:
        rows, trace.num_dropped = _native.stop_trace()
        trace.calls += map(KernelCall._make, rows)
