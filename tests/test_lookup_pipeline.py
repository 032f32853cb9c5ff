"""Method `ngram` in the task pipeline: the device looks up, and a round that finds nothing is a plain one."""

import random
from dataclasses import replace

import pytest
import torch

from sparkgap import LLM, SamplingParams
from sparkgap.errors import ConfigError
from sparkgap.rounds.draft_length import DOES_NOT_PAY
from sparkgap.rounds.lookup import NOT_FOUND

from .joining import run_joining
from .speculating_model import write_looping_pair

SETTINGS = {"threads": 1, "device": "cpu", "max_model_len": 96, "max_num_seqs": 4}
PROMPTS = ["hello", [1], "a longer prompt, to have rows of several lengths", [200, 9, 30, 77], "zq", [5, 6]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LOOPED = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_looping_pair(tmp_path_factory.mktemp("lookup"))[0])


def make(path, number=4, scheduled=None, **changes):
    config = {
        "method": "ngram",
        "num_speculative_tokens": number,
        "prompt_lookup_min": 1,
        "prefix_scheduling": scheduled,
    }
    return LLM(path, speculative_config=config, **(SETTINGS | changes))


@pytest.fixture(scope="module")
def eager(path):
    """No speculation, no graphs, no pipeline."""
    return LLM(path, speculation=False, graphs="off", task_pipeline="off", **SETTINGS)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def pipeline_of(llm):
    return llm._engine._pipelined.pipeline


@pytest.mark.parametrize("number", [1, 4, 7])
def test_rounds_of_one_sequence_are_those_of_the_host(path, eager, number):
    chained, host = make(path, number, task_pipeline="on"), make(path, number, task_pipeline="off")
    for params in (LOOPED, SAMPLED, SamplingParams(temperature=0)):
        for prompt in PROMPTS:
            (ours,), (theirs,) = chained.generate([prompt], params), host.generate([prompt], params)
            assert ours.outputs == theirs.outputs == eager.generate([prompt], params)[0].outputs
            assert ours.metrics.draft_rounds == theirs.metrics.draft_rounds
            assert ours.metrics.draft_tokens == theirs.metrics.draft_tokens
            assert ours.metrics.acceptance_by_position == theirs.metrics.acceptance_by_position
            assert ours.metrics.not_speculated == theirs.metrics.not_speculated
    assert chained.info()["task_pipeline"]["refused_rounds"] == {}
    counts = chained.graph_counts()
    assert counts["replays"]["draft"] == 0
    assert counts["captures_since_startup"] == 0


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_several_sequences_have_the_eager_engines_tokens(path, eager, threads, scheduled):
    """Some of them find drafts, and others verify beside them what is none."""
    llm = make(path, scheduled=scheduled, threads=threads)
    mixed = [LOOPED, SAMPLED, GREEDY, replace(SAMPLED, seed=9, top_k=5), SamplingParams(temperature=0), LOOPED]
    for prompts, params in ((PROMPTS, mixed), (PROMPTS[:3], mixed[:3]), (PROMPTS, [LOOPED] * 6)):
        ours = llm.generate(prompts, params)
        assert tokens(ours) == tokens(eager.generate(prompts, params))
        for output in ours:
            m = output.metrics
            assert set(m.not_speculated) <= {NOT_FOUND, DOES_NOT_PAY}
            made = m.accepted_draft_tokens + m.draft_rounds + sum(m.not_speculated.values()) + 1
            assert made - 4 <= m.completion_tokens <= made
    assert llm.graph_counts()["captures_since_startup"] == 0
    texts = pipeline_of(llm).texts
    llm._engine._pipelined.reset()
    assert len(texts._free) == texts.count


def test_what_does_not_pay_is_not_verified(path, eager):
    llm = make(path, scheduled=True)
    costs = pipeline_of(llm).costs
    assert costs.lengths.tolist() == [0, 1, 2, 3, 4]
    assert costs.measure_ms > 0
    lengths = set()
    for cheapest in range(5):
        assert pipeline_of(llm).stream.reset(60.0)
        costs.growth.zero_()
        for bucket in costs.buckets:
            costs.of(bucket).copy_(torch.tensor([1.0 if n == cheapest else 1e9 for n in range(5)]))
        (output,) = llm.generate(["hello"], LOOPED)
        assert output.outputs == eager.generate(["hello"], LOOPED)[0].outputs
        metrics = output.metrics
        if cheapest == 0:
            assert metrics.draft_rounds == 0
            assert set(metrics.not_speculated) == {NOT_FOUND, DOES_NOT_PAY}
        else:
            assert metrics.draft_tokens == cheapest * metrics.draft_rounds > 0
        lengths.add(metrics.draft_tokens)
    assert len(lengths) == 5


def test_requests_that_join_leave_and_are_aborted_have_their_tokens(path, eager):
    llm, draw = make(path, block_size=4, kv_cache_memory_bytes=60_000), random.Random(7)
    expected = {
        (number, params): eager.generate([prompt], params)[0].outputs[0].token_ids
        for number, prompt in enumerate(PROMPTS)
        for params in (GREEDY, SAMPLED)
    }
    ended = run_joining(llm, PROMPTS, expected, turns=1000, draw=draw)
    assert ended > 30


def test_a_request_may_switch_it_off(path, eager):
    llm = make(path)
    off = replace(LOOPED, speculation=False)
    outputs = llm.generate(PROMPTS[:3], [off, LOOPED, off])
    assert tokens(outputs) == tokens(eager.generate(PROMPTS[:3], LOOPED))
    assert [output.metrics.draft_rounds > 0 for output in outputs] == [False, True, False]


def test_what_the_device_goes_by_is_told(path):
    assert make(path).info()["speculation"]["prefix_scheduling"] is None  # a small model
    llm = make(path, scheduled=True, max_num_seqs=12)
    told = llm.info()["speculation"]["prefix_scheduling"]
    assert told["verified_tokens"] == [0, 1, 2, 3, 4]
    assert list(told["passes_ms"]) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert pipeline_of(llm).costs.timed_buckets == [1, 2, 4, 8, 12]
    for costs in told["passes_ms"].values():
        assert all(cost > 0 for cost in costs)
        assert costs == sorted(costs)
    with pytest.raises(ConfigError, match="needs the task pipeline, and task_pipeline is off"):
        make(path, scheduled=True, task_pipeline="off")
