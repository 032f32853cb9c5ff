"""Rows of whole captured passes have the bits they have alone: 1 ... 64 rows, any threads, every instruction set."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter_cases import SETTINGS, VOCAB, checkpoint, random_target, random_tensors
from torch import Tensor

from sparkgap import _native
from sparkgap.device.cpu import CpuGraph
from sparkgap.models.batch import ForwardBatch
from sparkgap.models.cache import allocate_caches
from sparkgap.models.drafter import Drafter
from sparkgap.ops.native_kernels import ISA_VARIABLE, NativeKernels
from sparkgap.ops.operands import AttentionRows, KVCache

BLOCK, CONTEXT, ROWS, BLOCK_ROWS = 4, 20, 64, 4
CAPTURED = (0, 2, 4)
COUNTS = (1, 2, 3, 4, 7, 8, 9, 12, 13, 31, 64)


def kernels_of(monkeypatch: pytest.MonkeyPatch, variant: str, threads: int, quantization: Any) -> NativeKernels:
    monkeypatch.setenv(ISA_VARIABLE, variant)
    return NativeKernels(threads=threads, quantization=quantization)


def make_caches(layers: int, kv_heads: int, head_dim: int, blocks: int) -> list[KVCache]:
    caches = allocate_caches(layers, kv_heads, head_dim, blocks, BLOCK, torch.bfloat16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    for cache in caches:
        for part in (cache.keys, cache.values):
            part.copy_(torch.randn(part.shape, generator=generator))
    return caches


def target_pass(kernels: NativeKernels, start: int, rows: int) -> list[Tensor]:
    """Rows `start ... start + rows - 1` after the context, in one graph, with the KV of those before in the cache."""
    target = random_target(1, kernels)
    config = target.config
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    caches = make_caches(config.num_layers, config.num_kv_heads, config.head_dim, 21)
    tables = torch.arange(21, dtype=torch.int32)[None]

    def batch(first: int, last: int) -> ForwardBatch:
        positions = torch.arange(CONTEXT + first, CONTEXT + last)
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        return ForwardBatch(
            token_ids[first:last], positions.clone(), AttentionRows(positions, starts, tables, last - first, 84)
        )

    if start:
        target.forward(batch(0, start), caches)
    graph = CpuGraph(kernels.executor)
    inputs = batch(start, start + rows)
    with graph.capture():
        result = target.forward(inputs, caches, CAPTURED)
        logits = target.logits(result.hidden)
    graph.replay()
    assert result.captured is not None
    written = [
        part.flatten(0, 1)[CONTEXT + start : CONTEXT + start + rows].flatten(1)
        for part in (caches[-1].keys, caches[-1].values)
    ]
    return [logits.clone(), result.captured.clone(), *written]


@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize("variant", _native.supported_variants())
def test_target(monkeypatch: pytest.MonkeyPatch, variant: str, quantization: Any) -> None:
    expected = target_pass(kernels_of(monkeypatch, "portable", 1, quantization), 0, ROWS)
    for number, count in enumerate(COUNTS):
        kernels = kernels_of(monkeypatch, variant, 1 + number % 3, quantization)
        for start in (0, ROWS - count):
            for ours, all_rows in zip(target_pass(kernels, start, count), expected, strict=True):
                assert torch.equal(ours, all_rows[start : start + count]), (count, start)


def draft_pass(kernels: NativeKernels, sequences: slice) -> list[Tensor]:
    """Draft blocks of some of 16 sequences, and their context updates, in one graph."""
    settings = replace(SETTINGS, markov_rank=12, confidence_head=True)
    target = random_target(1, kernels)
    drafter = Drafter.from_checkpoint(
        checkpoint(settings, random_tensors(settings, own_head=True)), target, kernels, torch.float32
    )
    backbone = drafter.config.backbone
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(0, 80, (16,), generator=generator)[sequences]
    anchors = torch.randint(0, VOCAB, (16,), generator=generator)[sequences]
    captured = torch.randn(16, 3 * target.config.hidden_size, generator=generator)[sequences]
    tables = torch.arange(16 * 21, dtype=torch.int32).view(16, 21)[sequences].contiguous()
    slots = tables[:, 20].to(torch.int64) * BLOCK
    caches = make_caches(backbone.num_layers, backbone.num_kv_heads, backbone.head_dim, 16 * 21)
    graph = CpuGraph(kernels.executor)
    with graph.capture():
        drafter.context_update(captured, lengths, slots, caches)
        draft = drafter.draft(anchors, lengths, tables, caches, BLOCK_ROWS)
        proposal = drafter.propose(anchors, draft)
    graph.replay()
    assert proposal.confidences is not None
    written = [part.flatten(0, 1)[slots] for cache in caches for part in (cache.keys, cache.values)]
    return [
        draft.row_logits.clone(),
        proposal.token_ids.clone(),
        proposal.scores.clone(),
        proposal.confidences.clone(),
        *written,
    ]


@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize("variant", _native.supported_variants())
def test_draft_and_context(monkeypatch: pytest.MonkeyPatch, variant: str, quantization: Any) -> None:
    expected = draft_pass(kernels_of(monkeypatch, "portable", 1, quantization), slice(0, 16))
    parts = [*(slice(i, i + 1) for i in range(0, 16, 3)), slice(0, 2), slice(2, 5), slice(5, 13), slice(0, 16)]
    for number, part in enumerate(parts):
        kernels = kernels_of(monkeypatch, variant, 1 + number % 3, quantization)
        for ours, all_rows in zip(draft_pass(kernels, part), expected, strict=True):
            assert torch.equal(ours, all_rows[part]), part


@pytest.mark.parametrize("threads", [1, (os.cpu_count() or 1) + 3])
def test_one_thread_and_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    best = _native.supported_variants()[0]
    ours = target_pass(kernels_of(monkeypatch, best, threads, "w8a8"), 3, 9)
    expected = target_pass(kernels_of(monkeypatch, best, 2, "w8a8"), 3, 9)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)
