"""Training starts from the weights of an earlier drafter, whose draft vocabulary may be another."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from sparkgap.catalog.drafters import open_drafter
from sparkgap.errors import ConfigError
from sparkgap.train.batches import DraftVocabulary
from sparkgap.train.building import build_network
from sparkgap.train.config import NetworkConfig
from sparkgap.train.export import drafter_settings, export
from sparkgap.train.loop import Trainer
from sparkgap.train.run import train
from sparkgap.train.start_from import copy_weights
from tests.train.conftest import make_settings
from tests.train.test_network import random_network, target  # noqa: F401


def written(network, vocabulary, target, directory):  # noqa: F811
    settings = drafter_settings(network, "dspark", target.config, (0,), 4)
    export(directory, network, vocabulary, settings, "tiny", ["LlamaForCausalLM"])
    return open_drafter(str(directory))


def vocabulary_of(ids, size):
    draft_ids = torch.full((size,), -1)
    draft_ids[ids] = torch.arange(ids.shape[0])
    return DraftVocabulary(ids, draft_ids, 1.0)


def fresh(target, tmp_path, vocabulary, head="vanilla", layers=2):  # noqa: F811
    """An untrained network whose W1 trains other tokens and whose captured dimensions have another scale."""
    wanted = NetworkConfig("dspark", layers, 4, vocabulary.ids.shape[0], 3, markov_head_type=head)
    config = make_settings(tmp_path, tmp_path / "out", network=dataclasses.asdict(wanted))
    rows = torch.zeros(target.config.vocab_size, dtype=torch.int64)
    rows[0:150] = torch.arange(1, 151)
    scale = torch.full((target.config.hidden_size,), 4.0)
    return build_network(config, target, target.embedding[vocabulary.ids], vocabulary, scale, rows, 7)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_what_belongs_to_a_token_goes_to_the_same_token(target, tmp_path, head):  # noqa: F811
    trained, old = random_network(target, "dspark", 2, None, head)
    drafter = written(trained, old, target, tmp_path / "drafter")
    size = target.config.vocab_size
    new = vocabulary_of(torch.cat([old.ids[20:], (old.draft_ids < 0).nonzero()[:40, 0]]).sort().values, size)
    network = fresh(target, tmp_path, new, head)
    copy_weights(drafter, network, new)
    assert_close(network.folded_fc(), trained.folded_fc())
    for name, parameter in network.named_parameters():
        if name.startswith(("layers.", "norm.", "hidden_norm.", "confidence.", "markov_gate", "markov_joint")):
            assert torch.equal(parameter, trained.get_parameter(name)), name
    kept = old.ids[20:]
    assert torch.equal(network.markov_w2[new.draft_ids[kept]], trained.markov_w2[old.draft_ids[kept]])
    added = (old.draft_ids[new.ids] < 0).nonzero()[:, 0]
    assert added.numel() == 40
    assert not network.markov_w2[added].any()
    both = torch.arange(5, 150)
    assert torch.equal(network.markov_w1[network.markov_rows[both]], trained.markov_w1[trained.markov_rows[both]])
    assert network.markov_w1[1:6].any(-1).all()  # tokens 0 ... 4 were not trained: a gradient must reach W2
    assert not network.markov_w1[0].any()


def test_other_sizes_are_refused_by_name(target, tmp_path):  # noqa: F811
    trained, old = random_network(target, "dspark", 1, None)
    drafter = written(trained, old, target, tmp_path / "drafter")
    with pytest.raises(ConfigError, match=r"has no layers\.1"):
        copy_weights(drafter, fresh(target, tmp_path, old), old)
    network = fresh(target, tmp_path, old, head="gated", layers=1)
    with pytest.raises(ConfigError, match=r"has no markov_head\.gate_proj"):
        copy_weights(drafter, network, old)
    wide = fresh(target, tmp_path, old, layers=1)
    wide.norm.weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"norm\.weight has shape .* needs \[3\]"):
        copy_weights(drafter, wide, old)


def test_a_run_starts_where_the_drafter_was(settings, quiet, monkeypatch):
    first = settings("first", optimization={"steps": 40, "evaluation_interval": 40})
    learned = train(first, quiet)["curve"][-1]["held_out"]["accepted"]
    monkeypatch.setattr(Trainer, "_step", _keep_weights(Trainer._step))
    second = settings("second", network={"draft_vocab_size": 200}, start_from=first.out, optimization={"steps": 1})
    third = settings("third", network={"draft_vocab_size": 200}, optimization={"steps": 1})
    assert train(second, quiet)["curve"][-1]["held_out"]["accepted"] >= 0.9 * learned
    assert train(third, quiet)["curve"][-1]["held_out"]["accepted"] < 0.9 * learned


def test_a_run_continues_from_another_directory(settings, quiet, tmp_path, monkeypatch, tiny_target):
    """Its inputs are written as they are found from there, and an earlier version's record as it was given."""
    first = settings("first", optimization={"steps": 1})
    train(first, quiet)
    (tmp_path / "turns.txt").write_text("ab\ncd\n")
    config = settings("second", optimization={"steps": 1}, conversation={"prompts": Path("turns.txt")})
    (tmp_path / "target").symlink_to(tiny_target)
    monkeypatch.chdir(tmp_path)
    train(dataclasses.replace(config, target="./target", start_from=Path("first")), quiet)
    record = tmp_path / "second" / "work" / "settings.json"
    kept = json.loads(record.read_text())
    assert (kept["target"], kept["start_from"]) == (str(tiny_target.resolve()), str((tmp_path / "first").resolve()))
    (tmp_path / "below" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "below")
    above = dataclasses.replace(config.conversation, prompts=Path("../turns.txt"))
    again = dataclasses.replace(config, target="../target", start_from=Path("../first"), conversation=above)
    train(again, quiet)
    with pytest.raises(ConfigError, match=r"was begun with start_from = '.*/first', and is now given '.*/below/first'"):
        train(dataclasses.replace(again, start_from=Path("first")), quiet)
    record.write_text(json.dumps(kept | {"target": "../target", "start_from": "../first"}))
    train(again, quiet)
    shared = dataclasses.replace(settings("third", optimization={"steps": 1}), conversations=Path("../second"))
    train(dataclasses.replace(shared, conversation=above), quiet)
    assert json.loads((tmp_path / "third" / "work" / "settings.json").read_text())["conversations"] == str(
        (tmp_path / "second").resolve()
    )


def _keep_weights(step):
    def run(self, selections, pool):
        before = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        result = step(self, selections, pool)
        self.network.load_state_dict(before, strict=False)
        return result

    return run
