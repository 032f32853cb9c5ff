import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from tiny_models import Session, load_saved, tiny_model

from sparkgap.device.cpu import CaptureError, CpuGraph
from sparkgap.models.batch import ForwardBatch
from sparkgap.ops import AttentionRows
from sparkgap.ops.native_kernels import NativeKernels


def test_replay_reads_present_inputs_and_writes_the_same_outputs() -> None:
    kernels = NativeKernels(threads=2)
    weight = kernels.prepare_linear(torch.randn(8, 16))
    x, ones = torch.randn(3, 16), torch.ones(8)
    graph = CpuGraph(kernels.executor)
    with graph.capture():
        y = kernels.rms_norm(kernels.linear(x, weight), ones, 1e-5)
    assert len(graph) == 2
    for seed in range(3):
        x.copy_(torch.randn(3, 16, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(y, kernels.rms_norm(kernels.linear(x, weight), ones, 1e-5))


def test_graph_keeps_what_it_borrows() -> None:
    kernels = NativeKernels(threads=2, quantization="w8a8")

    def build() -> tuple[CpuGraph, torch.Tensor, torch.Tensor]:
        x = torch.randn(3, 64)
        weight = kernels.prepare_linear(torch.randn(64, 64))
        graph = CpuGraph(kernels.executor)
        with graph.capture():
            y = kernels.silu_mul(kernels.linear(kernels.linear(x, weight), weight))
        expected = kernels.silu_mul(kernels.linear(kernels.linear(x, weight), weight))
        return graph, y, expected

    graphs = [build() for _ in range(8)]
    gc.collect()
    junk = [torch.full((64, 64), torch.nan) for _ in range(100)]
    for graph, y, expected in graphs:
        graph.replay()
        assert torch.equal(y, expected)
    del junk


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x.contiguous() if not x.is_contiguous() else x.clone(),
        lambda x: torch.zeros(3),
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.cat([x, x]),
        lambda x: x.sum().item(),
        lambda x: x.index_select(0, torch.empty(1, dtype=torch.int64)),
    ],
)
def test_torch_compute_is_refused(compute: Callable[[torch.Tensor], object]) -> None:
    kernels = NativeKernels(threads=1)
    x = torch.randn(4, 4)
    graph = CpuGraph(kernels.executor)

    def record() -> None:
        with graph.capture():
            kernels.silu_mul(x)
            compute(x)

    with pytest.raises(CaptureError, match="during capture"):
        record()
    assert not kernels.executor.capturing
    with pytest.raises(CaptureError, match="holds no calls"):
        graph.replay()
    with pytest.raises(CaptureError, match="captured before"), graph.capture():
        pass


def test_bad_index_in_a_replay_raises() -> None:
    kernels = NativeKernels(threads=2)
    ids, table = torch.tensor([0, 1]), torch.randn(4, 8)
    graph = CpuGraph(kernels.executor)
    with graph.capture():
        rows = kernels.embed(ids, table)
    ids[1] = 9
    with pytest.raises(IndexError, match="token id"):
        graph.replay()
    ids[1] = 3
    graph.replay()
    assert torch.equal(rows, table[[0, 3]])


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_whole_model(tmp_path: Path, family: str, quantization: str | None, width: int) -> None:
    """One graph over fixed buffers serves every length, with the bits of eager passes; capturing writes no KV."""
    kernels = NativeKernels(threads=2, quantization=quantization)  # type: ignore[arg-type]
    decoder = load_saved(tiny_model(family), tmp_path, kernels, dtype=torch.bfloat16)
    tokens = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    eager = Session(decoder, 1)
    session = Session(decoder, 1)
    eager.forward({0: tokens[:120]})
    session.forward({0: tokens[:120]})
    static = ForwardBatch(
        torch.zeros(width, dtype=torch.int64),
        torch.full((width,), -1),
        AttentionRows(
            torch.zeros(width, dtype=torch.int64),
            torch.tensor([0, width], dtype=torch.int32),
            session.block_tables.clone(),
            width,
            256,
        ),
    )
    before = [(cache.keys.clone(), cache.values.clone()) for cache in session.caches]
    graph = CpuGraph(kernels.executor)
    with graph.capture():
        result = decoder.forward(static, session.caches, (1, 2))
        logits = decoder.logits(result.hidden)
        picks = kernels.argmax(logits)
    graph.replay()
    for cache, (keys, values) in zip(session.caches, before, strict=True):
        assert torch.equal(cache.keys.nan_to_num(7), keys.nan_to_num(7))
        assert torch.equal(cache.values.nan_to_num(7), values.nan_to_num(7))
    for start in range(120, 120 + 5 * width, width):
        part = tokens[start : start + width]
        batch = session.batch({0: part})
        static.token_ids.copy_(batch.token_ids)
        static.slots.copy_(batch.slots)
        static.attention.positions.copy_(batch.attention.positions)
        session.lengths[0] += width
        graph.replay()
        expected = eager.forward({0: part}, (1, 2))
        assert torch.equal(logits, decoder.logits(expected.hidden))
        assert expected.captured is not None
        assert result.captured is not None
        assert torch.equal(result.captured, expected.captured)
        assert torch.equal(picks, logits.argmax(1))
