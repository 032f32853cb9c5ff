import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from sparkgap import _native
from sparkgap.ops.native_kernels import NativeKernels

Make = Callable[..., NativeKernels]


def work(kernels: NativeKernels, seed: int, rounds: int = 50) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(4, 64, generator=g), torch.randn(64, 64, generator=g) / 8
    weight = kernels.prepare_linear(w)
    for _ in range(rounds):
        x = kernels.rms_norm(kernels.linear(x, weight), torch.ones(64), 1e-5)
    return x


def test_engines_in_several_threads_do_not_disturb_each_other(make: Make, variant: str) -> None:
    expected = [work(make(variant, 1), seed) for seed in range(4)]
    results: dict[int, torch.Tensor] = {}

    def run(seed: int) -> None:
        results[seed] = work(make(variant, 1 + seed % 3), seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(results[seed], expected[seed]) for seed in range(4))


def test_one_engine_may_be_used_from_several_threads(make: Make, variant: str) -> None:
    kernels = make(variant, 2, quantization="w8a8")
    weight = kernels.prepare_linear(torch.randn(48, 64))
    inputs = [torch.randn(1 + i, 64) for i in range(4)]
    expected = [kernels.linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def run(i: int) -> None:
        for _ in range(50):
            if not torch.equal(kernels.linear(inputs[i], weight), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_pool_starts_again_after_shutdown(make: Make, variant: str) -> None:
    kernels = make(variant, 3)
    expected = work(kernels, 0)
    _native.shutdown_pool()
    assert torch.equal(work(kernels, 0), expected)


def test_child_of_a_fork_has_its_own_threads(make: Make, variant: str) -> None:
    kernels = make(variant, 2)
    expected = work(kernels, 0)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(work(kernels, 0), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(work(kernels, 0), expected)


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "import os; os.kill(os.getpid(), 15)"])
def test_process_ends_with_threads_running(ending: str) -> None:
    code = f"""
import torch
from sparkgap.ops.native_kernels import NativeKernels
kernels = NativeKernels(threads=3)
kernels.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == (-15 if "kill" in ending else 0), done.stderr
    assert done.stderr == ""


def test_a_graph_without_calls_runs_nothing() -> None:
    """Threads must not be woken for it: nothing would wait until they have read what to do."""
    graph = _native.Graph(2, _native.Arena())
    for _ in range(1000):
        graph.replay()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is counted otherwise")
@pytest.mark.skipif("SPARKGAP_NATIVE_MODULE" in os.environ, reason="sanitizers end a process that has no memory left")
def test_threads_that_cannot_start_are_not_waited_for() -> None:
    code = """
import resource
from pathlib import Path
import torch
from sparkgap.ops.native_kernels import NativeKernels
one, many = NativeKernels(threads=1), NativeKernels(threads=40)
x, weight = torch.ones(2, 8), torch.ones(8)
expected = one.rms_norm(x, weight, 1e-5)
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), hard))
try:
    many.rms_norm(x, weight, 1e-5)
    raise SystemExit("there was memory for the stacks of 40 threads")
except RuntimeError:
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
assert torch.equal(many.rms_norm(x, weight, 1e-5), expected)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_other_python_threads_run_meanwhile(make: Make, variant: str) -> None:
    """The GIL is released: a thread that counts goes on while long products run."""
    kernels = make(variant, 1)
    weight = kernels.prepare_linear(torch.randn(1024, 1024))
    x, out = torch.randn(400, 1024), torch.empty(400, 1024)
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0.0001)

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    # Nobody is made to give up the GIL: the counter runs only where it is released.
    sys.setswitchinterval(30.0)
    try:
        thread.start()
        during = 0
        for _ in range(100):
            before = counted[0]
            kernels.executor.linear(x, weight.packed, out)
            during += counted[0] - before
            if during:
                break
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert during > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity cannot be set")
def test_one_core_by_affinity(make: Make, variant: str) -> None:
    """As inside `taskset`: as many threads as cores by default, and more of them when asked, with the same bits."""
    before = os.sched_getaffinity(0)
    expected = work(make(variant, 1), 0)
    _native.shutdown_pool()
    try:
        os.sched_setaffinity(0, {min(before)})
        assert make(variant, None).executor.threads == 1
        assert torch.equal(work(make(variant, 3), 0, 10), work(make(variant, 1), 0, 10))
        assert torch.equal(work(make(variant, None), 0), expected)
    finally:
        os.sched_setaffinity(0, before)
        _native.shutdown_pool()


def test_variant_can_be_forced(make: Make, variant: str) -> None:
    assert make(variant).executor.variant == variant


def test_threads_must_be_positive() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1"):
        _native.Executor(0)
    assert NativeKernels().executor.threads == _native.usable_cores()
