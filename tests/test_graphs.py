"""Captured passes seen through `LLM`: the same output as without, and honest counts."""

import json
import logging

import pytest

from sparkgap import LLM, SamplingParams
from sparkgap.cli import main
from sparkgap.errors import ConfigError
from sparkgap.graphs.captured import CHUNK_ROWS, TOO_MANY_SEQUENCES, CapturedPasses
from sparkgap.graphs.counters import GraphCounters
from sparkgap.graphs.family import BUCKETS, row_buckets

from .speculating_model import write_looping_pair

SETTINGS = {"threads": 1, "device": "cpu", "max_model_len": 96, "task_pipeline": "off"}
PROMPTS = ["hello", [1], "a longer prompt, to have rows of several lengths", [200, 9, 30, 77], "zq"]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    "sampled": SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(temperature=0.5, seed=1, max_tokens=30, ignore_eos=True, frequency_penalty=0.7),
    "to the context's end": SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
    "not speculated": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation=False),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("graphs"))
    return str(model), str(drafter)


def make(paths, graphs, speculation="greedy", lookup=None, **settings):
    config = None
    if speculation is not None:
        config = {"model": paths[1], "draft_sample_method": speculation, "prompt_lookup_max": lookup}
    return LLM(paths[0], graphs=graphs, speculative_config=config, **(SETTINGS | settings))


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("speculation", [None, "greedy", "probabilistic"])
def test_graphs_change_no_token_and_no_logprob(paths, speculation, dtype):
    on, off = make(paths, True, speculation, dtype=dtype), make(paths, False, speculation, dtype=dtype)
    for params in PARAMS.values():
        ours, expected = on.generate(PROMPTS, params), off.generate(PROMPTS, params)
        assert [o.outputs for o in ours] == [o.outputs for o in expected]
        for a, b in zip(ours, expected, strict=True):
            assert a.metrics.accepted_draft_tokens == b.metrics.accepted_draft_tokens
    counts = on.graph_counts()
    assert counts["captures_since_startup"] == 0
    assert counts["eager"] == {}
    assert counts["replays"]["target"] > 50
    assert (counts["replays"]["draft"] > 30) == (speculation is not None)
    assert counts["replays"]["context"] == (0 if speculation is None else counts["replays"]["target"])
    assert off.graph_counts() == GraphCounters().report()


@pytest.mark.parametrize("context_graph", ["off", "compact", "masked"])
def test_context_graphs_change_no_token(paths, context_graph):
    ours, eager = make(paths, True, context_graph=context_graph), make(paths, False)
    for params in PARAMS.values():
        on, off = ours.generate(PROMPTS, params), eager.generate(PROMPTS, params)
        assert [o.outputs for o in on] == [o.outputs for o in off]
        for a, b in zip(on, off, strict=True):
            assert a.metrics.accepted_draft_tokens == b.metrics.accepted_draft_tokens
    counts = ours.graph_counts()
    assert counts["captures_since_startup"] == 0
    assert counts["eager"] == {}
    assert counts["replays"]["context"] == (0 if context_graph == "off" else counts["replays"]["target"])
    assert ours.info()["graphs"]["context_graph"] == context_graph


def test_compact_context_graphs(paths):
    """One for each number of rows, where masked ones are for each target graph."""
    compact, off = (
        make(paths, True, context_graph=mode, max_num_seqs=2).info()["graphs"] for mode in ("compact", "off")
    )
    assert compact["captures"] - off["captures"] == len(row_buckets(CHUNK_ROWS[-1], 6))
    assert make(paths, "auto").info()["graphs"]["context_graph"] == "masked"
    assert make(paths, "auto", speculation=None).info()["graphs"]["context_graph"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_graph": "yes"}, "context_graph must be one of auto, off, compact, masked, got 'yes'"),
        ({"context_graph": "compact", "graphs": "off"}, "context_graph compact contradicts graphs off"),
        ({"context_graph": "masked", "dtype": "float16"}, "context_graph masked needs captured passes"),
    ],
)
def test_context_graph_that_cannot_be(paths, settings, message):
    with pytest.raises(ConfigError, match=message):
        LLM(paths[0], **(SETTINGS | settings))


def test_every_decode_round_is_a_replay(paths):
    llm = make(paths, "auto", lookup=0)
    output = llm.generate("hello", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0]
    rounds = output.metrics.draft_rounds
    assert llm.graph_counts()["replays"] == {"target": rounds, "draft": rounds, "context": rounds}


def test_more_sequences_than_the_largest_graph(paths):
    largest = BUCKETS[-1]
    on = make(paths, "on", max_num_seqs=largest + 3)
    off = make(paths, "off", max_num_seqs=largest + 3)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[i + 1, i + 2] for i in range(largest + 3)]
    assert [o.outputs for o in on.generate(prompts, params)] == [o.outputs for o in off.generate(prompts, params)]
    eager = on.graph_counts()["eager"]
    assert set(eager) == {TOO_MANY_SEQUENCES}
    assert eager[TOO_MANY_SEQUENCES] > 0


def test_info_and_log(paths, caplog):
    with caplog.at_level(logging.INFO, "sparkgap"):
        llm = make(paths, True, max_num_seqs=3)
    graphs = llm.info()["graphs"]
    assert graphs["sequences"] == [1, 2, 3]
    # Verification and plain target passes, context updates of each, drafts; chunks of a prompt and their updates.
    assert 3 * 5 - 3 <= graphs["captures"] - 2 * len(CHUNK_ROWS) <= 3 * 5
    assert graphs["capture_ms"] > 0
    assert 0 < graphs["memory_bytes"] < 64 << 20
    assert f"captured {graphs['captures']} graphs in " in caplog.text
    assert make(paths, False).info()["graphs"] is None


def test_without_native_kernels_passes_are_eager(paths):
    llm = make(paths, "auto", dtype="float16")
    assert llm.info()["graphs"] is None
    assert not isinstance(llm._loaded.passes, CapturedPasses)


@pytest.mark.parametrize("value", ["on", "off"])
def test_json_report(paths, capsys, value):
    arguments = ["generate", "--raw", "hello", "--model", paths[0], "--draft", paths[1], "--max-tokens", "9", "--json"]
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, "--ignore-eos", "--graphs", value, "--task-pipeline", "off"])
    assert exit_info.value.code == 0
    report = json.loads(capsys.readouterr().out)
    graphs, rounds = report["graphs"], report["metrics"]["draft_rounds"]
    assert rounds > 0
    expected = rounds if value == "on" else 0
    assert graphs["replays"] == {"target": expected, "draft": expected, "context": expected}
    assert (graphs["captures_at_startup"] > 0) == (value == "on")
    assert graphs["captures_since_startup"] == 0
    assert graphs["eager"] == {}


def test_bad_value_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "hi", "--graphs", "maybe"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "sparkgap: error: graphs must be one of auto, on, off, got 'maybe'\n"
