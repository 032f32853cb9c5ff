"""The device chooses how many draft tokens a round verifies: when tokens come depends on it, and which never does."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from sparkgap import LLM, SamplingParams
from sparkgap.cli import main
from sparkgap.config import SpeculativeConfig
from sparkgap.errors import ConfigError, EngineError
from sparkgap.rounds.pipeline.admission import Refusal
from sparkgap.rounds.pipeline.scheduling import RoundCosts, scheduled_widths

from .joining import run_joining
from .speculating_model import BLOCK_SIZE, write_looping_pair, write_mtp

SETTINGS = {"threads": 1, "device": "cpu", "max_model_len": 96, "max_num_seqs": 4}
PROMPTS = ["hello", [1], "a longer prompt, to have rows of several lengths", [200, 9, 30, 77], "zq", [5, 6]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
LENGTHS = (1, 2, 3, BLOCK_SIZE)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("scheduling"), confidences=True)
    return str(model), str(drafter)


def make(paths, *, scheduled=True, number=None, lookup=0, **changes):
    config = {
        "model": paths[1],
        "num_speculative_tokens": number,
        "prefix_scheduling": scheduled,
        "prompt_lookup_max": lookup,
    }
    return LLM(paths[0], speculative_config=config, **(SETTINGS | changes))


@pytest.fixture(scope="module")
def llm(paths):
    return make(paths)


@pytest.fixture(scope="module")
def eager(paths):
    """No drafter, no graphs, no pipeline."""
    return LLM(paths[0], speculation=False, graphs="off", task_pipeline="off", **SETTINGS)


def costs_of(llm):
    return llm._engine._pipelined.pipeline.costs


def set_costs(llm, costs):
    """What rounds of every number of sequences are said to cost, wherever they are; while none runs."""
    assert llm._engine._pipelined.pipeline.stream.reset(60.0)
    costs_of(llm).growth.zero_()
    for bucket in costs_of(llm).as_dict():
        costs_of(llm).of(bucket).copy_(torch.tensor(costs, dtype=torch.float64))
        costs_of(llm).draft_of(bucket).zero_()


@pytest.mark.parametrize("choice", range(len(LENGTHS)))
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_each_length_gives_the_rounds_of_so_many_draft_tokens(paths, llm, eager, choice, params):
    set_costs(llm, [1.0 if place == choice else 1e9 for place in range(len(LENGTHS))])
    fixed = make(paths, scheduled=False, number=LENGTHS[choice])
    for prompts in (PROMPTS[:1], PROMPTS[:3], PROMPTS):
        ours, theirs = llm.generate(prompts, params), fixed.generate(prompts, params)
        assert [o.outputs for o in ours] == [o.outputs for o in eager.generate(prompts, params)]
        for a, b in zip(ours, theirs, strict=True):
            assert a.metrics.draft_tokens == a.metrics.draft_rounds * LENGTHS[choice]
            assert a.metrics.draft_rounds == b.metrics.draft_rounds
            assert a.metrics.acceptance_by_position == b.metrics.acceptance_by_position
    assert llm.graph_counts()["captures_since_startup"] == 0


@pytest.mark.parametrize("lookup", [0, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_changing_lengths_give_the_eager_engines_tokens(paths, eager, threads, lookup):
    """Lengths change from round to round, for one sequence and for several that join and leave."""
    llm, draw = make(paths, threads=threads, lookup=lookup), random.Random(2)
    mixed = [GREEDY, SAMPLED, SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)] * 2
    whole = [SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), replace(SAMPLED, logprobs=2), GREEDY]
    cases = ((PROMPTS[:1], [GREEDY]), (PROMPTS[:1], [SAMPLED]), (PROMPTS, mixed), (PROMPTS[:3], whole))
    for prompts, params in cases:
        expected = eager.generate(prompts, params)
        streams = [llm.stream(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
        tokens, lengths = [[] for _ in streams], set()
        running = dict(enumerate(streams))
        while running:
            set_costs(llm, [draw.random() + 1e-3 for _ in LENGTHS])
            for number in list(running):
                output = next(running[number], None)
                if output is None:
                    del running[number]
                    continue
                tokens[number] += output.outputs[0].token_ids
                lengths.add(llm._engine._pipelined.pipeline.slots[0].choice.item())
        assert [list(o.outputs[0].token_ids) for o in expected] == tokens
        assert len(lengths) > 1
    # Those of the request with log-probabilities.
    assert list(llm.info()["task_pipeline"]["refused_rounds"]) == [Refusal.LOGPROBS]


@pytest.mark.parametrize("lookup", [0, 3])
def test_requests_that_join_leave_and_are_aborted_have_their_tokens(paths, eager, lookup):
    """Blocks run out, too: sequences are recomputed, and go on with other lengths than they had."""
    llm, draw = make(paths, lookup=lookup, block_size=4, kv_cache_memory_bytes=60_000), random.Random(5)
    expected = {
        (number, params): eager.generate([prompt], params)[0].outputs[0].token_ids
        for number, prompt in enumerate(PROMPTS)
        for params in (GREEDY, SAMPLED)
    }

    def change_costs(turn):
        if turn % 7 == 0:
            set_costs(llm, [draw.random() + 1e-3 for _ in LENGTHS])

    ended = run_joining(llm, PROMPTS, expected, turns=1500, draw=draw, before_turn=change_costs)
    assert ended > 50
    assert llm.graph_counts()["captures_since_startup"] == 0


def test_confident_drafts_are_verified_and_others_are_not(paths):
    """With costs that rise by a little, the number of verified tokens follows the confidences."""
    llm = make(paths)
    set_costs(llm, [1.0, 1.25, 1.5, 2.0])
    heads = llm._loaded.speculation.drafter.weights.heads
    assert heads.confidence_bias is not None
    stream = llm._engine._pipelined.pipeline.stream
    drafted = {}
    for bias in (-20.0, 20.0):
        assert stream.reset(60.0)
        with torch.inference_mode():
            heads.confidence_bias.fill_(bias)
        metrics = llm.generate(PROMPTS[:1], GREEDY)[0].metrics
        drafted[bias] = metrics.draft_tokens / metrics.draft_rounds
    assert drafted == {-20.0: 1.0, 20.0: BLOCK_SIZE}


def test_a_drafter_that_gives_no_numbers_ends_the_request_and_the_next_is_right(paths, eager):
    llm = make(paths)
    w1, stream = llm._loaded.speculation.drafter.weights.heads.w1, llm._engine._pipelined.pipeline.stream
    outputs = llm.stream(PROMPTS[0], GREEDY)
    next(outputs)
    assert stream.reset(60.0)
    with torch.inference_mode():
        before = w1.clone()
        w1.fill_(torch.nan)
    with pytest.raises(EngineError, match=r"drafter .* gave logits that are not finite"):
        list(outputs)
    assert stream.reset(60.0)
    with torch.inference_mode():
        w1.copy_(before)
    assert llm.generate(PROMPTS, GREEDY)[0].outputs == eager.generate(PROMPTS, GREEDY)[0].outputs


def test_costs_are_measured_at_startup_and_write_no_kv(paths):
    llm = make(paths, max_num_seqs=3)
    scheduling = llm.info()["speculation"]["prefix_scheduling"]
    assert scheduling["verified_tokens"] == list(LENGTHS)
    assert sorted(scheduling["passes_ms"]) == [1, 2, 3]
    for costs in scheduling["passes_ms"].values():
        assert all(0 < before <= after for before, after in pairwise(costs))
    assert all(0 <= before <= after for before, after in pairwise(scheduling["ms_per_position"]))
    assert all(not cache.keys.any() and not cache.values.any() for cache in llm._loaded.caches)
    slot = llm._engine._pipelined.pipeline.slots[0]
    assert not slot.row_positions.any()
    assert (slot.slots == -1).all()


def test_passes_are_timed_where_no_others_tell(monkeypatch):
    timed = []
    monkeypatch.setattr("sparkgap.rounds.pipeline.scheduling._replay_ms", lambda graph: timed.append(graph) or graph)
    costs = RoundCosts((2, 4, 8), (1, 2))
    costs.measure(1, 1.0, [2.0, 3.0, 30.0])
    assert costs.of(1).tolist() == [2.0, 3.0, 30.0]
    assert costs.draft_of(1).item() == 1.0
    assert timed == [2.0, 3.0, 30.0, 2.0, 3.0, 30.0, 1.0, 1.0]
    timed.clear()
    # Of 4, 8 and 16 rows, those of 4 and 8 are known already.
    costs.measure(2, 1.5, [99.0, 99.0, 50.0])
    assert costs.of(2).tolist() == [3.0, 30.0, 50.0]
    assert costs.draft_of(2).item() == 1.5
    assert timed == [50.0, 50.0, 1.5, 1.5]
    assert costs.as_dict() == {1: [3.0, 4.0, 31.0], 2: [4.5, 31.5, 51.5]}
    # Of 6, 12 and 24 rows, 12 lies between the 8 and 16 that are.
    three = RoundCosts((2, 4, 8), (1, 3))
    three.measure(1, 0.0, [2.0, 4.0, 8.0])
    three.measure(3, 0.0, [6.0, 99.0, 24.0])
    assert three.of(3).tolist() == pytest.approx([6.0, 12.0, 24.0])
    assert three.measure_ms > 0


def test_a_disturbed_time_is_not_kept(monkeypatch):
    """Whichever pass was disturbed, once or all the time."""
    for disturbed in range(4):
        calls = []

        def replay_ms(graph, disturbed=disturbed, calls=calls):
            calls.append(graph)
            return graph + 50.0 * (graph == disturbed + 1.0 and calls.count(graph) == 1)

        monkeypatch.setattr("sparkgap.rounds.pipeline.scheduling._replay_ms", replay_ms)
        costs = RoundCosts((2, 3, 4, 6), (1,))
        costs.measure(1, 0.0, [1.0, 2.0, 3.0, 4.0])
        assert costs.of(1).tolist() == [1.0, 2.0, 3.0, 4.0]
    monkeypatch.setattr("sparkgap.rounds.pipeline.scheduling._replay_ms", lambda graph: graph)
    costs = RoundCosts((2, 3, 4, 6), (1,))
    costs.measure(1, 0.0, [9.0, 2.0, 12.0, 4.0])
    assert costs.of(1).tolist() == [2.0, 2.0, 4.0, 4.0]


def test_growth_is_measured_far_from_the_beginning(monkeypatch):
    position, moved = 0, []

    def move_to(wanted):
        nonlocal position
        position = wanted
        moved.append(wanted)

    monkeypatch.setattr("sparkgap.rounds.pipeline.scheduling._replay_ms", lambda graph: graph[0] + graph[1] * position)
    costs, passes = RoundCosts((2, 3, 6), (1,)), [(1.0, 0.01), (2.0, -0.5), (3.0, 0.03)]
    costs.measure(1, (0.5, 0.0), passes)
    costs.measure_growth(passes, move_to, 201)
    assert moved == [200]
    assert costs.growth.tolist() == pytest.approx([0.01, 0.015, 0.03])
    costs.measure_growth([(1.0, -0.1), (2.0, 0.0), (3.0, -0.2)], move_to, 10**6)
    assert moved == [200, 1023]
    assert costs.growth.tolist() == [0.0, 0.0, 0.0]


def test_long_contexts_verify_fewer(paths):
    llm = make(paths)
    set_costs(llm, [1.0, 1.0, 1.0, 1.0])
    costs_of(llm).growth.copy_(torch.tensor([0.0, 0.01, 0.02, 0.04], dtype=torch.float64))
    short, long = (llm.generate([list(range(1, n))], replace(GREEDY, max_tokens=6))[0].metrics for n in (3, 80))
    assert short.draft_tokens / short.draft_rounds > long.draft_tokens / long.draft_rounds


@pytest.mark.parametrize(("number", "widths"), [(1, (2,)), (2, (2, 3)), (5, (2, 3, 4, 6)), (16, (2, 3, 4, 6, 17))])
def test_widths_end_with_the_full_one(number, widths):
    assert scheduled_widths(number) == widths


def test_it_is_off_where_it_is_not_asked_for_and_the_model_is_small(paths):
    assert make(paths, scheduled=None).info()["speculation"]["prefix_scheduling"] is None
    assert make(paths, number=1).info()["speculation"]["prefix_scheduling"] is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prefix_scheduling": 1}, "prefix_scheduling must be True, False or None"),
        ({"prefix_scheduling": True, "adaptive_length": True}, "use one of them"),
    ],
)
def test_settings_that_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        SpeculativeConfig(**change)


def test_what_cannot_choose_is_refused(paths, tmp_path, capsys):
    with pytest.raises(ConfigError, match="needs the task pipeline, and task_pipeline is off"):
        make(paths, task_pipeline="off")
    with pytest.raises(ConfigError, match="needs the task pipeline, and passes are not captured"):
        make(paths, graphs="off")
    model, drafter = write_looping_pair(tmp_path)
    mtp = write_mtp(tmp_path / "mtp", model, "right")
    for without in (drafter, mtp):
        with pytest.raises(ConfigError, match="has no confidence head"):
            make((str(model), str(without)))
    config = json.dumps({"model": str(drafter), "prefix_scheduling": True})
    with pytest.raises(SystemExit) as ended:
        main(["generate", "hi", "--model", str(model), "--speculative-config", config])
    assert ended.value.code == 2
    assert "has no confidence head" in capsys.readouterr().err


@pytest.mark.model
def test_the_default_model_chooses(default_model_path):
    llm = LLM(str(default_model_path), threads=1, device="cpu", max_model_len=256)
    scheduling = llm.info()["speculation"]["prefix_scheduling"]
    assert scheduling["verified_tokens"] == [1, 2, 3, 5]
    assert sorted(scheduling["passes_ms"]) == [1, 2, 3]
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    metrics = llm.chat(question, SamplingParams(temperature=0, max_tokens=60))[0].metrics
    assert metrics.draft_rounds <= metrics.draft_tokens <= 5 * metrics.draft_rounds
    set_costs(llm, [1.0, 1e9, 1e9, 1e9])
    metrics = llm.chat(question, SamplingParams(temperature=0, max_tokens=60))[0].metrics
    assert metrics.draft_tokens == metrics.draft_rounds
