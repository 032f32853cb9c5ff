"""Programs on a stream: order, failure, and ends at any moment."""

import gc
import math
import os
import queue
import random
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter

import pytest
import torch

from sparkgap import _native
from sparkgap.device.cpu import CpuGraph
from sparkgap.device.stream import Condition, CpuProgram, CpuStream
from sparkgap.device.trace import record_kernels
from sparkgap.ops.native_kernels import NativeKernels

WAIT_S = 60.0


def lookup(kernels: NativeKernels, token_ids: torch.Tensor, table: torch.Tensor) -> tuple[CpuGraph, torch.Tensor]:
    """A graph that looks token ids up: it fails when one lies outside the table."""
    graph = CpuGraph(kernels.executor)
    with graph.capture():
        rows = kernels.embed(token_ids, table)
    return graph, rows


def counting(kernels: NativeKernels) -> tuple[CpuProgram, torch.Tensor]:
    """A program that adds 1 to a number: total = total + 1, through two graphs."""
    one, total, kept = torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)
    add, keep = CpuGraph(kernels.executor), CpuGraph(kernels.executor)
    with add.capture():
        kernels.executor.add_logits(one, total, kept)
    with keep.capture():
        kernels.executor.convert(kept, total)
    return CpuProgram([("add", add), ("keep", keep)]), total


def test_launches_run_in_order() -> None:
    kernels = NativeKernels(threads=2)
    program, total = counting(kernels)
    stream = CpuStream()
    launches = [stream.launch(program) for _ in range(200)]
    assert launches[-1].wait(WAIT_S)
    assert all(launch.done and not launch.error for launch in launches)
    assert total.item() == 200
    program.replay()
    assert total.item() == 201


def test_a_failure_fails_what_waits_until_the_stream_is_reset() -> None:
    kernels = NativeKernels(threads=2)
    token_ids, table = torch.tensor([3]), torch.arange(8.0).view(4, 2)
    graph, rows = lookup(kernels, token_ids, table)
    broken = CpuProgram([("look up", graph)])
    program, total = counting(kernels)
    stream = CpuStream()
    assert stream.launch(broken).wait(WAIT_S)
    assert rows.tolist() == [[6.0, 7.0]]
    token_ids[0] = 4
    launches = [stream.launch(broken), *(stream.launch(program) for _ in range(5))]
    assert launches[-1].wait(WAIT_S)
    assert launches[0].error == "a token id lies outside the embedding table"
    assert {launch.error for launch in launches[1:]} == {"an earlier round failed: " + launches[0].error}
    assert stream.launch(program).wait(WAIT_S)
    assert total.item() == 0
    token_ids[0] = 2
    assert stream.reset(WAIT_S)
    launch = stream.launch(program)
    assert launch.wait(WAIT_S)
    assert not launch.error
    assert total.item() == 1


@pytest.mark.parametrize(
    ("timeout_s", "enough"), [(math.inf, True), (1e300, True), (math.nan, False), (-math.inf, False)]
)
def test_waits_of_any_length(timeout_s: float, enough: bool) -> None:
    program, total = counting(NativeKernels(threads=2))
    stream = CpuStream()
    launches = [stream.launch(program) for _ in range(500)]
    assert launches[-1].wait(timeout_s) >= enough
    assert stream.reset(timeout_s) >= enough
    if enough:
        assert total.item() == 500


def test_a_stopped_stream_takes_nothing_and_leaves_nobody_waiting() -> None:
    kernels = NativeKernels(threads=1)
    program, total = counting(kernels)
    stream = CpuStream()
    launches = [stream.launch(program) for _ in range(50)]
    stream.stop()
    assert all(launch.wait(WAIT_S) for launch in launches)
    assert total.item() == sum(not launch.error for launch in launches)
    assert {launch.error for launch in launches} <= {"", "the stream was stopped"}
    with pytest.raises(RuntimeError, match="stopped"):
        stream.launch(program)
    assert stream.reset(WAIT_S)
    stream.stop()
    with pytest.raises(ValueError, match="at least one graph"):
        CpuProgram([])
    with pytest.raises(ValueError, match="holds no calls"):
        CpuProgram([("empty", CpuGraph(kernels.executor))])


def test_what_a_program_uses_lives_as_long_as_it_and_no_longer() -> None:
    kernels = NativeKernels(threads=1)
    table = torch.arange(8.0).view(4, 2)
    alive = weakref.ref(table)
    graph, _ = lookup(kernels, torch.tensor([1]), table)
    program, stream = CpuProgram([("look up", graph)]), CpuStream()
    del table, graph
    gc.collect()
    assert alive() is not None
    launch = stream.launch(program)
    del program
    assert launch.wait(WAIT_S)
    assert not launch.error
    del launch
    assert stream.reset(WAIT_S)
    gc.collect()
    assert alive() is None


def test_later_launches_let_go_of_what_has_ended() -> None:
    kernels = NativeKernels(threads=1)
    table = torch.arange(8.0).view(4, 2)
    alive = weakref.ref(table)
    graph, _ = lookup(kernels, torch.tensor([1]), table)
    program, stream = CpuProgram([("look up", graph)]), CpuStream()
    assert stream.launch(program).wait(WAIT_S)
    del table, graph, program
    other, _ = counting(kernels)
    for _ in range(2):
        assert stream.launch(other).wait(WAIT_S)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("threads", [1, 2])
def test_whoever_waits_is_woken(threads: int) -> None:
    """Several threads wait for launches and resets of one stream, while programs follow each other or it runs dry."""
    program, total = counting(NativeKernels(threads=threads))
    stream, launches = CpuStream(), queue.SimpleQueue[_native.Launch | None]()
    missed: list[str] = []

    def wait() -> None:
        while (launch := launches.get()) is not None:
            if not launch.wait(WAIT_S) or launch.error:
                missed.append(launch.error or "not woken")

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    for number in range(1000):
        launch = stream.launch(program)
        launches.put(launch)
        if number % 7 == 0:
            launch.wait(WAIT_S)
        if number % 50 == 0:
            assert stream.reset(WAIT_S)
            assert launch.done
    for _ in waiting:
        launches.put(None)
    for thread in waiting:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert missed == []
    assert total.item() == 1000


@pytest.mark.parametrize("extra_threads", [0, 1])
def test_a_core_is_left_to_the_host_while_it_works(extra_threads: int) -> None:
    threads = max(len(os.sched_getaffinity(0)), 2) + extra_threads
    kernels = NativeKernels(threads=threads)
    g = torch.Generator().manual_seed(threads)
    weights = [kernels.prepare_linear(torch.randn(192, 192, generator=g) / 14) for _ in range(12)]
    first, ones = torch.randn(4, 192, generator=g), torch.ones(192)
    total, added = torch.zeros(4, 192), torch.zeros(4, 192)

    def compute() -> torch.Tensor:
        x = first
        for weight in weights:
            x = kernels.linear(kernels.rms_norm(x, ones, 1e-5), weight)
        return x

    layers, keep = CpuGraph(kernels.executor), CpuGraph(kernels.executor)
    with layers.capture():
        kernels.executor.add_logits(compute(), total, added)
    with keep.capture():
        kernels.executor.convert(added, total)
    program = CpuProgram([("layers", layers), ("keep", keep)])
    program.replay()
    once, expected = total.clone(), torch.zeros(4, 192)
    total.zero_()
    stream, draw = CpuStream(), random.Random(0)
    with record_kernels() as trace:
        launches = [stream.launch(program) for _ in range(2)]
        for _ in range(150):
            assert launches.pop(0).wait(WAIT_S)
            expected += once
            end_s = time.perf_counter() + draw.choice([0.0, 1e-5, 1e-4, 4e-4])
            while time.perf_counter() < end_s:
                pass
            launches.append(stream.launch(program))
        assert all(launch.wait(WAIT_S) and not launch.error for launch in launches)
    expected += once
    expected += once
    assert torch.equal(total, expected)
    calls = Counter((call.run, call.part, call.call) for call in trace.calls)
    by_threads = Counter(calls.values())
    assert set(by_threads) == {threads, threads - 1}, by_threads
    assert all(count == threads for (_, part, _), count in calls.items() if part == 1)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parts_that_are_not_chosen_do_not_run(threads: int) -> None:
    """The choice is made by the part before, in the same launch; parts of several calls, with barriers between."""
    kernels = NativeKernels(threads=threads)
    selector, blocks = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    confidences, lengths, place = torch.ones(1, 3), torch.arange(4), torch.zeros(1, dtype=torch.int64)
    growth = torch.zeros(4, dtype=torch.float64)
    costs, values = torch.ones(4, dtype=torch.float64), torch.ones(9, 64)
    totals = [torch.zeros(9, 64) for _ in range(5)]
    added = torch.zeros(9, 64)

    def adding(total: torch.Tensor) -> CpuGraph:
        graph = CpuGraph(kernels.executor)
        with graph.capture():
            for _ in range(3):
                kernels.executor.add_logits(values, total, added)
                kernels.executor.convert(added, total)
        return graph

    choose, begin = CpuGraph(kernels.executor), CpuGraph(kernels.executor)
    with begin.capture():
        kernels.executor.convert(values, added)
    with choose.capture():
        kernels.choose_length(confidences, None, blocks, place, lengths, costs, growth, growth[:1], None, selector)
    parts = [("begin", begin), ("choose", choose), *((f"add {n}", adding(total)) for n, total in enumerate(totals))]
    # The two parts of choice 1 are apart, and choice 3 has no part.
    program = CpuProgram(parts, conditions=[None, None, *(Condition(selector, n) for n in (0, 1, 2, 1)), None])
    stream, expected = CpuStream(), [0, 0, 0, 0, 0]
    drawn = random.Random(1)
    for turn in range(200):
        choice = drawn.randrange(4)
        costs.fill_(1e9)
        costs[choice] = 1.0
        if turn % 2:
            program.replay()
        else:
            launch = stream.launch(program)
            assert launch.wait(WAIT_S)
            assert not launch.error
        assert selector.item() == choice
        runs = [wants is None or wants == choice for wants in (0, 1, 2, 1, None)]
        expected = [old + 3 * ran for old, ran in zip(expected, runs, strict=True)]
        for total, number in zip(totals, expected, strict=True):
            assert (total == number).all()


def test_choices_that_make_no_program_are_refused() -> None:
    kernels = NativeKernels(threads=1)
    add, _ = lookup(kernels, torch.tensor([1]), torch.arange(8.0).view(4, 2))
    parts, selector = [("a", add), ("b", add), ("c", add)], torch.zeros(1, dtype=torch.int64)
    condition = Condition(selector, 0)
    for conditions in ([None, condition], [condition, None, None], [None, None, condition]):
        with pytest.raises(ValueError, match="the first and the last one run always"):
            CpuProgram(parts, conditions=conditions)
    for wrong in (torch.zeros(1), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="selector"):
            CpuProgram(parts, conditions=[None, Condition(wrong, 0), None])
    natives = [graph.native for _, graph in parts]
    with pytest.raises(ValueError, match="go together"):
        _native.Program(natives, [], [None, selector, None], [0])


def test_a_program_keeps_its_selector() -> None:
    kernels = NativeKernels(threads=1)
    add, _ = lookup(kernels, torch.tensor([1]), torch.arange(8.0).view(4, 2))
    selector = torch.zeros(1, dtype=torch.int64)
    before = sys.getrefcount(selector)
    program = CpuProgram([("a", add), ("b", add), ("c", add)], conditions=[None, Condition(selector, 0), None])
    assert sys.getrefcount(selector) == before + 1
    del program
    assert sys.getrefcount(selector) == before


def test_programs_name_their_passes() -> None:
    kernels = NativeKernels(threads=1)
    add, _ = lookup(kernels, torch.tensor([1]), torch.arange(8.0).view(4, 2))
    program, stream = CpuProgram([("begin", add), ("draft", add)], passes=("draft",)), CpuStream()
    launches = [stream.launch(program) for _ in range(20)]
    assert all(launch.wait(WAIT_S) for launch in launches)
    with pytest.raises(ValueError, match="no graph target"):
        CpuProgram([("begin", add)], passes=("begin", "target"))
    with pytest.raises(ValueError, match="no such graph"):
        _native.Program([add.native], [1])


@pytest.mark.parametrize(
    "ending", ["", "sys.exit(3)", "_native.stop_streams()", "del stream", "os.kill(os.getpid(), 15)"]
)
def test_the_interpreter_ends_in_the_middle(ending: str) -> None:
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
import torch
from sparkgap import _native
from sparkgap.device.stream import CpuStream
from sparkgap.ops.native_kernels import NativeKernels
from tests.device.test_stream import counting
kernels = NativeKernels(threads=2)
program, total = counting(kernels)
stream = CpuStream()
launches = [stream.launch(program) for _ in range(20000)]
{ending}
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True, check=False)
    assert result.returncode == {"sys.exit(3)": 3, "os.kill(os.getpid(), 15)": -15}.get(ending, 0), result.stderr
    assert result.stderr == ""


def test_a_forked_child_is_told_and_does_not_hang() -> None:
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from sparkgap.device.stream import CpuStream
from sparkgap.ops.native_kernels import NativeKernels
from tests.device.test_stream import counting
program, total = counting(NativeKernels(threads=2))
stream = CpuStream()
ended = stream.launch(program)
assert ended.wait(60)
for _ in range(2):
    launches = [stream.launch(program) for _ in range(200)]
    child = os.fork()
    if not child:
        assert ended.wait(60)
        for use in (lambda: stream.launch(program), lambda: launches[-1].wait(60), lambda: stream.reset(60)):
            try:
                use()
            except RuntimeError as error:
                assert "forked" in str(error), error
            else:
                assert launches[-1].done  # it had ended before the fork
        stream.stop()
        own = CpuStream()
        again = own.launch(program)
        assert again.wait(60) and not again.error, again.error
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert launches[-1].wait(60)
assert stream.launch(program).wait(60)
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
