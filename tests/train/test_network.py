"""The trained function is the served function."""

import pytest
import torch

from sparkgap.catalog.drafters import read_drafter
from sparkgap.catalog.json_files import read_json
from sparkgap.catalog.safetensors_files import SafetensorsSource
from sparkgap.models.batch import ForwardBatch
from sparkgap.models.cache import allocate_caches
from sparkgap.models.decoder import Decoder
from sparkgap.models.drafter import Drafter
from sparkgap.models.loading import load_target
from sparkgap.ops.torch_kernels import TorchKernels
from sparkgap.train.batches import DraftVocabulary
from sparkgap.train.building import build_network
from sparkgap.train.config import NetworkConfig, TrainConfig
from sparkgap.train.evaluate import draft_greedily
from sparkgap.train.export import drafter_settings, export
from sparkgap.train.network import AnchorBatch
from tests.tiny_model import CONFIG


@pytest.fixture
def target(tiny_target) -> Decoder:
    config = read_json(tiny_target / "config.json")
    return load_target(
        config,
        SafetensorsSource(tiny_target),
        kernels=TorchKernels(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def random_network(target, method, layers, kv_heads, head="vanilla"):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(CONFIG["vocab_size"], generator=generator)[:90].sort().values
    draft_ids = torch.full((CONFIG["vocab_size"],), -1)
    draft_ids[ids] = torch.arange(90)
    rows = torch.zeros(CONFIG["vocab_size"], dtype=torch.int64)
    rows[5:200] = torch.arange(1, 196)
    wanted = NetworkConfig(method, layers, 4, 90, 3, num_kv_heads=kv_heads, markov_head_type=head)
    config = TrainConfig("tiny", target_out(), network=wanted)
    # Powers of two, so that folding them into `fc` rounds nothing.
    scale = 2.0 ** torch.randint(-3, 4, (target.config.hidden_size,), generator=generator)
    vocabulary = DraftVocabulary(ids, draft_ids, 1.0)
    network = build_network(config, target, target.embedding[ids], vocabulary, scale, rows, 7)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            value = noise * parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 1 + 0.2 * noise
            # Checkpoints are bfloat16: round now, so that nothing is lost by writing them.
            parameter.copy_(value.bfloat16())
        if network.shape.markov_rank:
            network.markov_w1[0] = 0
        network.head.copy_(network.head.bfloat16())
    return network, vocabulary


def target_out():
    from pathlib import Path

    return Path("unused")


@pytest.mark.parametrize(
    ("method", "layers", "kv_heads", "head"),
    [
        ("dspark", 2, None, "vanilla"),
        ("dspark", 1, 4, "vanilla"),
        ("dspark", 1, None, "gated"),
        ("dspark", 2, None, "rnn"),
        ("dflash", 2, None, "vanilla"),
    ],
)
@torch.no_grad()
def test_exported_network_serves_the_trained_function(target, tmp_path, method, layers, kv_heads, head):
    network, vocabulary = random_network(target, method, layers, kv_heads, head)
    lead, tokens = network.shape.lead_rows, 4
    settings = drafter_settings(network, method, target.config, (0,), tokens)
    export(tmp_path / "drafter", network, vocabulary, settings, "tiny", ["LlamaForCausalLM"])
    checkpoint = read_drafter(
        read_json(tmp_path / "drafter" / "config.json"), SafetensorsSource(tmp_path / "drafter"), "drafter"
    )
    drafter = Drafter.from_checkpoint(checkpoint, target, TorchKernels(), torch.float32)

    generator = torch.Generator().manual_seed(1)
    lengths = [9, 5]
    taps = [torch.randn(length, target.config.hidden_size, generator=generator) for length in lengths]
    anchors = [torch.tensor([1, 4, 8]), torch.tensor([2, 4])]
    anchor_tokens = torch.randint(0, 264, (5,), generator=generator)
    batch = AnchorBatch(torch.cat(taps), lengths, anchors, anchor_tokens, tokens + lead)
    hidden = network(batch).view(5, tokens, -1)
    previous = vocabulary.ids[torch.randint(0, 90, (5, tokens), generator=generator)]

    row = 0
    for states, places in zip(taps, anchors, strict=True):
        count = states.shape[0]
        backbone = drafter.config.backbone
        caches = allocate_caches(
            backbone.num_layers, backbone.num_kv_heads, backbone.head_dim, 1, count, torch.float32, drafter.device
        )
        drafter.context_update(states, torch.arange(count), torch.arange(count), caches)
        tables = torch.zeros(len(places), 1, dtype=torch.int32)
        draft = drafter.draft(anchor_tokens[row : row + len(places)], places, tables, caches, tokens, count)
        torch.testing.assert_close(draft.hidden, hidden[row : row + len(places)], rtol=1e-4, atol=1e-5)

        def pick(step: int, logits: torch.Tensor, row: int = row, count: int = len(places)) -> torch.Tensor:
            return vocabulary.draft_ids[previous[row : row + count, step]]

        own_anchors, own_hidden = anchor_tokens[row : row + len(places)], hidden[row : row + len(places)].flatten(0, 1)
        proposal = drafter.propose(own_anchors, draft, pick)
        before = torch.cat([own_anchors[:, None], previous[row : row + len(places), :-1]], dim=1)
        markov = network.markov_states(before.flatten())
        latents = network.markov_latents(own_hidden, markov, tokens)
        trained = own_hidden @ network.head.T + latents @ network.markov_output().T
        torch.testing.assert_close(proposal.draft_logits.flatten(0, 1), trained, rtol=1e-4, atol=1e-4)
        assert (proposal.confidences is None) == (method == "dflash")
        if proposal.confidences is not None:
            confidences = network.confidence_logits(own_hidden, markov).sigmoid()
            torch.testing.assert_close(proposal.confidences.flatten(), confidences, rtol=1e-4, atol=1e-4)
        drafted = draft_greedily(
            network, AnchorBatch(states, [count], [places], own_anchors, tokens + lead), vocabulary.ids
        )
        assert torch.equal(drafter.propose(own_anchors, draft).token_ids, drafted)
        row += len(places)


@torch.no_grad()
def test_a_block_sees_nothing_from_its_anchor_on(target):
    network, _ = random_network(target, "dspark", 2, None)
    taps = torch.randn(8, target.config.hidden_size)
    changed = taps.clone()
    changed[5:] += 1
    anchors, tokens = [torch.tensor([3, 5, 6])], torch.tensor([11, 12, 13])
    before, after = (network(AnchorBatch(t, [8], anchors, tokens, 4)).view(3, 4, -1) for t in (taps, changed))
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


@torch.no_grad()
def test_blocks_do_not_depend_on_what_is_packed_with_them(target):
    network, _ = random_network(target, "dspark", 2, None)
    taps, other = torch.randn(8, target.config.hidden_size), torch.randn(6, target.config.hidden_size)
    alone = network(AnchorBatch(taps, [8], [torch.tensor([5])], torch.tensor([9]), 4))
    together = network(
        AnchorBatch(
            torch.cat([other, taps]),
            [6, 8],
            [torch.tensor([2, 4]), torch.tensor([3, 5])],
            torch.tensor([1, 2, 3, 9]),
            4,
        )
    )
    torch.testing.assert_close(alone, together[-4:], rtol=1e-5, atol=1e-6)


def test_target_pass_gives_the_taps_that_training_reads(target, tiny_target):
    """One prefill through the serving kernels and the lanes' decoding give the same captured states."""
    from sparkgap.catalog.checkpoint import open_checkpoint
    from sparkgap.ops.operands import AttentionRows
    from sparkgap.train.config import ConversationConfig
    from sparkgap.train.conversations import plain_encoding
    from sparkgap.train.generation import ConversationSampler, LaneKernels
    from sparkgap.train.template import turn_template

    checkpoint = open_checkpoint(str(tiny_target))
    lanes = load_target(
        checkpoint.config,
        checkpoint.weights,
        kernels=LaneKernels(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    encode = plain_encoding(checkpoint.tokenizer)
    config = ConversationConfig(
        lanes=3, shard_conversations=5, max_positions=64, max_user_tokens=12, min_answer_tokens=4
    )
    with torch.inference_mode():
        conversations = ConversationSampler(lanes, turn_template(checkpoint), config, (0,), 5, encode).shard(
            "seed", None
        )
        assert conversations
        for conversation in conversations:
            ids = torch.tensor(conversation.token_ids[:-1])
            count = ids.shape[0]
            caches = allocate_caches(2, 2, 8, 1, count, torch.float32, target.device)
            rows = AttentionRows(
                torch.arange(count),
                torch.tensor([0, count], dtype=torch.int32),
                torch.zeros(1, 1, dtype=torch.int32),
                count,
                count,
            )
            result = target.forward(ForwardBatch(ids, torch.arange(count), rows), caches, (0,))
            torch.testing.assert_close(conversation.taps, result.captured, rtol=1e-3, atol=1e-4)
            logprobs = target.logits(result.hidden).log_softmax(-1)
            chosen = logprobs.gather(1, conversation.top_ids.long())
            torch.testing.assert_close(conversation.top_logprobs.float(), chosen, rtol=5e-3, atol=5e-3)
