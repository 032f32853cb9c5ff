"""Recordings of kernel calls."""

from itertools import pairwise

import pytest
import torch

from sparkgap import _native
from sparkgap.device.cpu import CpuGraph
from sparkgap.device.stream import CpuProgram, CpuStream
from sparkgap.device.trace import now_ns, record_kernels
from sparkgap.ops.native_kernels import NativeKernels

WAIT_S = 60.0


def adding(kernels: NativeKernels) -> tuple[CpuGraph, CpuGraph, torch.Tensor]:
    """Two graphs: kept = 1 + total, and total = kept."""
    one, total, kept = torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)
    add, keep = CpuGraph(kernels.executor, name="add"), CpuGraph(kernels.executor, name="keep")
    with add.capture():
        kernels.executor.add_logits(one, total, kept)
    with keep.capture():
        kernels.executor.convert(kept, total)
        kernels.executor.convert(kept, total)
    return add, keep, total


@pytest.mark.parametrize("threads", [1, 2])
def test_graphs_programs_and_operations_are_told_apart(threads: int) -> None:
    kernels = NativeKernels(threads=threads)
    add, keep, total = adding(kernels)
    stream = CpuStream()
    program = CpuProgram([("add", add), ("keep", keep)])
    before = stream.launch(program)
    assert before.wait(WAIT_S)
    began = now_ns()
    with record_kernels() as trace:
        add.replay()
        launch = stream.launch(program)
        assert launch.wait(WAIT_S)
        kernels.executor.convert(total, torch.empty(1, 1))
    ended = now_ns()
    assert (before.run, launch.run) == (0, 2)
    assert trace.num_dropped == 0
    expected = [(1, 0, 0, "add"), (2, 0, 0, "add"), (2, 1, 0, "keep"), (2, 1, 1, "keep"), (3, 0, 0, "")]
    for thread in range(threads):
        calls = [call for call in trace.calls if call.thread == thread]
        assert [(call.run, call.part, call.call, call.graph) for call in calls] == expected
    assert len(trace.calls) == threads * len(expected)
    kinds = add.native.kinds() + add.native.kinds() + keep.native.kinds() + keep.native.kinds()[:1]
    assert [call.kind for call in trace.calls if call.thread == 0] == kinds
    assert [call.begin_ns for call in trace.calls] == sorted(call.begin_ns for call in trace.calls)
    assert all(began <= call.begin_ns <= call.end_ns <= ended for call in trace.calls)
    # A call begins when all threads have ended the one before.
    by_place: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for call in trace.calls:
        by_place.setdefault((call.run, call.part, call.call), []).append((call.begin_ns, call.end_ns))
    places = sorted(by_place)
    for first, second in pairwise(places):
        assert max(end for _, end in by_place[first]) <= min(begin for begin, _ in by_place[second])
    assert total.item() == 2.0


def test_the_latest_calls_are_kept() -> None:
    kernels = NativeKernels(threads=1)
    add, keep, _ = adding(kernels)
    with record_kernels(capacity=4) as trace:
        for _ in range(3):
            add.replay()
            keep.replay()
    assert trace.num_dropped == 9 - 4
    assert [(call.run, call.call) for call in trace.calls] == [(4, 1), (5, 0), (6, 0), (6, 1)]


def test_there_is_one_recording_at_a_time_and_none_by_default() -> None:
    with pytest.raises(RuntimeError, match="no trace is on"):
        _native.stop_trace()
    with record_kernels() as outer:
        with pytest.raises(RuntimeError, match="one process records one at a time"), record_kernels():
            pass
        adding(NativeKernels(threads=1))[0].replay()
    assert len(outer.calls) == 1
    with pytest.raises(ValueError, match="at least one record"), record_kernels(capacity=0):
        pass
    with record_kernels() as empty:
        pass
    assert empty.calls == []
