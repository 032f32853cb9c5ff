"""What graphs are bound to, and what happens when a pass is asked for over something else."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparkgap.device.cpu import CaptureError
from sparkgap.errors import MissingBindingError, SparkgapError
from sparkgap.graphs.binding import Binding
from sparkgap.graphs.counters import GraphCounters
from sparkgap.graphs.family import BUCKETS, GraphFamily, buckets_up_to
from sparkgap.ops.native_kernels import NativeKernels


def family(kernels: NativeKernels) -> GraphFamily[Tensor]:
    return GraphFamily("draft", kernels.executor, GraphCounters())


def captured(rows: int = 3) -> tuple[NativeKernels, GraphFamily[Tensor], Tensor]:
    kernels = NativeKernels(threads=1)
    graphs, x = family(kernels), torch.randn(rows, 8)
    graphs.capture({"x": x}, lambda: kernels.silu_mul(x))
    graphs.close()
    return kernels, graphs, x


def test_replays_what_was_captured() -> None:
    kernels, graphs, x = captured()
    for _ in range(3):
        x.normal_()
        assert torch.equal(graphs.replay({"x": x}), kernels.silu_mul(x))
    assert graphs.counters.report() == {
        "captures_at_startup": 1,
        "captures_since_startup": 0,
        "replays": {"target": 0, "draft": 3, "context": 0},
        "eager": {},
    }
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.clone(),  # another address
        lambda x: x[:2],  # another shape
        lambda x: x[1:],  # another address and shape
        lambda x: x.view(4, 6),  # another shape of as many elements
        lambda x: x.as_strided((3, 8), (4, 1)),  # another stride
        lambda x: x.view(torch.int32),  # another dtype
    ],
)
def test_other_tensors_are_missing(change: Callable[[Tensor], Tensor]) -> None:
    _, graphs, x = captured()
    other = change(x)
    with pytest.raises(MissingBindingError) as raised:
        graphs.replay({"x": other})
    text = str(raised.value)
    assert "\n" not in text
    for part in (
        "no draft graph",
        f"at {other.data_ptr():#x} on cpu",
        f"{list(other.shape)} of stride {list(other.stride())}",
        f"x: {str(other.dtype).removeprefix('torch.')} ",
    ):
        assert part in text
    assert isinstance(raised.value, SparkgapError)
    assert sum(graphs.counters.replays.values()) == 0


def test_another_name_is_missing() -> None:
    _, graphs, x = captured()
    with pytest.raises(MissingBindingError, match="y: float32"):
        graphs.replay({"y": x})


def test_a_freed_input_is_missing_and_its_memory_is_not_reused() -> None:
    """The graph borrows its input for good, so no later tensor can lie where it lay."""
    kernels, graphs, x = captured()
    address = x.data_ptr()
    del x
    gc.collect()
    later = [torch.full((3, 8), float(i)) for i in range(200)]
    assert address not in {t.data_ptr() for t in later}
    for tensor in later:
        with pytest.raises(MissingBindingError):
            graphs.replay({"x": tensor})
    del kernels


def test_capture_is_closed_after_startup() -> None:
    kernels, graphs, x = captured()
    with pytest.raises(CaptureError, match="capture of draft graphs is closed"):
        graphs.capture({"x": x[:1]}, lambda: kernels.silu_mul(x[:1]))
    assert graphs.counters.captures_at_startup == 1


def test_the_same_tensors_are_captured_once() -> None:
    kernels = NativeKernels(threads=1)
    graphs, x = family(kernels), torch.randn(3, 8)
    assert {"x": x} not in graphs
    graphs.capture({"x": x}, lambda: kernels.silu_mul(x))
    assert {"x": x} in graphs
    with pytest.raises(CaptureError, match="captured over these tensors before"):
        graphs.capture({"x": x}, lambda: kernels.silu_mul(x))


def test_a_failed_capture_leaves_no_graph() -> None:
    kernels = NativeKernels(threads=1)
    graphs, x = family(kernels), torch.randn(3, 8)
    with pytest.raises(CaptureError, match="aten"):
        graphs.capture({"x": x}, lambda: kernels.silu_mul(x + 1))
    with pytest.raises(MissingBindingError):
        graphs.replay({"x": x})
    assert graphs.counters.captures_at_startup == 0
    graphs.capture({"x": x}, lambda: kernels.silu_mul(x))
    assert torch.equal(graphs.replay({"x": x}), kernels.silu_mul(x))


def test_graphs_of_a_family_share_their_results_memory() -> None:
    kernels = NativeKernels(threads=1)
    graphs, x = family(kernels), torch.randn(64, 2048)

    def record(rows: int) -> Tensor:
        part = x[:rows]
        return graphs.capture({"x": part}, lambda: kernels.silu_mul(part))

    first = record(64)
    size = graphs.arena.bytes
    for rows in range(1, 64):
        assert record(rows).data_ptr() == first.data_ptr()
    assert graphs.arena.bytes == size
    assert graphs.nbytes > size


def test_binding_compares_by_every_part() -> None:
    x = torch.zeros(4, 6)
    assert Binding.of({"x": x}) == Binding.of({"x": x[:]})
    assert hash(Binding.of({"x": x})) == hash(Binding.of({"x": x[:]}))
    assert Binding.of({"x": x}) != Binding.of({"x": x.t()})


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, (1,)), (2, (1, 2)), (9, (*range(1, 9), 9)), (16, (*range(1, 9), 10, 12, 14, 16)), (500, BUCKETS)],
)
def test_buckets(most: int, expected: tuple[int, ...]) -> None:
    assert buckets_up_to(most) == expected
