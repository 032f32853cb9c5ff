"""Context updates as replays against eager ones: same hidden states, same KV, and no other byte touched."""

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from drafter_cases import SETTINGS, VOCAB, checkpoint, random_target, random_tensors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparkgap.config import SamplingParams
from sparkgap.graphs.captured import CapturedPasses
from sparkgap.graphs.family import BUCKETS, row_buckets
from sparkgap.graphs.passes import DraftModel, Passes, TargetOutput
from sparkgap.models.batch import ForwardBatch
from sparkgap.models.drafter import Drafter
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.ops.operands import KVCache
from sparkgap.rounds.batching import RowSpan, forward_batch
from sparkgap.rounds.sequence import Sequence

N = 7
ROWS = N + 1
BLOCK = 4
BLOCKS = 60
MAX_MODEL_LEN = 90
MAX_SEQUENCES = 5
CPU = torch.device("cpu")
MODES = ("masked", "compact", "off")
GUARD = -12345.5


class GuardedCache:
    """A cache in the middle of a larger buffer; every number that nothing has written is `GUARD`."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self.buffers = [torch.full((BLOCKS + 2, BLOCK, kv_heads, head_dim), GUARD) for _ in range(2)]
        self.cache = KVCache(*(buffer[1:-1] for buffer in self.buffers))


@dataclass
class Side:
    """Passes over caches of their own."""

    passes: Passes
    guarded: list[GuardedCache]

    def contents(self) -> list[Tensor]:
        return [buffer.clone() for cache in self.guarded for buffer in cache.buffers]


def make_sides(modes: tuple[str, ...] = MODES, quantization: Any = None) -> dict[str, Side]:
    """One eager side, and one captured side for each mode, over the same networks."""
    kernels = NativeKernels(threads=1, quantization=quantization)
    target = random_target(1, kernels)
    settings = replace(SETTINGS, block_size=N, markov_rank=12)
    tensors = random_tensors(settings, own_head=True)
    drafter = Drafter.from_checkpoint(checkpoint(settings, tensors), target, kernels, torch.float32)
    networks = (target.config, drafter.config.backbone)

    def side(mode: str) -> Side:
        own, draft = (
            [GuardedCache(network.num_kv_heads, network.head_dim) for _ in range(network.num_layers)]
            for network in networks
        )
        caches, model = [g.cache for g in own], DraftModel(drafter, [g.cache for g in draft], N)
        if mode == "eager":
            return Side(Passes(target, caches, model), own + draft)
        captured = CapturedPasses(
            target,
            caches,
            model,
            executor=kernels.executor,
            max_sequences=MAX_SEQUENCES,
            max_model_len=MAX_MODEL_LEN,
            context_graph=mode,
        )
        return Side(captured, own + draft)

    return {mode: side(mode) for mode in ("eager", *modes)}


def captured_passes(side: Side) -> CapturedPasses:
    assert isinstance(side.passes, CapturedPasses)
    return side.passes


def some_batch(chance: random.Random, sequences: int) -> ForwardBatch:
    """Anchor and drafts of sequences of any length, over blocks in any order."""
    blocks = chance.sample(range(BLOCKS), BLOCKS)
    spans = []
    for index in range(sequences):
        length = chance.randrange(1, BLOCKS * BLOCK // MAX_SEQUENCES - 2 * ROWS)
        table = [blocks.pop() for _ in range(-(-(length + ROWS) // BLOCK))]
        sequence = Sequence(index, SamplingParams(), 0, [5] * length, num_computed_tokens=length, block_table=table)
        spans.append(RowSpan(sequence, length, [chance.randrange(VOCAB) for _ in range(ROWS)]))
    return forward_batch(spans, BLOCK, CPU, MAX_MODEL_LEN)


def masked_slots(batch: ForwardBatch, accepted_rows: list[int]) -> Tensor:
    """Slots of the first rows of each sequence, -1 for the others."""
    rows = torch.arange(ROWS).repeat(len(accepted_rows))
    return batch.slots.masked_fill(rows >= torch.tensor(accepted_rows).repeat_interleave(ROWS), -1)


def update(side: Side, batch: ForwardBatch, slots: Tensor) -> TargetOutput:
    output = side.passes.decode(batch)
    side.passes.update_context(output, batch.attention.positions, slots, batch.token_ids)
    return output


def assert_only_written(before: list[Tensor], after: list[Tensor], slots: Tensor) -> None:
    """Every place outside `slots` has the bytes it had, and those of `slots` have others."""
    written = slots[slots >= 0]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten(2).any(-1).flatten()
        places = torch.zeros_like(changed)
        places[written + BLOCK] = True
        assert torch.equal(changed, places)


@pytest.fixture(scope="module")
def sides() -> dict[str, Side]:
    return make_sides()


@pytest.mark.parametrize("accepted_rows", range(1, ROWS + 1))
@torch.inference_mode()
def test_paired_updates(sides: dict[str, Side], accepted_rows: int) -> None:
    """64 random states: no difference in hidden states and KV to the eager side, and guards stay what they were."""
    chance = random.Random(accepted_rows)
    draft_layers = 2 * SETTINGS.transformer["num_hidden_layers"]
    for _ in range(64):
        batch = some_batch(chance, 1)
        slots = masked_slots(batch, [accepted_rows])
        outputs = {}
        for name, side in sides.items():
            for guarded in side.guarded:
                for buffer in guarded.buffers:
                    buffer.fill_(GUARD)
            before = side.contents()
            outputs[name] = update(side, batch, slots)
            after = side.contents()
            assert_only_written(before[:-draft_layers], after[:-draft_layers], batch.slots)
            assert_only_written(before[-draft_layers:], after[-draft_layers:], slots)
        expected = outputs["eager"]
        assert expected.captured is not None
        for name, output in outputs.items():
            assert output.captured is not None
            assert torch.equal(output.hidden, expected.hidden)
            assert torch.equal(output.captured, expected.captured)
            for ours, theirs in zip(sides[name].contents(), sides["eager"].contents(), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("quantization", [None, "w8a8"])
@torch.inference_mode()
def test_thousands_of_updates_with_changing_sequences(quantization: str | None) -> None:
    """Lengths, tables, slots, numbers of sequences and of accepted rows change; nothing is captured any more."""
    sides = make_sides(("masked", "compact"), quantization)
    chance = random.Random(3)
    executor = captured_passes(sides["masked"])._executor
    captures, rounds = executor.captures, 700
    for turn in range(rounds):
        number = chance.randint(1, MAX_SEQUENCES)
        batch = some_batch(chance, number)
        slots = masked_slots(batch, [chance.randint(1, ROWS) for _ in range(number)])
        for side in sides.values():
            update(side, batch, slots)
        assert executor.captures == captures
        if turn % 50 == 0 or turn == rounds - 1:
            for side in sides.values():
                for ours, theirs in zip(side.contents(), sides["eager"].contents(), strict=True):
                    assert torch.equal(ours, theirs)
    for name in ("masked", "compact"):
        counters = captured_passes(sides[name]).report()
        assert counters.replays == {"target": rounds, "context": rounds}
        assert not counters.eager


@pytest.mark.parametrize("mode", MODES)
@torch.inference_mode()
def test_an_update_without_accepted_rows_writes_nothing(mode: str) -> None:
    side = make_sides((mode,))[mode]
    batch = some_batch(random.Random(0), 3)
    output = side.passes.decode(batch)
    before = side.contents()
    side.passes.update_context(output, batch.attention.positions, torch.full_like(batch.slots, -1), batch.token_ids)
    for old, new in zip(before, side.contents(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("mode", MODES)
def test_capture_writes_nothing_and_replays_nothing_for_good(mode: str) -> None:
    side = make_sides((mode,))[mode]
    for buffer in side.contents():
        assert bool((buffer == GUARD).all())
    assert not captured_passes(side).report().replays


@torch.inference_mode()
def test_off_counts_neither_replays_nor_eager_passes() -> None:
    """It is what the setting says, not a pass outside a graph's capacity."""
    side = make_sides(("off",))["off"]
    batch = some_batch(random.Random(1), 2)
    update(side, batch, masked_slots(batch, [1, 8]))
    counters = captured_passes(side).report()
    assert counters.report()["replays"] == {"target": 1, "draft": 0, "context": 0}
    assert counters.report()["eager"] == {}


@pytest.mark.parametrize("mode", ["masked", "compact"])
@torch.inference_mode()
def test_more_sequences_than_graphs_is_counted(mode: str) -> None:
    sides = make_sides((mode,))
    chance = random.Random(2)
    blocks = iter(range(BLOCKS))
    spans = []
    for index in range(MAX_SEQUENCES + 1):
        table = [next(blocks) for _ in range(3)]
        spans.append(RowSpan(Sequence(index, SamplingParams(), 0, [5], block_table=table), 1, [3] * ROWS))
    batch = forward_batch(spans, BLOCK, CPU, MAX_MODEL_LEN)
    slots = masked_slots(batch, [chance.randint(1, ROWS) for _ in spans])
    for side in sides.values():
        update(side, batch, slots)
    for ours, theirs in zip(sides[mode].contents(), sides["eager"].contents(), strict=True):
        assert torch.equal(ours, theirs)
    assert {family for family, _ in captured_passes(sides[mode]).report().eager} == {"target", "context"}


@given(st.integers(1, 600), st.integers(1, 40))
def test_row_buckets(most: int, each: int) -> None:
    buckets = row_buckets(most, each)
    assert buckets[: min(most, each)] == tuple(range(1, min(most, each) + 1))
    assert buckets[-1] == most
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in pairwise(buckets):
        assert larger - smaller <= max(1, smaller / 4)
    assert len(buckets) <= each + 4 * max(1, most).bit_length()


def test_row_buckets_of_one_row_each_are_those_of_sequences() -> None:
    assert row_buckets(BUCKETS[-1], 1) == BUCKETS
