"""Multi-token prediction: the trained function, what it learns, and how it is written."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sparkgap.catalog.drafters import open_drafter, read_drafter, target_ids
from sparkgap.catalog.json_files import read_json
from sparkgap.catalog.safetensors_files import SafetensorsSource
from sparkgap.errors import ConfigError
from sparkgap.models.cache import allocate_caches
from sparkgap.models.loading import load_target
from sparkgap.models.mtp import MTPDrafter
from sparkgap.ops.torch_kernels import TorchKernels
from sparkgap.train import loop
from sparkgap.train.batches import DraftVocabulary
from sparkgap.train.building import build_mtp_network
from sparkgap.train.config import ConversationConfig, FeatureConfig, NetworkConfig, OptimizationConfig, TrainConfig
from sparkgap.train.export import drafter_settings, export
from sparkgap.train.mtp_network import MtpBatch, MtpNetwork
from sparkgap.train.network import NetworkShape
from sparkgap.train.run import train
from tests.tiny_model import write_tiny_model

MTP = {"method": "mtp", "num_layers": 1, "num_speculative_tokens": 3, "draft_vocab_size": 264}


class Killed(BaseException):
    """Stands for the end of the process."""


def random_module() -> MtpNetwork:
    generator = torch.Generator().manual_seed(5)
    shape = NetworkShape(32, 32, 64, 1, 4, 2, 8, 1, 100, 60, 0, 0, 0, 1e-5, 1e4)
    embedding, head = torch.randn(100, 32, generator=generator), torch.randn(60, 32, generator=generator)
    ids = torch.randperm(100, generator=generator)[:60].sort().values
    module = MtpNetwork(shape, embedding, head, ids, torch.rand(32, generator=generator) + 0.5, torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 1 + 0.2 * noise)
    return module


def one_by_one(module: MtpNetwork, taps, tokens, anchor: int, rows: int) -> torch.Tensor:
    """The rows of one draft as the whole sequence through plain causal attention, once for each row."""
    layer = module.layers[0]
    hidden, following, outputs = list(taps[:anchor]), tokens[1 : anchor + 1].tolist(), []
    for row in range(rows):
        x = module._inputs(torch.tensor(following), torch.stack(hidden))
        normed = layer.input_layernorm(x, torch.float32)
        rotation = module.angles(torch.arange(len(following)))
        queries = layer.self_attn.queries(normed, *rotation)[-1]
        keys, values = (part.repeat_interleave(2, 1) for part in layer.keys_and_values(normed, rotation))
        weights = torch.einsum("hd,jhd->hj", queries, keys).softmax(-1)
        y = x[-1:] + layer.self_attn.o_proj(torch.einsum("hj,jhd->hd", weights, values).flatten()[None])
        y = y + layer.mlp(layer.post_attention_layernorm(y, torch.float32))
        outputs.append(module.norm(y, torch.float32)[0])
        hidden.append(y[0])
        following.append(int(tokens[anchor + row + 1]))
    return torch.stack(outputs)


@torch.no_grad()
def test_all_anchors_at_once_are_as_one_after_the_other():
    module = random_module()
    generator = torch.Generator().manual_seed(0)
    taps, tokens = torch.randn(20, 32, generator=generator), torch.randint(0, 100, (24,), generator=generator)
    anchors = [torch.tensor([3, 9]), torch.tensor([1, 5, 12])]
    everyone = torch.cat(anchors).tolist()
    batch = MtpBatch(
        torch.cat([taps[:9], taps[:12]]),
        torch.cat([tokens[1:10], tokens[1:13]]),
        [9, 12],
        anchors,
        torch.stack([tokens[a : a + 3] for a in everyone]),
    )
    found = module(batch).view(5, 3, 32)
    for index, anchor in enumerate(everyone):
        torch.testing.assert_close(found[index], one_by_one(module, taps, tokens, anchor, 3), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_drafting_reads_its_own_tokens():
    module = random_module()
    generator = torch.Generator().manual_seed(1)
    taps, tokens = torch.randn(8, 32, generator=generator), torch.randint(0, 100, (9,), generator=generator)
    batch = MtpBatch(taps, tokens[1:], [8], [torch.tensor([4, 8])], tokens[[4, 8], None])
    drafted = module.draft(batch, 3)
    forced = replace(batch, tokens=torch.cat([batch.tokens, drafted[:, :2]], dim=1))
    picks = module.draft_ids[(module(forced) @ module.head.T).argmax(-1)].view(2, 3)
    assert torch.equal(drafted, picks)


def small(settings, name="out", **changes):
    sampling = {"answer_tokens": 1000, "lanes": 8, "shard_conversations": 16, "max_positions": 64}
    optimization = {
        "steps": 40, "anchors_per_step": 96, "anchors_per_conversation": 32, "held_out_conversations": 8,
        "evaluation_interval": 20, "checkpoint_interval_s": 1e3, "warmup_steps": 5, "short_share": 0.3,
    } | changes.pop("optimization", {})  # fmt: skip
    return settings(name, conversation=sampling, network=MTP, optimization=optimization, **changes)


@pytest.fixture(scope="module")
def whole(tiny_target, tmp_path_factory, quiet):
    """A run that nothing interrupted, and its report."""
    from tests.train.conftest import make_settings

    def settings(name, **changes):
        return make_settings(tiny_target, tmp_path_factory.mktemp("mtp") / name, **changes)

    config = small(settings)
    return config, train(config, quiet)


def test_training_raises_acceptance(settings, quiet, whole):
    config, report = whole
    first = replace(small(settings, optimization={"steps": 1}), conversations=config.out)
    untrained = train(first, quiet)["held_out"]["accepted_per_round"]
    trained = report["held_out"]["accepted_per_round"]
    assert trained > untrained + 0.15
    assert trained == pytest.approx(report["curve"][-1]["held_out"]["accepted_per_round"], abs=0.05)
    assert len(report["held_out"]["by_position"]) == 3
    assert report["confidence_calibration"] is None


def test_the_checkpoint_is_read_again(whole):
    config, report = whole
    checkpoint = open_drafter(str(config.out))
    settings = checkpoint.settings
    assert (settings.method, settings.usual_speculative_tokens) == ("mtp", 3)
    assert settings.target_layer_ids == tuple(report["target_layer_ids"]) == (0,)
    assert settings.made_for is not None
    assert target_ids(checkpoint) is None  # the whole vocabulary
    names = set(checkpoint.weights.names())
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight"} <= names
    assert not names & {"fc.weight", "hidden_norm.weight", "embed_tokens.weight"}


def test_a_killed_run_continues_to_the_same_weights(settings, quiet, monkeypatch, whole):
    config, _ = whole
    killed = replace(small(settings, optimization={"checkpoint_interval_s": 1e-6}), conversations=config.out)
    other = replace(small(settings, "other"), conversations=config.out)
    step, calls = loop.Trainer._step, []

    def killed_step(self, *arguments):
        calls.append(1)
        if len(calls) == 25:
            raise Killed
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_step", killed_step)
        with pytest.raises(Killed):
            train(killed, quiet)
    killed = replace(killed, optimization=replace(killed.optimization, checkpoint_interval_s=1e3))
    train(killed, quiet)
    train(other, quiet)
    first, second, third = (load_file(c.out / "model.safetensors") for c in (config, killed, other))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert torch.equal(tensor, third[name]), name


def test_training_goes_on_from_a_module(settings, quiet, whole):
    config, report = whole
    again = replace(small(settings, optimization={"steps": 1}), conversations=config.out, start_from=config.out)
    went_on = train(again, quiet)["held_out"]["accepted_per_round"]
    assert went_on == pytest.approx(report["held_out"]["accepted_per_round"], abs=0.2)


def test_the_last_layer_can_be_read(settings, quiet):
    config = settings(features={"target_layer_ids": (1,)}, network=MTP, optimization={"steps": 2})
    assert config.captured_layer_ids(2) == (0, 1)
    assert train(config, quiet)["target_layer_ids"] == [1]
    assert open_drafter(str(config.out)).settings.target_layer_ids == (1,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: NetworkConfig("mtp"), "1 layer, got num_layers 2"),
        (lambda out: NetworkConfig("mtp", 1, 17), "at most 16 tokens, got 17"),
        (
            lambda out: TrainConfig(
                "m",
                out,
                network=NetworkConfig.for_method("mtp"),
                features=replace(TrainConfig("m", out).features, target_layer_ids=(0, 1)),
            ),
            "one target layer",
        ),
    ],
)
def test_bad_settings_are_refused(make, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "out")


@pytest.fixture
def target(tiny_target):
    config = read_json(tiny_target / "config.json")
    weights = SafetensorsSource(tiny_target)
    return load_target(config, weights, kernels=TorchKernels(), dtype=torch.float32, device=torch.device("cpu"))


@torch.no_grad()
def test_the_written_module_serves_the_trained_function(target, tmp_path):
    """Hidden states of all passes, of several anchors of two sequences, through the serving drafter's own caches."""
    generator = torch.Generator().manual_seed(3)
    vocab, hidden = target.config.vocab_size, target.config.hidden_size
    ids = torch.randperm(vocab, generator=generator)[:90].sort().values
    draft_ids = torch.full((vocab,), -1)
    draft_ids[ids] = torch.arange(90)
    vocabulary = DraftVocabulary(ids, draft_ids, 1.0)
    config = TrainConfig("tiny", tmp_path / "unused", network=NetworkConfig.for_method("mtp"))
    # Powers of two, so that folding them into `hnorm` rounds nothing.
    scale = 2.0 ** torch.randint(-3, 4, (hidden,), generator=generator)
    module = build_mtp_network(config, target, target.embedding[ids].bfloat16().float(), vocabulary, scale)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        value = noise * parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 1 + 0.2 * noise
        parameter.copy_(value.bfloat16())
    settings = drafter_settings(module, "mtp", target.config, (0,), 3)
    export(tmp_path / "drafter", module, vocabulary, settings, "tiny", ["LlamaForCausalLM"])
    source = SafetensorsSource(tmp_path / "drafter")
    checkpoint = read_drafter(read_json(tmp_path / "drafter" / "config.json"), source, "drafter")
    drafter = MTPDrafter.from_checkpoint(checkpoint, target, target.kernels, torch.float32)
    taps = torch.randn(12, hidden, generator=generator)
    tokens = torch.randint(0, vocab, (13,), generator=generator)
    for anchor in (1, 5, 12):
        caches = [
            cache
            for layers, heads, head_dim in drafter.cache_shapes
            for cache in allocate_caches(layers, heads, head_dim, 4, 4, torch.float32, target.device)
        ]
        places = torch.arange(anchor)
        drafter.context_update(taps[:anchor], places, places, caches, tokens[1 : anchor + 1])
        table = torch.arange(4, dtype=torch.int32)[None]
        anchors = tokens[anchor : anchor + 1]
        seen = []

        def keep(step, logits, seen=seen):
            seen.append(logits)
            return logits.argmax(-1)

        draft = drafter.draft(anchors, torch.tensor([anchor]), table, caches, 3, 16)
        served = drafter.propose(anchors, draft, keep).token_ids
        batch = MtpBatch(taps[:anchor], tokens[1 : anchor + 1], [anchor], [torch.tensor([anchor])], anchors[:, None])
        assert torch.equal(module.draft(batch, 3), served)
        forced = replace(batch, tokens=torch.cat([anchors[:, None], served[:, :2]], dim=1))
        torch.testing.assert_close(module(forced) @ module.head.T, torch.cat(seen), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda config, tmp: replace(config, conversations=tmp / "none"), "not the directory of a training run"),
        (
            lambda config, tmp: replace(config, conversation=ConversationConfig(top_p=0.5)),
            r"made with conversation\.top_p = 0\.95, and 0\.5 is asked for",
        ),
        (lambda config, tmp: replace(config, features=FeatureConfig(None, 9)), r"features\.top_k = 8, and 9"),
        (
            lambda config, tmp: replace(config, features=FeatureConfig((1,))),
            "after layers 0, and layer 1 is asked for",
        ),
        (
            lambda config, tmp: replace(config, conversation=ConversationConfig(answer_tokens=10**6)),
            "and 1000000 are asked for",
        ),
        (lambda config, tmp: replace(config, target=str(write_tiny_model(tmp / "x", seed=7))), "are those of target"),
    ],
)
def test_conversations_that_do_not_fit_are_refused(tiny_target, tmp_path, quiet, whole, make, message):
    config = TrainConfig(
        str(tiny_target),
        tmp_path / "out",
        device="cpu",
        workers=1,
        network=NetworkConfig.for_method("mtp"),
        conversations=whole[0].out,
    )
    with pytest.raises(ConfigError, match=message) as error:
        train(make(config, tmp_path), quiet)
    assert "\n" not in str(error.value)


def test_conversations_train_a_block_drafter_too_and_stay_as_they_are(tiny_target, tmp_path, quiet, whole):
    directory = whole[0].out / "work" / "conversations"
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    config = TrainConfig(
        str(tiny_target),
        tmp_path / "out",
        device="cpu",
        workers=1,
        conversations=whole[0].out,
        conversation=ConversationConfig(answer_tokens=1000),
        network=NetworkConfig(num_layers=1, num_speculative_tokens=3, draft_vocab_size=160, markov_rank=4),
        optimization=OptimizationConfig(steps=2, held_out_conversations=2),
    )
    report = train(config, quiet)
    assert report["conversations"] == whole[1]["conversations"]
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    assert not (config.out / "work" / "conversations").exists()
    with pytest.raises(ConfigError, match=f"uses the conversations of {whole[0].out}"):
        train(replace(config, out=tmp_path / "third", conversations=config.out), quiet)
