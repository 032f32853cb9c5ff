"""A drafter that comes with Sparkgap is used for the target it was made for, and for no other."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from sparkgap import LLM, SamplingParams
from sparkgap.catalog import shipped
from sparkgap.catalog.checkpoint import open_checkpoint
from sparkgap.catalog.drafters import read_drafter
from sparkgap.catalog.identity import identify_target
from sparkgap.catalog.json_files import read_json
from sparkgap.catalog.safetensors_files import SafetensorsSource
from sparkgap.cli import main
from sparkgap.errors import CheckpointError, ConfigError
from tests.speculating_model import BLOCK_SIZE, write_looping_pair, write_mtp, write_random_drafter

SETTINGS = {"dtype": "float32", "threads": 1, "device": "cpu", "max_num_seqs": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LARGEST_BYTES = 40_000_000


def edit_config(directory, edit):
    config = json.loads((directory / "config.json").read_text())
    edit(config)
    (directory / "config.json").write_text(json.dumps(config))


def set_default_tokens(number):
    def edit(config):
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = number

    return edit


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("pair"))
    checkpoint = open_checkpoint(str(model))
    identity = identify_target(checkpoint.config, checkpoint.weights)
    edit_config(drafter, lambda config: config.update(sparkgap={"target": identity.to_json()}))
    return model, drafter


@pytest.fixture
def model(pair, tmp_path):
    return shutil.copytree(pair[0], tmp_path / "target")


@pytest.fixture
def drafter(pair, tmp_path, monkeypatch):
    """The only shipped drafter."""
    monkeypatch.setattr(shipped, "SHIPPED_DRAFTERS", tmp_path / "drafters")
    return shutil.copytree(pair[1], tmp_path / "drafters" / "tiny")


def speculation(model, **settings):
    return LLM(str(model), **SETTINGS | settings).info()["speculation"]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        main([*map(str, arguments)])
    captured = capsys.readouterr()
    return exit_info.value.code, captured.out, captured.err


def test_it_is_used_by_default(model, drafter):
    llm = LLM(str(model), **SETTINGS)
    info = llm.info()
    assert info["speculation"]["drafter"] == "tiny (shipped)"
    assert info["speculation"]["num_speculative_tokens"] == BLOCK_SIZE
    assert info["drafter_note"] is None
    (output,) = llm.generate("hello", GREEDY)
    assert output.metrics.accepted_draft_tokens > output.metrics.draft_rounds
    plain = LLM(str(model), speculation=False, **SETTINGS)
    assert plain.info()["speculation"] is None
    assert plain.generate("hello", GREEDY)[0].outputs == output.outputs


def test_settings_without_a_model_take_it(model, drafter, tmp_path):
    config = {"method": "dspark", "num_speculative_tokens": 4}
    assert speculation(model, speculative_config=config)["num_speculative_tokens"] == 4
    with pytest.raises(ConfigError, match=r"from 1 to 5.*got 7"):
        speculation(model, speculative_config={"num_speculative_tokens": 7})
    with pytest.raises(ConfigError, match=r"method is dflash, and drafter tiny \(shipped\) is dspark"):
        speculation(model, speculative_config={"method": "dflash"})
    named = write_random_drafter(tmp_path / "named")
    assert speculation(model, speculative_config={"model": str(named)})["drafter"] == str(named)


@pytest.fixture
def mtp(model, drafter):
    """A shipped MTP drafter for the same target, beside the other."""
    identity = read_json(drafter / "config.json")["sparkgap"]
    directory = write_mtp(drafter.parent / "tiny-mtp", model, "right")
    edit_config(directory, lambda config: config.update(sparkgap=identity))
    return directory


def test_mtp_is_used_where_it_is_asked_for(model, drafter, mtp, capsys):
    assert speculation(model)["drafter"] == "tiny (shipped)"
    assert speculation(model, speculative_config={"method": "dspark"})["drafter"] == "tiny (shipped)"
    llm = LLM(str(model), speculative_config={"method": "mtp"}, **SETTINGS)
    info = llm.info()["speculation"]
    assert (info["drafter"], info["method"], info["num_speculative_tokens"]) == ("tiny-mtp (shipped)", "mtp", 3)
    assert llm.generate("hello", GREEDY)[0].metrics.accepted_draft_tokens > 0
    out = run(capsys, "info", "--model", model)[1]
    assert "tiny (shipped), dspark, 5 draft tokens a round" in out
    assert "tiny-mtp (shipped), mtp, 3 draft tokens a round" in out
    assert json.loads(run(capsys, "info", "--json")[1])["shipped_drafters"] == ["tiny", "tiny-mtp"]


def test_mtp_is_the_default_where_it_is_alone(model, drafter, mtp):
    shutil.rmtree(drafter)
    assert speculation(model)["drafter"] == "tiny-mtp (shipped)"
    with pytest.raises(ConfigError, match=r"method is dspark, and drafter tiny-mtp \(shipped\) is mtp"):
        speculation(model, speculative_config={"method": "dspark"})


def test_its_configuration_says_how_many_tokens(model, drafter):
    edit_config(drafter, set_default_tokens(2))
    assert speculation(model)["num_speculative_tokens"] == 2
    assert speculation(model, speculative_config={"num_speculative_tokens": 5})["num_speculative_tokens"] == 5
    edit_config(drafter, set_default_tokens(BLOCK_SIZE + 3))
    assert speculation(model)["num_speculative_tokens"] == BLOCK_SIZE


def test_another_precision_of_the_model_is_said(model, drafter, caplog):
    weights = load_file(model / "model.safetensors")
    rounded = {name: (w * 64).round() / 64 if w.ndim == 2 else w for name, w in weights.items()}
    save_file(rounded, model / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        info = LLM(str(model), **SETTINGS).info()
    assert info["speculation"]["drafter"] == "tiny (shipped)"
    assert "another precision" in info["drafter_note"]
    assert [record.getMessage() for record in caplog.records] == [info["drafter_note"]]


@pytest.mark.parametrize("name", ["tiny", "elsewhere"])
def test_other_weights_are_decoded_plainly(model, drafter, monkeypatch, caplog, name):
    """With a line where the target has the drafter's name, silently where it has nothing to do with it."""
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 1.1
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    renamed = replace(open_checkpoint(str(model)), name=name)
    monkeypatch.setattr("sparkgap.engine.loading.open_checkpoint", lambda *_, **__: renamed)
    with caplog.at_level(logging.WARNING):
        info = LLM(str(model), **SETTINGS).info()
    assert info["speculation"] is None
    logged = [record.getMessage() for record in caplog.records]
    if name == "tiny":
        assert "was not made for the weights in target" in info["drafter_note"]
        assert logged == [info["drafter_note"]]
        with pytest.raises(ConfigError, match=r"needs a drafter: drafter tiny \(shipped\) was not made.*--draft"):
            LLM(str(model), speculative_config={"num_speculative_tokens": 2}, **SETTINGS)
    else:
        assert info["drafter_note"] is None
        assert logged == []


def test_a_drafter_that_does_not_say_what_it_is_for_is_never_taken(model, drafter):
    edit_config(drafter, lambda config: config.pop("sparkgap"))
    assert speculation(model) is None


def test_a_damaged_one_is_an_error(model, drafter):
    (drafter / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="tiny"):
        speculation(model)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"target": 3}, "sparkgap.target must be an object"),
        ({"target": {"architecture": "A"}}, "sparkgap.target.num_layers is missing"),
        (5, "sparkgap must be an object"),
    ],
)
def test_a_damaged_identity_is_an_error(model, drafter, own, message):
    edit_config(drafter, lambda config: config.update(sparkgap=own))
    with pytest.raises(CheckpointError, match=message):
        speculation(model)


def test_commands(model, drafter, capsys, tmp_path):
    edit_config(drafter, set_default_tokens(3))
    options = ["--model", model, "--dtype", "float32", "--threads", 1]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello", "category": "x"}\n{"prompt": "zq", "category": "y"}\n')
    status, out, err = run(
        capsys, "bench", "acceptance", *options, "--raw", "--prompts", prompts, "--max-tokens", 12, "--json"
    )
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert report["speculation"]["drafter"] == "tiny (shipped)"
    assert len(report["overall"]["acceptance_by_position"]) == 3
    assert list(report["categories"]) == ["x", "y"]
    status, out, _ = run(capsys, "generate", "--raw", "hello", *options, "--max-tokens", 8, "--json")
    assert json.loads(out)["metrics"]["draft_rounds"] > 0
    status, out, _ = run(
        capsys, "generate", "--raw", "hello", *options, "--max-tokens", 8, "--json", "--no-speculation"
    )
    assert json.loads(out)["metrics"]["draft_rounds"] == 0
    status, out, _ = run(capsys, "info", "--model", model)
    assert "tiny (shipped), dspark, 3 draft tokens a round" in out
    facts = json.loads(run(capsys, "info", "--model", model, "--json")[1])
    assert (facts["drafter"]["path"], facts["drafter_note"]) == (str(drafter), None)
    assert json.loads(run(capsys, "info", "--json")[1])["shipped_drafters"] == ["tiny"]


def test_the_drafters_in_the_package_are_small_and_whole():
    for drafter in shipped.shipped_drafters():
        weights = drafter.path / "model.safetensors"
        assert weights.stat().st_size <= LARGEST_BYTES
        checkpoint = read_drafter(read_json(drafter.path / "config.json"), SafetensorsSource(drafter.path), "shipped")
        assert checkpoint.settings.made_for is not None
