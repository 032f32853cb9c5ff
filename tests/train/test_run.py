"""Whole runs on a tiny target: they learn, they repeat, and they continue after any interruption."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sparkgap.catalog.checkpoint import open_checkpoint
from sparkgap.catalog.drafter_settings import read_settings
from sparkgap.catalog.drafters import open_drafter
from sparkgap.catalog.identity import identify_target
from sparkgap.catalog.json_files import read_json
from sparkgap.errors import ConfigError
from sparkgap.models.cache import allocate_caches
from sparkgap.models.drafter import Drafter
from sparkgap.models.loading import load_target
from sparkgap.ops import NativeKernels
from sparkgap.ops.torch_kernels import TorchKernels
from sparkgap.train import conversations, loop
from sparkgap.train.calibration import Calibration
from sparkgap.train.run import train
from tests.train.conftest import make_settings


@pytest.fixture(scope="module")
def whole(tiny_target, tmp_path_factory, quiet):
    """A run of the usual small settings that nothing interrupted."""
    config = make_settings(tiny_target, tmp_path_factory.mktemp("whole") / "out")
    train(config, quiet)
    return config


def drafter(config):
    return load_file(config.out / "model.safetensors")


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_training_raises_acceptance_of_the_served_drafter(settings, quiet, method):
    sampling = {"answer_tokens": 1000, "lanes": 8, "shard_conversations": 16, "max_positions": 64}
    network = {"method": method, "draft_vocab_size": 264}
    optimization = {
        "steps": 100, "anchors_per_step": 48, "held_out_conversations": 8, "evaluation_interval": 100,
        "checkpoint_interval_s": 1e3, "warmup_steps": 5,
    }  # fmt: skip
    config = settings(conversation=sampling, network=network, optimization=optimization)
    report = train(config, quiet)
    trained = report["held_out"]["accepted_per_round"]
    first = settings("untrained", conversation=sampling, network=network, optimization={"steps": 1})
    untrained = train(first, quiet)["held_out"]["accepted_per_round"]
    # Tied embeddings make an untrained drafter repeat its anchor, which this target often does too.
    assert trained > untrained + 0.15
    assert trained == pytest.approx(report["curve"][-1]["held_out"]["accepted_per_round"], abs=0.05)
    assert json.loads((config.out / "report.json").read_text())["held_out"] == report["held_out"]
    assert report["checkpoint_bytes"] == (config.out / "model.safetensors").stat().st_size


def test_a_seed_repeats_and_another_differs(settings, quiet, whole):
    again, other = settings("again"), settings("other", seed=1)
    train(again, quiet)
    train(other, quiet)
    assert_same(drafter(whole), drafter(again))
    assert not torch.equal(drafter(whole)["fc.weight"], drafter(other)["fc.weight"])


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("call", [1, 4])
def test_a_run_killed_while_training_continues_to_the_same_weights(settings, quiet, monkeypatch, whole, call):
    config = settings("killed")
    step, calls = loop.Trainer._step, []

    def killed_step(self, *arguments):
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_step", killed_step)
        with pytest.raises(Killed):
            train(config, quiet)
    assert not (config.out / "model.safetensors").exists()
    train(config, quiet)
    assert_same(drafter(whole), drafter(config))


@pytest.mark.parametrize("name", ["state.pt", "shard-0000.safetensors", "vocabulary.safetensors"])
def test_a_run_killed_while_writing_a_file_continues_to_the_same_weights(settings, quiet, monkeypatch, whole, name):
    config = settings("killed")
    rename = os.replace

    def killed_rename(source, destination):
        if str(destination).endswith(name):
            raise Killed
        rename(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed_rename)
        with pytest.raises(Killed):
            train(config, quiet)
    train(config, quiet)
    assert_same(drafter(whole), drafter(config))


def test_finished_shards_are_not_sampled_again(quiet, monkeypatch, whole):

    def fail(*_):
        raise AssertionError("sampled again")

    before = drafter(whole)
    monkeypatch.setattr(conversations.ConversationSampler, "shard", fail)
    train(whole, quiet)
    assert_same(before, drafter(whole))


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_other_heads_are_trained_and_continued(settings, quiet, monkeypatch, head):
    wanted = {"markov_head_type": head}
    sampling = {"max_positions": 64}
    config, killed = (settings(name, network=wanted, conversation=sampling) for name in ("whole", "killed"))
    report = train(config, quiet)
    name = {"gated": "gate_proj", "rnn": "joint_proj"}[head]
    written = drafter(config)
    assert written[f"markov_head.{name}.weight"].abs().sum() > 0
    assert written["markov_head.markov_w2.weight"].abs().sum() > 0
    last = report["curve"][-1]["held_out"]["accepted_per_round"]
    assert report["held_out"]["accepted_per_round"] == pytest.approx(last, abs=0.3)
    step, calls = loop.Trainer._step, []

    def killed_step(self, *arguments):
        calls.append(1)
        if len(calls) == 4:
            raise Killed
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_step", killed_step)
        with pytest.raises(Killed):
            train(killed, quiet)
    train(killed, quiet)
    assert_same(written, drafter(killed))


def test_the_drafter_says_what_it_was_made_for(whole, tiny_target):
    settings = read_settings(read_json(whole.out / "config.json"), "whole")
    checkpoint = open_checkpoint(str(tiny_target))
    assert settings.made_for == identify_target(checkpoint.config, checkpoint.weights)


def test_calibration_is_written_and_served(settings, quiet, monkeypatch, tiny_target):
    found = Calibration([0.5, 2.0, 4.0], [0.5, -1.0, 0.0], 10, [0.3] * 3, [0.1] * 3)
    monkeypatch.setattr("sparkgap.train.evaluation_stage.calibrate", lambda *_: found)
    config = settings()
    report = train(config, quiet)
    assert report["confidence_calibration"]["temperatures"] == found.temperatures
    checkpoint = open_drafter(str(config.out))
    assert checkpoint.settings.confidence_scaling == ((0.5, 0.5), (2.0, -1.0), (4.0, 0.0))
    target_files = open_checkpoint(str(tiny_target))
    for kernels in (TorchKernels(), NativeKernels(1, None)):
        target = load_target(
            target_files.config, target_files.weights, kernels=kernels, dtype=torch.float32, device=torch.device("cpu")
        )
        plain = replace(checkpoint, settings=replace(checkpoint.settings, confidence_scaling=()))
        calibrated, uncalibrated = (
            Drafter.from_checkpoint(c, target, kernels, torch.float32) for c in (checkpoint, plain)
        )
        caches = allocate_caches(1, 2, 8, 1, 8, torch.float32, target.device)
        anchors, lengths = torch.tensor([7, 9]), torch.tensor([0, 0])
        draft = uncalibrated.draft(anchors, lengths, torch.zeros(2, 1, dtype=torch.int32), caches, 3, 8)
        before = uncalibrated.propose(anchors, draft)
        assert (before.confidences != 0.5).all()
        expected = (
            before.confidences.logit() / torch.tensor(found.temperatures) + torch.tensor(found.offsets)
        ).sigmoid()

        def largest(_: int, logits: torch.Tensor) -> torch.Tensor:
            return logits.argmax(-1)

        for after in (calibrated.propose(anchors, draft), calibrated.propose(anchors, draft, largest)):
            torch.testing.assert_close(after.confidences, expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(after.token_ids, before.token_ids)


def test_a_run_from_before_a_setting_existed_continues(whole, quiet, tmp_path):
    """It was begun with what is now the setting's default."""
    file = whole.out / "work" / "settings.json"
    settings = json.loads(file.read_text())
    del settings["network"]["markov_head_type"]
    file.write_text(json.dumps(settings))
    train(whole, quiet)
    file.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="markov_head_type = 'vanilla', and is now given 'rnn'"):
        train(replace(whole, network=replace(whole.network, markov_head_type="rnn")), quiet)


def test_other_settings_do_not_continue_a_run(quiet, whole):
    changed = replace(whole, network=replace(whole.network, markov_rank=2))
    with pytest.raises(ConfigError, match=r"network\.markov_rank = 4, and is now given 2"):
        train(changed, quiet)


def test_more_steps_continue_a_run(settings, quiet):
    train(settings(), quiet)
    report = train(settings(optimization={"steps": 9}), quiet)
    assert report["steps"] == 9
    assert [record["step"] for record in report["curve"]] == [3, 6, 9]


def test_too_few_conversations_are_refused(settings, quiet):
    with pytest.raises(ConfigError, match="too few"):
        train(settings(conversation={"answer_temperatures": (0.7,)}), quiet)


def test_too_little_disk_is_refused(settings, quiet, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(conversations.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(ConfigError, match="GiB free"):
        train(settings(), quiet)


def test_too_little_memory_is_refused(settings, quiet, monkeypatch):
    monkeypatch.setattr("sparkgap.train.memory.available_bytes", lambda _: 1000)
    with pytest.raises(ConfigError, match="--lanes"):
        train(settings(), quiet)


def test_evaluation_prompts_are_measured(settings, quiet, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "abc", "category": "x"}, {"prompt": "hello"}, {"prompt": "zq", "category": "y"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = train(settings(evaluation_prompts=prompts), quiet)["evaluation_prompts"]
    assert list(report["categories"]) == ["x", "y"]
    parts = [category["rounds"] for category in report["categories"].values()]
    assert min(parts) > 0
    assert sum(parts) < report["rounds"]


def test_evaluation_prompts_that_cannot_be_read_are_refused_first(settings, quiet, tmp_path, monkeypatch):
    monkeypatch.setattr("sparkgap.train.run.collect", None)
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        train(settings(evaluation_prompts=tmp_path / "none.jsonl"), quiet)
