"""What a run keeps may be damaged, and inputs may not fit: one line that names the file or setting, and the remedy."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparkgap.catalog.checkpoint import open_checkpoint
from sparkgap.errors import ConfigError, ModelNotFoundError
from sparkgap.models.loading import load_target
from sparkgap.ops import NativeKernels
from sparkgap.train.config import ConversationConfig
from sparkgap.train.conversations import plain_encoding
from sparkgap.train.generation import ConversationSampler
from sparkgap.train.run import train
from sparkgap.train.template import turn_template
from tests.train.conftest import make_settings
from tests.train.test_mtp import MTP


@pytest.fixture(scope="module")
def whole(tiny_target, tmp_path_factory, quiet):
    config = make_settings(tiny_target, tmp_path_factory.mktemp("kept") / "run", optimization={"steps": 1})
    train(config, quiet)
    return config


@pytest.fixture(scope="module")
def sharing(whole, tiny_target, tmp_path_factory, quiet):
    out = tmp_path_factory.mktemp("kept") / "sharing"
    config = make_settings(tiny_target, out, network=MTP, optimization={"steps": 1}, conversations=whole.out)
    train(config, quiet)
    return config


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def drop(name):
    def change(path):
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors, path)

    return change


def rows(path):
    tensors = load_file(path)
    save_file(tensors | {"taps": tensors["taps"][1:]}, path)


def text(content):
    return lambda path: path.write_text(content)


DAMAGE = [
    ("settings.json", text("{"), "remove the file and give the settings"),
    ("settings.json", text("[]"), "no JSON object"),
    ("settings.json", text("\ud800".encode("utf-8", "surrogatepass").decode("latin-1")), "is damaged"),
    ("vocabulary.safetensors", cut, "training begins again"),
    ("vocabulary.safetensors", drop("ids"), "no tensor ids"),
    ("tap-scale.safetensors", empty, "training begins again"),
    ("state.pt", cut, "training begins again"),
    ("state.pt", empty, "training begins again"),
    ("state.pt", text("no state"), "training begins again"),
    ("conversations/shard-0000.safetensors", cut, "samples it again"),
    ("conversations/shard-0000.safetensors", drop("lengths"), "no tensor lengths"),
    ("conversations/shard-0000.safetensors", rows, "taps does not have"),
]


def assert_one_line(error, path, message):
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_a_damaged_file_of_the_run_is_named(whole, tmp_path, quiet, name, damage, message):
    shutil.copytree(whole.out, tmp_path / "run")
    path = tmp_path / "run" / "work" / name
    damage(path)
    with pytest.raises(ConfigError) as error:
        train(replace(whole, out=tmp_path / "run"), quiet)
    assert_one_line(error, path, message)


@pytest.mark.parametrize("name", ["state.pt", "conversations/shard-0000.safetensors"])
def test_the_remedy_helps(whole, tmp_path, quiet, name):
    shutil.copytree(whole.out, tmp_path / "run")
    (tmp_path / "run" / "work" / name).unlink()
    train(replace(whole, out=tmp_path / "run"), quiet)
    before, after = load_file(whole.out / "model.safetensors"), load_file(tmp_path / "run" / "model.safetensors")
    assert all(after[key].equal(value) for key, value in before.items())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("target.json", "{", "continue the run in"),
        ("target.json", "", "continue the run in"),
        ("target.json", "[]", "no JSON object"),
        ("settings.json", "{", "leave out --conversations"),
        ("settings.json", "[" * 100_000, "leave out --conversations"),
        ("settings.json", '{"network": 3}', "network is no JSON object"),
        ("settings.json", '{"conversation": [1]}', "conversation is no JSON object"),
        ("conversations/shard-0000.safetensors", "", "samples it again"),
    ],
)
def test_a_damaged_file_of_the_shared_run_is_named(whole, sharing, tmp_path, quiet, name, content, message):
    shutil.copytree(whole.out, tmp_path / "run")
    path = tmp_path / "run" / "work" / name
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        train(replace(sharing, out=tmp_path / "out", conversations=tmp_path / "run"), quiet)
    assert_one_line(error, path, message)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("conversation", "opener_share", "x", "opener_share must be in"),
        ("features", "target_layer_ids", [5], "target layer 5 cannot be captured"),
        ("network", "method", "x", "method must be one of"),
        ("network", "method", ["x"], "method must be one of"),
    ],
)
def test_a_bad_value_in_the_shared_runs_settings_is_named(
    whole, sharing, tmp_path, quiet, section, key, value, message
):
    shutil.copytree(whole.out, tmp_path / "run")
    path = tmp_path / "run" / "work" / "settings.json"
    recorded = json.loads(path.read_text())
    recorded[section][key] = value
    path.write_text(json.dumps(recorded))
    with pytest.raises(ConfigError) as error:
        train(replace(sharing, out=tmp_path / "out", conversations=tmp_path / "run"), quiet)
    assert_one_line(error, path, message)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"shards": "a"}', '{"shards": 0}', '{"shards": true}', "\\"])
def test_a_damaged_record_of_shared_conversations_is_named(sharing, tmp_path, quiet, content):
    shutil.copytree(sharing.out, tmp_path / "run")
    path = tmp_path / "run" / "work" / "shared.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        train(replace(sharing, out=tmp_path / "run"), quiet)
    assert_one_line(error, path, "training begins again")


def test_a_command_that_was_refused_leaves_nothing_to_contradict_the_next(settings, quiet, tmp_path, whole):
    config = settings(optimization={"steps": 1})
    with pytest.raises(ModelNotFoundError):
        train(replace(config, target="no-such-model"), quiet)
    with pytest.raises(ModelNotFoundError):
        train(replace(config, start_from=tmp_path / "none"), quiet)
    with pytest.raises(ConfigError, match="max_positions 12 is too short"):
        train(replace(config, conversation=replace(config.conversation, max_positions=12)), quiet)
    train(config, quiet)


@pytest.mark.parametrize(
    ("network", "features", "message"),
    [
        ({"num_layers": 2}, {}, "has num_layers 1, and the drafter to be trained has 2"),
        ({"markov_rank": 5}, {}, "has markov_rank 4, and the drafter to be trained has 5"),
        ({"markov_head_type": "rnn"}, {}, "has markov_head_type vanilla, and .* rnn"),
        ({"num_kv_heads": 1}, {}, "has num_key_value_heads 2, and .* 1"),
        ({"method": "dflash"}, {}, "has method dspark, and .* dflash"),
        (MTP, {}, "has method dspark, and .* mtp"),
    ],
)
def test_an_unfitting_start_is_refused_before_anything_is_sampled(
    settings, quiet, whole, monkeypatch, network, features, message
):
    monkeypatch.setattr("sparkgap.train.run.collect", None)
    with pytest.raises(ConfigError, match=message):
        train(settings(network=network, features=features, start_from=whole.out), quiet)


def test_an_mtp_drafter_of_another_layer_is_no_start(settings, quiet, sharing):
    config = settings(network=MTP, features={"target_layer_ids": (1,)}, start_from=sharing.out)
    with pytest.raises(ConfigError, match="has target_layer_ids 0, and the drafter to be trained has 1"):
        train(config, quiet)


def test_openers_fit_in_short_conversations(tiny_target, quiet):
    """No lane computes a position that it has not, though openers and user turns may be longer than all of it."""
    checkpoint = open_checkpoint(str(tiny_target))
    config = ConversationConfig(
        lanes=8,
        shard_conversations=8,
        max_positions=33,
        min_answer_tokens=4,
        user_temperatures=(1.0,),
        opener_share=1.0,
    )
    kernels = NativeKernels(1, "w8a8")
    target = load_target(
        checkpoint.config,
        checkpoint.weights,
        kernels=kernels,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_model_len=config.max_positions,
    )
    encode = plain_encoding(checkpoint.tokenizer)
    sampler = ConversationSampler(target, turn_template(checkpoint), config, (0,), 4, encode)
    with torch.inference_mode():
        for conversation in sampler.shard("0", None):
            assert len(conversation.token_ids) <= 33


def test_a_target_that_writes_nothing_new_is_given_up(settings, quiet):
    """Here: answers that can never be as long as they must."""
    sampling = {"max_positions": 60, "max_user_tokens": 1, "min_answer_tokens": 30, "answer_tokens": 10**6}
    with pytest.raises(ConfigError, match="wrote no new conversation in 3 files of 4"):
        train(settings(conversation=sampling), quiet)
    assert json.loads((settings().out / "work" / "settings.json").read_text())["target"]
