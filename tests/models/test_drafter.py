"""The drafter against a dense implementation of the same equations, over rounds of every accepted length."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from dense_drafter import DenseDrafter
from drafter_cases import (
    HIDDEN,
    SETTINGS,
    TARGET_CONFIG,
    TRANSFORMER,
    VOCAB,
    DictWeights,
    checkpoint,
    deepspec_checkpoint,
    dense,
    random_target,
    random_tensors,
    with_heads,
)
from torch import Tensor

from sparkgap.catalog.drafter_settings import DrafterSettings
from sparkgap.errors import CheckpointError, ConfigError, UnsupportedModelError
from sparkgap.models.batch import ForwardBatch
from sparkgap.models.cache import allocate_caches
from sparkgap.models.drafter import Drafter
from sparkgap.models.heads import DraftOutput
from sparkgap.models.loading import load_target
from sparkgap.ops import TorchKernels
from sparkgap.ops.operands import AttentionRows, KVCache

TOLERANCE = 1e-4
BLOCK = 4
BLOCKS_PER_SEQUENCE = 24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(settings: DrafterSettings, tensors: dict[str, Tensor], *, deepspec: bool = False, seed: int = 0) -> Drafter:
    target = random_target(seed)
    make = deepspec_checkpoint if deepspec else checkpoint
    return Drafter.from_checkpoint(make(settings, tensors), target, target.kernels, torch.float32)


@dataclass
class Rounds:
    """Sequences whose context grows round by round, and the caches of a drafter."""

    drafter: Drafter
    starts: tuple[int, ...]
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))

    def __post_init__(self) -> None:
        backbone = self.drafter.config.backbone
        blocks = BLOCKS_PER_SEQUENCE * len(self.starts)
        order = torch.randperm(blocks, generator=self.generator)
        self.tables = order.view(len(self.starts), BLOCKS_PER_SEQUENCE).to(torch.int32)
        self.caches = allocate_caches(
            backbone.num_layers,
            backbone.num_kv_heads,
            backbone.head_dim,
            blocks,
            BLOCK,
            torch.float32,
            torch.device("cpu"),
        )
        for cache in self.caches:
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
        width = HIDDEN * len(self.drafter.target_layer_ids)
        self.captured = [torch.empty(0, width) for _ in self.starts]
        for sequence, start in enumerate(self.starts):
            self.extend(sequence, self.new_rows(start), start)
        self.pick_anchors()

    def new_rows(self, rows: int) -> Tensor:
        return torch.randn(rows, self.captured[0].shape[1], generator=self.generator)

    def pick_anchors(self) -> None:
        self.anchors = torch.randint(VOCAB, (len(self.starts),), generator=self.generator)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(rows) for rows in self.captured])

    def extend(self, sequence: int, rows: Tensor, accepted: int) -> None:
        """A context update of `rows`, of which the first `accepted` are written."""
        start = len(self.captured[sequence])
        positions = torch.arange(start, start + len(rows))
        slots = self.tables[sequence, positions // BLOCK].long() * BLOCK + positions % BLOCK
        slots[accepted:] = -1
        self.drafter.context_update(rows, positions, slots, self.caches)
        self.captured[sequence] = torch.cat([self.captured[sequence], rows[:accepted]])

    def draft(self, tokens: int) -> DraftOutput:
        return self.drafter.draft(self.anchors, self.lengths, self.tables, self.caches, tokens)

    def finish(self, accepted: list[int], tokens: int) -> None:
        """Verification saw `tokens + 1` rows a sequence; `accepted + 1` of them become context."""
        for sequence, count in enumerate(accepted):
            self.extend(sequence, self.new_rows(tokens + 1), count + 1)
        self.pick_anchors()


def assert_rounds_match(drafter: Drafter, reference: DenseDrafter, starts: tuple[int, ...] = (0, 3, 9)) -> None:
    """Several rounds, with accepted lengths that run through 0 ... N in every sequence."""
    tokens = drafter.config.max_speculative_tokens
    rounds = Rounds(drafter, starts)
    for number in range(tokens + 1):
        draft = rounds.draft(tokens)
        proposal = drafter.propose(rounds.anchors, draft)
        assert proposal.is_finite()
        for sequence, captured in enumerate(rounds.captured):
            anchor = int(rounds.anchors[sequence])
            base, final, ids, confidences = reference.propose(captured, anchor, tokens)
            torch.testing.assert_close(draft.base_logits[sequence], base, atol=TOLERANCE, rtol=TOLERANCE)
            assert proposal.token_ids[sequence].tolist() == ids
            torch.testing.assert_close(proposal.scores[sequence], final.amax(-1), atol=TOLERANCE, rtol=TOLERANCE)
            if confidences is None:
                assert proposal.confidences is None
            else:
                assert proposal.confidences is not None
                torch.testing.assert_close(proposal.confidences[sequence], confidences, atol=TOLERANCE, rtol=0)
        rounds.finish([(number + sequence) % (tokens + 1) for sequence in range(len(starts))], tokens)


HEADS = [
    (0, "vanilla", False, False),
    (0, "vanilla", True, False),
    *(
        (6, kind, *confidence)
        for kind in ("vanilla", "gated", "rnn")
        for confidence in ((False, False), (True, False), (True, True))
    ),
]


@pytest.mark.parametrize("deepspec", [False, True], ids=["speculators", "deepspec"])
@pytest.mark.parametrize("draft_vocab", [VOCAB, 23])
@pytest.mark.parametrize("from_anchor", [True, False], ids=["from-anchor", "fill-in"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_matches_the_equations(heads: Any, from_anchor: bool, draft_vocab: int, deepspec: bool) -> None:
    rank, kind, confidence, with_markov = heads
    settings = with_heads(
        rank,
        kind,
        bool(confidence),
        bool(with_markov),
        sample_from_anchor=from_anchor,
        draft_vocab_size=draft_vocab,
    )
    tensors = random_tensors(settings, seed=1)
    drafter = load(settings, tensors, deepspec=deepspec)
    assert_rounds_match(drafter, dense(settings, tensors, random_target()))


@pytest.mark.parametrize("deepspec", [False, True], ids=["speculators", "z-lab"])
def test_dflash_matches_the_equations(deepspec: bool) -> None:
    settings = replace(SETTINGS, method="dflash", sample_from_anchor=False, block_size=6)
    tensors = random_tensors(settings, seed=2)
    drafter = load(settings, tensors, deepspec=deepspec)
    assert drafter.config.max_speculative_tokens == 5
    assert_rounds_match(drafter, dense(settings, tensors, random_target()))


@pytest.mark.parametrize("window", [1, 3, 6, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_sliding_layers_match_the_equations(window: int, causal: bool) -> None:
    settings = with_heads(4, "gated", True, True, layer_windows=(window, None), layer_causal=(causal, False))
    tensors = random_tensors(settings, seed=3)
    assert_rounds_match(load(settings, tensors), dense(settings, tensors, random_target()))


def test_own_embedding_head_biases_and_width_match_the_equations() -> None:
    settings = with_heads(
        4,
        "rnn",
        True,
        True,
        draft_vocab_size=30,
        transformer={**TRANSFORMER, "hidden_size": 24, "attention_bias": True},
    )
    tensors = random_tensors(settings, seed=4, own_embedding=True, own_head=True)
    assert_rounds_match(load(settings, tensors), dense(settings, tensors, random_target()))


def test_heads_without_biases_match_the_equations() -> None:
    settings = with_heads(4, "rnn", True, True)
    tensors = random_tensors(settings, seed=4, biases=False)
    assert not any(name.endswith(".bias") for name in tensors)
    assert_rounds_match(load(settings, tensors), dense(settings, tensors, random_target()))


@pytest.mark.parametrize("from_anchor", [True, False])
def test_fewer_tokens_make_a_shorter_block(from_anchor: bool) -> None:
    settings = with_heads(6, "rnn", True, True, sample_from_anchor=from_anchor)
    tensors = random_tensors(settings, seed=6)
    drafter, reference = load(settings, tensors), dense(settings, tensors, random_target())
    rounds = Rounds(drafter, (0, 7))
    for tokens in range(1, drafter.config.max_speculative_tokens + 1):
        draft = rounds.draft(tokens)
        proposal = drafter.propose(rounds.anchors, draft)
        for sequence, captured in enumerate(rounds.captured):
            base, _, ids, _ = reference.propose(captured, int(rounds.anchors[sequence]), tokens)
            torch.testing.assert_close(draft.base_logits[sequence], base, atol=TOLERANCE, rtol=TOLERANCE)
            assert proposal.token_ids[sequence].tolist() == ids


@pytest.mark.parametrize("tokens", [0, -1, 6])
def test_more_tokens_than_trained_are_refused(tokens: int) -> None:
    drafter = load(SETTINGS, random_tensors(SETTINGS))
    with pytest.raises(ConfigError, match=r"num_speculative_tokens must be from 1 to 5.*tiny"):
        Rounds(drafter, (2,)).draft(tokens)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("draft_vocab", [VOCAB, 23])
def test_picked_tokens_condition_the_next(kind: str, from_anchor: bool, draft_vocab: int) -> None:
    settings = with_heads(6, kind, True, True, sample_from_anchor=from_anchor, draft_vocab_size=draft_vocab)
    tensors = random_tensors(settings, seed=8)
    drafter, reference = load(settings, tensors), dense(settings, tensors, random_target())
    rounds = Rounds(drafter, (4, 11))
    tokens = drafter.config.max_speculative_tokens
    chosen = torch.randint(draft_vocab, (tokens, 2), generator=torch.Generator().manual_seed(9))
    seen: list[Tensor] = []

    def pick(step: int, logits: Tensor) -> Tensor:
        seen.append(logits)
        return chosen[step]

    proposal = drafter.propose(rounds.anchors, rounds.draft(tokens), pick)
    assert proposal.draft_logits is not None
    assert proposal.confidences is not None
    torch.testing.assert_close(torch.stack(seen, dim=1), proposal.draft_logits)
    for sequence, captured in enumerate(rounds.captured):
        picks = chosen[:, sequence].tolist()
        _, final, ids, confidences = reference.propose(
            captured, int(rounds.anchors[sequence]), tokens, lambda step, _, picks=picks: picks[step]
        )
        torch.testing.assert_close(proposal.draft_logits[sequence], final, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(proposal.confidences[sequence], confidences, atol=TOLERANCE, rtol=0)
        assert proposal.token_ids[sequence].tolist() == ids


def test_picking_the_largest_is_the_chain() -> None:
    settings = with_heads(6, "rnn", True, True, sample_from_anchor=False, draft_vocab_size=23)
    drafter = load(settings, random_tensors(settings, seed=8))
    rounds = Rounds(drafter, (4, 11, 0))
    draft = rounds.draft(4)
    chain = drafter.propose(rounds.anchors, draft)
    picked = drafter.propose(rounds.anchors, draft, lambda _, logits: logits.argmax(-1))
    assert torch.equal(chain.token_ids, picked.token_ids)
    assert torch.equal(chain.scores, picked.scores)
    assert chain.confidences is not None
    assert picked.confidences is not None
    assert torch.equal(chain.confidences, picked.confidences)


def test_masked_slots_write_nothing() -> None:
    drafter = load(SETTINGS, random_tensors(SETTINGS))
    rounds = Rounds(drafter, (5,))
    before = [KVCache(cache.keys.clone(), cache.values.clone()) for cache in rounds.caches]
    rounds.drafter.context_update(rounds.new_rows(3), torch.arange(5, 8), torch.full((3,), -1), rounds.caches)
    for old, cache in zip(before, rounds.caches, strict=True):
        torch.testing.assert_close(cache.keys, old.keys, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(cache.values, old.values, rtol=0, atol=0, equal_nan=True)


def test_a_broken_weight_shows_in_the_proposal() -> None:
    settings = with_heads(6, "vanilla", True, True)
    for name, where in (
        ("norm.weight", (0,)),
        ("markov_head.markov_w2.weight", (40, 2)),
        ("lm_head.weight", (11, 3)),
    ):
        tensors = random_tensors(settings, own_head=True)
        tensors[name][where] = torch.nan
        drafter = load(settings, tensors)
        rounds = Rounds(drafter, (3,))
        draft = rounds.draft(5)
        proposal = drafter.propose(rounds.anchors, draft)
        assert not proposal.is_finite(), name
        assert ((proposal.token_ids >= 0) & (proposal.token_ids < VOCAB)).all()
        assert not drafter.propose(
            rounds.anchors, draft, lambda _, logits: torch.zeros(1, dtype=torch.long)
        ).is_finite()


def test_sizes() -> None:
    settings = with_heads(6, "gated", True, True, draft_vocab_size=23)
    tensors = random_tensors(settings)
    drafter = load(settings, tensors)
    counted = sum(tensor.numel() for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    assert drafter.num_parameters == counted
    assert drafter.max_context_length == 96


def test_shares_embedding_and_head_with_the_target() -> None:
    target = random_target()
    drafter = Drafter.from_checkpoint(
        checkpoint(SETTINGS, random_tensors(SETTINGS)), target, target.kernels, torch.float32, max_model_len=50
    )
    assert drafter.weights.embedding is target.embedding
    assert drafter.weights.lm_head is target.lm_head
    assert drafter.max_context_length == 50


@pytest.mark.parametrize(
    ("changes", "target", "error", "message"),
    [
        ({"target_layer_ids": (0, 4)}, {}, CheckpointError, "after layer 4, the target's last"),
        ({"target_layer_ids": (0, 5)}, {}, CheckpointError, "after layer 5, and the target has 5 layers"),
        ({"target_layer_ids": (-1, 2)}, {}, UnsupportedModelError, "embedding output"),
        ({"target_hidden_size": 16}, {}, CheckpointError, "hidden states of size 16"),
        ({}, {"vocab_size": 62}, CheckpointError, "vocabulary of 61 tokens"),
        ({"num_target_layers": 6}, {}, CheckpointError, "target of 6 layers"),
        ({"mask_token_id": VOCAB}, {}, CheckpointError, "mask_token_id 61 is outside"),
        ({"block_size": 1, "sample_from_anchor": False}, {}, CheckpointError, "predicts no token"),
        ({"method": "dflash", "confidence_head": True}, {}, CheckpointError, "dflash drafter has no"),
        ({"draft_vocab_size": 70}, {}, CheckpointError, "larger than its target's"),
        ({"transformer": {**TRANSFORMER, "hidden_size": 24}}, {}, CheckpointError, "no embedding of its own"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    changes: dict[str, Any], target: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings = replace(SETTINGS, **changes)
    decoder = random_target(**target)
    with pytest.raises(error, match=message) as caught:
        Drafter.from_checkpoint(checkpoint(settings, random_tensors(settings)), decoder, TorchKernels(), torch.float32)
    assert "tiny" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_half_precision_follows_float32() -> None:
    settings = with_heads(6, "rnn", True, True)
    tensors = random_tensors(settings, seed=12)
    target = random_target()
    exact = Rounds(load(settings, tensors), (9,))
    drafter = Drafter.from_checkpoint(checkpoint(settings, tensors), target, target.kernels, torch.bfloat16)
    backbone = drafter.config.backbone
    caches = allocate_caches(
        backbone.num_layers,
        backbone.num_kv_heads,
        backbone.head_dim,
        BLOCKS_PER_SEQUENCE,
        BLOCK,
        torch.bfloat16,
        torch.device("cpu"),
    )
    positions = torch.arange(9)
    slots = exact.tables[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
    drafter.context_update(exact.captured[0].bfloat16(), positions, slots, caches)
    draft = drafter.draft(exact.anchors, exact.lengths, exact.tables, caches, 5)
    assert draft.base_logits.dtype == torch.float32
    expected = exact.draft(5).base_logits
    torch.testing.assert_close(draft.base_logits, expected, atol=0.15, rtol=0.05)
    proposal = drafter.propose(exact.anchors, draft)
    assert proposal.confidences is not None
    assert proposal.confidences.dtype == torch.float32


def test_captured_layers_are_hugging_faces_hidden_states() -> None:
    """Layer id k is `hidden_states[k + 1]`: the target's own capture drives the drafter as transformers' would."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{k: v for k, v in TARGET_CONFIG.items() if k != "architectures"})
    peer = transformers.LlamaForCausalLM(config).eval()
    target = load_target(
        TARGET_CONFIG,
        DictWeights(peer.state_dict()),
        kernels=TorchKernels(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    settings = with_heads(6, "gated", True, True)
    tensors = random_tensors(settings, seed=13)
    drafter = Drafter.from_checkpoint(checkpoint(settings, tensors), target, target.kernels, torch.float32)
    token_ids = torch.randint(VOCAB, (11,))
    with torch.no_grad():
        states = peer(token_ids[None], output_hidden_states=True).hidden_states
    captured = torch.cat([states[k + 1][0] for k in settings.target_layer_ids], dim=-1)

    table = torch.arange(BLOCKS_PER_SEQUENCE, dtype=torch.int32)[None]
    places, cpu = torch.arange(11), torch.device("cpu")
    rows = AttentionRows(places, torch.tensor([0, 11], dtype=torch.int32), table, 11, 11)
    target_caches = allocate_caches(5, 1, 8, BLOCKS_PER_SEQUENCE, BLOCK, torch.float32, cpu)
    result = target.forward(ForwardBatch(token_ids, places, rows), target_caches, drafter.target_layer_ids)
    assert result.captured is not None
    caches = allocate_caches(2, 2, 16, BLOCKS_PER_SEQUENCE, BLOCK, torch.float32, cpu)
    drafter.context_update(result.captured, places, places, caches)
    anchors = torch.tensor([5])
    draft = drafter.draft(anchors, torch.tensor([11]), table, caches, 5, max_length=11)
    base, _, ids, _ = dense(settings, tensors, target).propose(captured, 5, 5)
    torch.testing.assert_close(draft.base_logits[0], base, atol=TOLERANCE, rtol=TOLERANCE)
    assert drafter.propose(anchors, draft).token_ids[0].tolist() == ids
