"""Replayed passes against eager ones, to the bit: over changing lengths, tables, slots and numbers of sequences."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from drafter_cases import MTP_SETTINGS, SETTINGS, VOCAB, checkpoint, random_target, random_tensors

from sparkgap import _native
from sparkgap.config import SamplingParams
from sparkgap.graphs.captured import CHUNK_ROWS, TOO_MANY_SEQUENCES, CapturedPasses
from sparkgap.graphs.passes import DraftModel, Passes, TargetOutput
from sparkgap.models.cache import allocate_caches
from sparkgap.models.decoder import Decoder
from sparkgap.models.drafter import Drafter
from sparkgap.models.mtp import MTPDrafter
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.ops.operands import KVCache
from sparkgap.rounds.batching import RowSpan, block_tables, forward_batch
from sparkgap.rounds.sequence import Sequence

BLOCK = 4
BLOCKS = 400
MAX_MODEL_LEN = 90
MAX_SEQUENCES = 12
NUMBERS = (1, 1, 2, 3, 7, 9, 9, 11, 11, 12)
"""Numbers of sequences that tests draw from: those with a graph of their own and those that are padded to 10 and 12."""

N = 4
CPU = torch.device("cpu")
HEADS: dict[str, dict[str, Any]] = {
    "none": {},
    "vanilla": {"markov_rank": 12, "confidence_head": True},
    "gated": {"markov_rank": 12, "markov_head_type": "gated", "confidence_head": True, "draft_vocab_size": 40},
    "rnn": {"markov_rank": 12, "markov_head_type": "rnn", "sample_from_anchor": False},
}


KINDS = [*HEADS, "mtp"]


def bound_drafter(kind: str, target: Decoder, kernels: NativeKernels) -> Drafter | MTPDrafter:
    if kind == "mtp":
        tensors = random_tensors(replace(MTP_SETTINGS, draft_vocab_size=40), own_head=True)
        drafter_checkpoint = checkpoint(replace(MTP_SETTINGS, draft_vocab_size=40), tensors)
        return MTPDrafter.from_checkpoint(drafter_checkpoint, target, kernels, torch.float32, MAX_MODEL_LEN)
    settings = replace(SETTINGS, **HEADS[kind])
    tensors = random_tensors(settings, own_head=True)
    return Drafter.from_checkpoint(checkpoint(settings, tensors), target, kernels, torch.float32)


def filled_caches(layers: int, kv_heads: int, head_dim: int, seed: int) -> list[KVCache]:
    generator = torch.Generator().manual_seed(seed)
    caches = allocate_caches(layers, kv_heads, head_dim, BLOCKS, BLOCK, torch.float32, CPU)
    for cache in caches:
        cache.keys.normal_(generator=generator)
        cache.values.normal_(generator=generator)
    return caches


@dataclass
class Pair:
    """The same networks over equal caches: eager, and captured."""

    eager: Passes
    captured: CapturedPasses

    @property
    def caches(self) -> list[tuple[KVCache, KVCache]]:
        sides = []
        for passes in (self.eager, self.captured):
            draft = [] if passes.drafting is None else passes.drafting.caches
            sides.append([*passes.caches, *draft])
        return list(zip(*sides, strict=True))

    def assert_same_kv(self) -> None:
        for a, b in self.caches:
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)


def make_pair(
    heads: str | None,
    quantization: Any = None,
    threads: int = 2,
    sampled: bool = True,
    context_graph: str = "masked",
) -> Pair:
    kernels = NativeKernels(threads=threads, quantization=quantization)
    target: Decoder = random_target(1, kernels)
    drafter = None if heads is None else bound_drafter(heads, target, kernels)

    def caches() -> tuple[list[KVCache], DraftModel | None]:
        config = target.config
        own = filled_caches(config.num_layers, config.num_kv_heads, config.head_dim, 2)
        if drafter is None:
            return own, None
        draft = [cache for shape in drafter.cache_shapes for cache in filled_caches(*shape, 3)]
        return own, DraftModel(drafter, draft, N)

    return Pair(
        Passes(target, *caches()),
        CapturedPasses(
            target,
            *caches(),
            executor=kernels.executor,
            max_sequences=MAX_SEQUENCES,
            max_model_len=MAX_MODEL_LEN,
            sampled_drafts=sampled,
            context_graph=context_graph,
        ),
    )


def some_sequences(chance: random.Random, number: int, rows: int) -> list[Sequence]:
    """Sequences of any length up to the last one that leaves room for a token, over any blocks."""
    blocks = chance.sample(range(BLOCKS), BLOCKS)
    sequences = []
    for index in range(number):
        length = chance.choice([0, 1, chance.randrange(MAX_MODEL_LEN), MAX_MODEL_LEN - 1, MAX_MODEL_LEN - rows])
        needed = -(-min(length + rows, MAX_MODEL_LEN) // BLOCK)
        table = [blocks.pop() for _ in range(needed)]
        sequences.append(
            Sequence(index, SamplingParams(), 0, [5] * length, num_computed_tokens=length, block_table=table)
        )
    return sequences


def assert_same_output(ours: TargetOutput, expected: TargetOutput) -> None:
    assert ours.logits is not None
    assert expected.logits is not None
    assert torch.equal(ours.logits, expected.logits)
    assert torch.equal(ours.hidden, expected.hidden)
    assert (ours.captured is None) == (expected.captured is None)
    if ours.captured is not None and expected.captured is not None:
        assert torch.equal(ours.captured, expected.captured)


def run_target(pair: Pair, chance: random.Random, number: int, rows: int) -> None:
    sequences = some_sequences(chance, number, rows)
    spans = [RowSpan(s, s.num_computed_tokens, [chance.randrange(VOCAB) for _ in range(rows)]) for s in sequences]
    batch = forward_batch(spans, BLOCK, CPU, MAX_MODEL_LEN)
    expected, ours = pair.eager.decode(batch), pair.captured.decode(batch)
    assert_same_output(ours, expected)
    if pair.eager.drafting is None:
        return
    rejected = torch.tensor([chance.random() < 0.4 for _ in range(number * rows)])
    slots = batch.slots.masked_fill(rejected, -1)
    positions = batch.attention.positions
    following = torch.tensor([chance.randrange(VOCAB) for _ in range(number * rows)])
    pair.eager.update_context(expected, positions, slots, following)
    pair.captured.update_context(ours, positions, slots, following)


def run_draft(pair: Pair, chance: random.Random, number: int, sampled: bool) -> None:
    sequences = some_sequences(chance, number, N)
    lengths = [s.num_computed_tokens for s in sequences]
    inputs = (
        torch.tensor([chance.randrange(VOCAB) for _ in sequences]),
        torch.tensor(lengths),
        block_tables([s.block_table for s in sequences], MAX_MODEL_LEN, BLOCK, CPU),
        max(lengths),
    )
    ours: Any
    expected: Any
    if sampled:
        model = pair.eager.drafting
        assert model is not None
        ours, expected = (
            model.drafter.propose(inputs[0], side.draft(*inputs), lambda _, logits: logits.argmax(-1))
            for side in (pair.captured, pair.eager)
        )
    else:
        ours, expected = pair.captured.propose(*inputs), pair.eager.propose(*inputs)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize("heads", KINDS)
def test_replays_equal_eager_passes(heads: str, quantization: str | None) -> None:
    chance = random.Random(heads)
    pair = make_pair(heads, quantization, threads=1 + len(heads) % 2)
    pair.assert_same_kv()
    assert not {9, 11} & set(pair.captured.buckets)
    rounds = 80
    with torch.inference_mode():
        for turn in range(rounds):
            number = chance.choice(NUMBERS)
            run_draft(pair, chance, number, sampled=turn % 4 == 0)
            run_target(pair, chance, number, N + 1)
            run_target(pair, chance, chance.choice(NUMBERS), 1)
            if turn % 10 == 0:
                pair.assert_same_kv()
    pair.assert_same_kv()
    counters = pair.captured.report()
    assert counters.report()["replays"] == {"target": 2 * rounds, "draft": rounds, "context": 2 * rounds}
    assert not counters.eager
    assert counters.captures_since_startup == 0


def test_thousands_of_plain_replays() -> None:
    chance = random.Random(0)
    pair = make_pair(None)
    with torch.inference_mode():
        for _ in range(2000):
            run_target(pair, chance, chance.choice(NUMBERS), 1)
    pair.assert_same_kv()
    assert pair.captured.report().replays["target"] == 2000


@pytest.mark.parametrize("heads", [None, *KINDS])
def test_capturing_changes_no_kv_byte(heads: str | None) -> None:
    """Nor do the trial replays at startup: eager passes captured nothing, and its caches have the first content."""
    pair = make_pair(heads)
    pair.assert_same_kv()
    assert pair.captured.report().captures_at_startup > 0
    assert sum(pair.captured.report().replays.values()) == 0


def test_nan_in_unused_memory_reaches_no_result() -> None:
    """Padding reads block 0 and stale tables; a sequence reads its own positions only."""
    pair = make_pair("vanilla")
    chance = random.Random(5)
    with torch.inference_mode():
        for _ in range(30):
            sequences = some_sequences(chance, 5, N + 1)
            used = {block for s in sequences for block in s.block_table}
            free = torch.tensor([block for block in range(BLOCKS) if block not in used])
            for sides in pair.caches:
                for cache in sides:
                    cache.keys[free] = torch.nan
                    cache.values[free] = torch.nan
            spans = [RowSpan(s, s.num_computed_tokens, [1, 2, 3, 4, 5]) for s in sequences]
            batch = forward_batch(spans, BLOCK, CPU, MAX_MODEL_LEN)
            ours = pair.captured.decode(batch)
            assert ours.logits is not None
            assert_same_output(ours, pair.eager.decode(batch))
            assert ours.logits.isfinite().all()
            for sides in pair.caches:
                for cache in sides:
                    cache.keys[free] = 1.0
                    cache.values[free] = 1.0


def test_more_sequences_than_the_largest_graph_run_eagerly_and_are_counted() -> None:
    pair = make_pair("vanilla")
    chance = random.Random(1)
    with torch.inference_mode():
        run_target(pair, chance, MAX_SEQUENCES + 1, N + 1)
        run_target(pair, chance, MAX_SEQUENCES + 3, 1)
        run_draft(pair, chance, MAX_SEQUENCES + 1, sampled=False)
        run_draft(pair, chance, MAX_SEQUENCES + 1, sampled=True)
        run_target(pair, chance, MAX_SEQUENCES, 1)
    pair.assert_same_kv()
    counters = pair.captured.report()
    assert dict(counters.eager) == {
        ("target", TOO_MANY_SEQUENCES): 2,
        ("context", TOO_MANY_SEQUENCES): 2,
        ("draft", TOO_MANY_SEQUENCES): 2,
    }
    assert counters.report()["eager"] == {TOO_MANY_SEQUENCES: 6}
    assert counters.report()["replays"] == {"target": 1, "draft": 0, "context": 1}


@pytest.mark.parametrize("context_graph", ["masked", "compact", "off"])
@pytest.mark.parametrize("heads", ["vanilla", "mtp"])
def test_chunks_of_a_prompt_equal_eager_passes(heads: str, context_graph: str) -> None:
    chance = random.Random(heads)
    pair = make_pair(heads, "w8a8", context_graph=context_graph)
    with torch.inference_mode():
        for rows in [1, 2, 7, 8, 9, 16, 31, 57, 64, 65, 80, *(chance.randrange(1, 70) for _ in range(12))]:
            start = chance.choice([0, 3, MAX_MODEL_LEN - rows])
            (sequence,) = some_sequences(chance, 1, 1)
            sequence.block_table = chance.sample(range(BLOCKS), -(-MAX_MODEL_LEN // BLOCK))
            tokens = [chance.randrange(VOCAB) for _ in range(rows)]
            batch = forward_batch([RowSpan(sequence, start, tokens)], BLOCK, CPU)
            expected, ours = pair.eager.prefill(batch), pair.captured.prefill(batch)
            assert ours.logits is expected.logits is None
            assert torch.equal(ours.hidden, expected.hidden)
            assert ours.captured is not None
            assert expected.captured is not None
            assert torch.equal(ours.captured, expected.captured)
            assert (ours.graph_captured is None) == (rows > CHUNK_ROWS[-1])
            slots = batch.slots.masked_fill(batch.attention.positions >= MAX_MODEL_LEN - 4, -1)
            for side, output in ((pair.eager, expected), (pair.captured, ours)):
                side.update_context(output, batch.attention.positions, slots, batch.token_ids)
            pair.assert_same_kv()
            # A decode pass in between leaves nothing that the next chunk reads.
            run_target(pair, chance, 2, N + 1)
    assert pair.captured.report().captures_since_startup == 0


def test_chunks_of_several_prompts_run_eagerly() -> None:
    pair, chance = make_pair("vanilla"), random.Random(5)
    sequences = some_sequences(chance, 2, 3)
    for sequence in sequences:
        sequence.block_table = chance.sample(range(BLOCKS), 4)
    batch = forward_batch([RowSpan(s, 0, [1, 2, 3]) for s in sequences], BLOCK, CPU)
    with torch.inference_mode():
        ours, expected = pair.captured.prefill(batch), pair.eager.prefill(batch)
    assert ours.graph_captured is None
    assert torch.equal(ours.hidden, expected.hidden)


def test_prompt_passes_are_not_counted() -> None:
    pair = make_pair("vanilla")
    sequence = some_sequences(random.Random(3), 1, 1)[0]
    sequence.block_table = list(range(10))
    batch = forward_batch([RowSpan(sequence, 0, [3, 4, 5])], BLOCK, CPU)
    with torch.inference_mode():
        output = pair.captured.prefill(batch)
        pair.captured.update_context(output, batch.attention.positions, batch.slots, batch.token_ids)
    assert output.logits is None
    assert pair.captured.report().report()["replays"] == {"target": 0, "draft": 0, "context": 0}
    assert not pair.captured.report().eager


def test_a_capture_after_startup_shows() -> None:
    pair = make_pair(None)
    executor = pair.eager.target.kernels.executor  # type: ignore[attr-defined]
    assert pair.captured.report().captures_since_startup == 0
    executor.begin_capture(_native.Graph(1, _native.Arena()))
    executor.end_capture()
    assert pair.captured.report().captures_since_startup == 1


def test_bad_indices_raise_and_the_next_replay_is_right() -> None:
    pair = make_pair("vanilla")
    chance = random.Random(2)
    sequences = some_sequences(chance, 2, 1)
    spans = [RowSpan(s, s.num_computed_tokens, [4]) for s in sequences]
    batch = forward_batch(spans, BLOCK, CPU)
    with torch.inference_mode():
        with pytest.raises(IndexError, match="token id"):
            pair.captured.decode(replace(batch, token_ids=torch.tensor([4, VOCAB])))
        run_target(pair, chance, 2, 1)
