"""Draft lengths that change from round to round, seen through `LLM`: the same tokens, whatever is chosen."""

import itertools
import json

import pytest

from sparkgap import LLM, SamplingParams
from sparkgap.cli import main
from sparkgap.errors import ConfigError
from sparkgap.rounds.draft_length import DOES_NOT_PAY, DraftLengthPolicy

from .speculating_model import BLOCK_SIZE, write_looping_pair

SETTINGS = {"threads": 1, "device": "cpu", "max_model_len": 96, "max_num_seqs": 5}
PROMPTS = ["hello", [1], "a longer prompt, to have rows of several lengths", [200, 9, 30, 77], "zq"]
CASES = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "sampled": {"temperature": 0.8, "seed": 3, "n": 2},
    "penalties": {"temperature": 0.5, "seed": 1, "frequency_penalty": 0.7},
    "to the context's end": {"temperature": 0, "max_tokens": None},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("adaptive"))
    return str(model), str(drafter)


@pytest.fixture(scope="module")
def plain(paths):
    return LLM(paths[0], **SETTINGS)


@pytest.fixture(scope="module", params=["on", "off"])
def llm(paths, request):
    config = {"model": paths[1], "adaptive_length": True, "prompt_lookup_max": 0}
    return LLM(paths[0], speculative_config=config, graphs=request.param, **SETTINGS)


@pytest.fixture
def every_length_in_turn(monkeypatch):
    turns = itertools.cycle([5, 0, 3, 1, 2])
    monkeypatch.setattr(DraftLengthPolicy, "choose", lambda self, sequences: next(turns))


@pytest.mark.parametrize("case", CASES)
def test_lengths_change_no_token(llm, plain, every_length_in_turn, case):
    params = SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | CASES[case]))
    outputs = llm.generate(PROMPTS, params)
    assert [o.outputs for o in outputs] == [o.outputs for o in plain.generate(PROMPTS, params)]
    for output in outputs:
        metrics = output.metrics
        assert metrics.draft_tokens < BLOCK_SIZE * metrics.draft_rounds
        assert metrics.not_speculated[DOES_NOT_PAY] > 0
        assert metrics.acceptance_by_position == sorted(metrics.acceptance_by_position, reverse=True)
    counts = llm.graph_counts()
    assert counts["captures_since_startup"] == 0
    assert counts["eager"] == {}


def test_the_policy_learns_from_rounds(llm, plain):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for _ in range(3):
        (output,), (expected,) = llm.generate("hello", params), plain.generate("hello", params)
        assert output.outputs == expected.outputs
    policy = llm._loaded.engine.runner.speculation.length_policy
    tried = {length for number, length in policy._durations_s if number == 1}
    assert tried == set(policy.lengths) == {5, 3, 2, 1, 0}
    assert not policy._each
    assert policy._all.accepted[0] > 0


def test_settings(paths, capsys):
    with pytest.raises(ConfigError, match="adaptive_length needs draft_sample_method greedy"):
        LLM(paths[0], speculative_config={"adaptive_length": True, "draft_sample_method": "probabilistic"})
    config = json.dumps({"model": paths[1], "adaptive_length": True})
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--raw", "hello", "--model", paths[0], "--speculative-config", config, "--json"])
    assert exit_info.value.code == 0
    assert json.loads(capsys.readouterr().out)["graphs"]["captures_since_startup"] == 0
