"""The MTP drafter against its equations, its context against one pass, and what it refuses."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from dense_mtp import DenseMTP
from drafter_cases import HIDDEN, MTP_SETTINGS, TARGET_LAYERS, VOCAB, checkpoint, random_target, random_tensors
from torch import Tensor

from sparkgap.catalog.drafter_settings import DrafterSettings
from sparkgap.errors import CheckpointError, ConfigError, UnsupportedModelError
from sparkgap.models.cache import allocate_caches
from sparkgap.models.decoder import Decoder
from sparkgap.models.mtp import MTPDrafter
from sparkgap.ops import Kernels, KVCache, NativeKernels, TorchKernels

BLOCK = 4
BLOCKS_PER_SEQUENCE = 12

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced vocabulary": {"draft_vocab_size": 23},
    "sliding window": {"layer_windows": (6,)},
    "last layer": {"target_layer_ids": (TARGET_LAYERS - 1,)},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kernels_of(name: str) -> Kernels:
    return TorchKernels() if name == "torch" else NativeKernels(1)


def caches_of(drafter: MTPDrafter, blocks: int) -> list[KVCache]:
    device = torch.device("cpu")
    caches = [
        cache
        for shape in drafter.cache_shapes
        for cache in allocate_caches(*shape, blocks, BLOCK, torch.float32, device)
    ]
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    return caches


def dense(settings: DrafterSettings, tensors: dict[str, Tensor], target: Decoder) -> DenseMTP:
    ids = None
    weights = dict(tensors)
    if "d2t" in weights:
        ids = torch.tensor([i + int(offset) for i, offset in enumerate(weights["d2t"])])
    weights.setdefault("embed_tokens.weight", target.embedding)
    head = random_target().lm_head.weight
    weights.setdefault("lm_head.weight", head if ids is None else head[ids])
    return DenseMTP(settings.transformer, weights, settings.layer_windows[0], ids)


@dataclass
class Rounds:
    """Sequences whose context grows round by round, and the caches of a drafter.

    `tokens` has, for each sequence, those of all committed positions and the anchor.
    """

    drafter: MTPDrafter
    starts: tuple[int, ...]
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))

    def __post_init__(self) -> None:
        blocks = BLOCKS_PER_SEQUENCE * len(self.starts)
        order = torch.randperm(blocks, generator=self.generator)
        self.tables = order.view(len(self.starts), BLOCKS_PER_SEQUENCE).to(torch.int32)
        self.caches = caches_of(self.drafter, blocks)
        self.hidden = [torch.empty(0, HIDDEN) for _ in self.starts]
        self.tokens = [self.random_tokens(1) for _ in self.starts]
        for sequence, start in enumerate(self.starts):
            self.extend(sequence, start - 1, start)

    def random_tokens(self, count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=self.generator).tolist()

    @property
    def anchors(self) -> Tensor:
        return torch.tensor([tokens[-1] for tokens in self.tokens])

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(rows) for rows in self.hidden])

    def slots(self, sequence: int, positions: Tensor) -> Tensor:
        return self.tables[sequence, positions // BLOCK].long() * BLOCK + positions % BLOCK

    def extend(self, sequence: int, accepted: int, width: int) -> None:
        """A round's end: `width` rows were verified, of which the first `accepted + 1` become context."""
        start = len(self.hidden[sequence])
        rows = torch.randn(width, HIDDEN, generator=self.generator)
        following = self.random_tokens(width)
        positions = torch.arange(start, start + width)
        slots = self.slots(sequence, positions)
        slots[accepted + 1 :] = -1
        self.drafter.context_update(rows, positions, slots, self.caches, torch.tensor(following))
        self.hidden[sequence] = torch.cat([self.hidden[sequence], rows[: accepted + 1]])
        self.tokens[sequence] += following[: accepted + 1]

    def propose(self, count: int, pick: Any = None) -> Any:
        draft = self.drafter.draft(self.anchors, self.lengths, self.tables, self.caches, count)
        return self.drafter.propose(self.anchors, draft, pick)


def bound(kernels: str, settings: DrafterSettings, tensors: dict[str, Tensor]) -> MTPDrafter:
    target = random_target(kernels=kernels_of(kernels))
    return MTPDrafter.from_checkpoint(checkpoint(settings, tensors), target, target.kernels, torch.float32)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("case", CASES)
def test_rounds_match_the_equations(case: str, kernels: str) -> None:
    settings = replace(MTP_SETTINGS, **CASES[case])
    tensors = random_tensors(settings, 2, own_head=True)
    drafter = bound(kernels, settings, tensors)
    reference = dense(settings, tensors, random_target())
    for count in (1, 3, 5):
        rounds = Rounds(drafter, (1, 4, 9))
        for number in range(count + 1):
            proposal = rounds.propose(count, lambda _, logits: logits.argmax(-1))
            greedy = rounds.propose(count)
            for sequence, (hidden, tokens) in enumerate(zip(rounds.hidden, rounds.tokens, strict=True)):
                logits, drafted = reference.propose(hidden, tokens, count)
                torch.testing.assert_close(proposal.draft_logits[sequence], logits, atol=1e-4, rtol=0)
                torch.testing.assert_close(greedy.scores[sequence], logits.amax(-1), atol=1e-4, rtol=0)
                assert proposal.token_ids[sequence].tolist() == drafted
                assert greedy.token_ids[sequence].tolist() == drafted
            for sequence in range(3):
                rounds.extend(sequence, (number + sequence) % (count + 1), count + 1)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_sampled_picks_lead_the_next_pass(kernels: str) -> None:
    settings = replace(MTP_SETTINGS, draft_vocab_size=23)
    tensors = random_tensors(settings, 3, own_head=True)
    drafter = bound(kernels, settings, tensors)
    reference = dense(settings, tensors, random_target())
    rounds = Rounds(drafter, (3, 7))
    proposal = rounds.propose(4, lambda step, logits: torch.full((2,), 3 + step))
    for sequence, (hidden, tokens) in enumerate(zip(rounds.hidden, rounds.tokens, strict=True)):
        logits, drafted = reference.propose(hidden, tokens, 4, lambda step, _: 3 + step)
        torch.testing.assert_close(proposal.draft_logits[sequence], logits, atol=1e-4, rtol=0)
        assert proposal.token_ids[sequence].tolist() == drafted


def test_context_after_rounds_is_that_of_one_pass() -> None:
    """Bit for bit: what drafts wrote behind the context never stays, and rejected rows write nothing."""
    tensors = random_tensors(MTP_SETTINGS, 4)
    drafter = bound("native", MTP_SETTINGS, tensors)
    rounds = Rounds(drafter, (1, 6))
    for number in range(6):
        rounds.propose(3)
        for sequence in range(2):
            rounds.extend(sequence, (number + 2 * sequence) % 4, 4)
    fresh = caches_of(drafter, BLOCKS_PER_SEQUENCE * 2)
    for sequence, (hidden, tokens) in enumerate(zip(rounds.hidden, rounds.tokens, strict=True)):
        positions = torch.arange(len(hidden))
        slots = rounds.slots(sequence, positions)
        drafter.context_update(hidden, positions, slots, fresh, torch.tensor(tokens[1:]))
        for ours, once in zip(rounds.caches, fresh, strict=True):
            for found, expected in ((ours.keys, once.keys), (ours.values, once.values)):
                flat, other = found.flatten(0, 1)[slots], expected.flatten(0, 1)[slots]
                assert torch.equal(flat, other)
                assert not other.isnan().any()


def test_context_entries_are_keys_and_values_of_the_equations() -> None:
    tensors = random_tensors(MTP_SETTINGS, 4)
    rounds = Rounds(bound("native", MTP_SETTINGS, tensors), (9,))
    reference = dense(MTP_SETTINGS, tensors, random_target())
    x = reference.stream(rounds.hidden[0], rounds.tokens[0][1:])
    slots = rounds.slots(0, torch.arange(9))
    for found, expected in zip(
        (rounds.caches[0].keys, rounds.caches[0].values), reference.keys_and_values(x), strict=True
    ):
        torch.testing.assert_close(found.flatten(0, 1)[slots], expected, atol=1e-4, rtol=0)


def test_a_sequence_that_only_pads_writes_nothing_and_disturbs_nobody() -> None:
    drafter = bound("native", MTP_SETTINGS, random_tensors(MTP_SETTINGS, 4))
    rounds = Rounds(drafter, (5,))
    alone = rounds.propose(4)
    before = [cache.keys.clone() for cache in rounds.caches]
    anchors, lengths = torch.tensor([rounds.tokens[0][-1], 0]), torch.tensor([5, 0])
    tables = torch.cat([rounds.tables, torch.full_like(rounds.tables, int(rounds.tables[0, 0]))])
    draft = drafter.draft(anchors, lengths, tables, rounds.caches, 4)
    beside = drafter.propose(anchors, draft)
    assert torch.equal(beside.token_ids[0], alone.token_ids[0])
    assert torch.equal(beside.scores[0], alone.scores[0])
    for cache, keys in zip(rounds.caches, before, strict=True):
        assert torch.equal(cache.keys.nan_to_num(7.0), keys.nan_to_num(7.0))


def test_drafts_at_the_end_of_the_blocks_write_nothing_beyond() -> None:
    drafter = bound("native", MTP_SETTINGS, random_tensors(MTP_SETTINGS, 4))
    end = BLOCK * BLOCKS_PER_SEQUENCE
    rounds = Rounds(drafter, (end,))
    proposal = rounds.propose(5)
    assert proposal.is_finite()
    assert bool((proposal.token_ids >= 0).all())


@pytest.mark.parametrize("count", [0, 17])
def test_refuses_counts_of_tokens(count: int) -> None:
    rounds = Rounds(bound("torch", MTP_SETTINGS, random_tensors(MTP_SETTINGS)), (2,))
    with pytest.raises(ConfigError, match=r"from 1 to 16, the most passes of an mtp drafter such as tiny, got"):
        rounds.propose(count)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target_layer_ids": (TARGET_LAYERS,)}, CheckpointError, "the target has 5 layers"),
        ({"target_layer_ids": (-1,)}, UnsupportedModelError, "embedding output"),
        ({"num_target_layers": 7}, CheckpointError, "trained for a target of 7 layers"),
        ({"markov_rank": 4}, CheckpointError, "a mtp drafter has no Markov or confidence head"),
    ],
)
def test_refuses_other_targets(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    tensors = random_tensors(MTP_SETTINGS)
    with pytest.raises(error, match=message):
        bound("torch", replace(MTP_SETTINGS, **changes), tensors)


def test_context_needs_the_following_tokens() -> None:
    drafter = bound("torch", MTP_SETTINGS, random_tensors(MTP_SETTINGS))
    with pytest.raises(ValueError, match="tokens after"):
        drafter.context_update(
            torch.zeros(1, HIDDEN), torch.zeros(1).long(), torch.zeros(1).long(), caches_of(drafter, 2)
        )
