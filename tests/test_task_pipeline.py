"""The task pipeline seen through `LLM`: the eager engine's tokens, whatever ends, joins, fails or gives way."""

import gc
import json
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import psutil
import pytest
import torch

from sparkgap import LLM, SamplingParams
from sparkgap.cli import main
from sparkgap.errors import ConfigError, EngineError, MissingBindingError
from sparkgap.rounds.pipeline import pipeline as pipeline_module
from sparkgap.rounds.pipeline.admission import Refusal

from .speculating_model import write_looping_pair

SETTINGS = {"threads": 1, "device": "cpu", "max_model_len": 96, "max_num_seqs": 4}
PROMPTS = ["hello", [1], "a longer prompt, to have rows of several lengths", [200, 9, 30, 77], "zq", [5, 6]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(autouse=True)
def waits_have_deadlines(monkeypatch):
    monkeypatch.setattr(pipeline_module, "DEADLINE_S", 60.0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("pipeline"))
    return str(model), str(drafter)


def make(paths, task_pipeline="on", number=None, **settings):
    config = None if number == 0 else {"model": paths[1], "num_speculative_tokens": number}
    return LLM(paths[0], task_pipeline=task_pipeline, speculative_config=config, **(SETTINGS | settings))


@pytest.fixture(scope="module")
def eager(paths):
    """No drafter, no graphs, no pipeline."""
    return make(paths, "off", 0, graphs="off")


@pytest.fixture(scope="module")
def llm(paths):
    return make(paths)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(llm):
    """Nothing is held once what was in flight is consumed."""
    engine = llm._engine
    if engine._pipelined is not None:
        engine._pipelined.reset()
    engine.scheduler.free_retired({})
    blocks = engine.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks
    assert not engine._owners


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_tokens_are_the_eager_engines(paths, eager, number):
    chained = make(paths, "on", number)
    host = make(paths, "off", number)
    for params in (
        GREEDY,
        SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
        SamplingParams(temperature=0),
    ):
        for prompts in (PROMPTS[:1], PROMPTS):
            ours, expected = chained.generate(prompts, params), eager.generate(prompts, params)
            assert [o.outputs for o in ours] == [o.outputs for o in expected]
            for a, b in zip(ours, host.generate(prompts, params), strict=True):
                assert a.metrics.acceptance_by_position == b.metrics.acceptance_by_position
                assert a.metrics.draft_rounds == b.metrics.draft_rounds
    counts = chained.graph_counts()
    assert counts["captures_since_startup"] == 0
    assert counts["eager"] == {}
    assert counts["replays"]["target"] > 20
    assert chained.info()["task_pipeline"]["refused_rounds"] == {}
    assert_idle(chained)


@pytest.mark.parametrize("number", [1, 4])
def test_drafts_are_looked_up_as_the_host_does(paths, eager, number):
    config = {"model": paths[1], "num_speculative_tokens": number, "prompt_lookup_max": 3}
    chained, host = (
        LLM(paths[0], task_pipeline=pipeline, speculative_config=config, **SETTINGS) for pipeline in ("on", "off")
    )
    sampled = SamplingParams(temperature=0.4, seed=7, max_tokens=60, ignore_eos=True)
    looped = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for params in (looped, sampled, SamplingParams(temperature=0)):
        for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[2:5]):
            ours, theirs = chained.generate(prompts, params), host.generate(prompts, params)
            expected = tokens(eager.generate(prompts, params))
            assert tokens(ours) == tokens(theirs) == expected
            for a, b in zip(ours, theirs, strict=True):
                assert a.metrics.acceptance_by_position == b.metrics.acceptance_by_position
                assert a.metrics.draft_rounds == b.metrics.draft_rounds
    assert chained.info()["task_pipeline"]["refused_rounds"] == {}
    for llm in (chained, host):
        replays = llm.graph_counts()["replays"]
        assert 0 < replays["draft"] < replays["target"]
    texts = chained._engine._pipelined.pipeline.texts
    assert_idle(chained)
    assert len(texts._free) == texts.count


SAMPLED = [
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=2**64 - 1, max_tokens=40, ignore_eos=True, top_k=9),
    SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True, top_p=0.8),
    SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, min_p=0.1, top_p=0.95, top_k=40),
    GREEDY,
    SamplingParams(temperature=0.5, seed=3, n=2, max_tokens=30),
]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_sampled_tokens_are_the_eager_engines(paths, number):
    """Whatever runs beside them, in any Slot."""
    chained, eager = make(paths, "on", number), make(paths, "off", 0, graphs="off")
    for params, prompts in ((SAMPLED, PROMPTS), (SAMPLED[::-1], PROMPTS), (SAMPLED[:1], PROMPTS[:1])):
        ours, expected = chained.generate(prompts, params), eager.generate(prompts, params)
        assert [o.outputs for o in ours] == [o.outputs for o in expected]
    assert chained.info()["task_pipeline"]["refused_rounds"] == {}
    assert_idle(chained)


def test_drafts_that_are_sampled_are_refused(paths):
    config = {"model": paths[1], "draft_sample_method": "probabilistic"}
    ours, expected = (
        LLM(paths[0], task_pipeline=value, speculative_config=config, **SETTINGS) for value in ("on", "off")
    )
    assert tokens(ours.generate(PROMPTS[:5], SAMPLED[:5])) == tokens(expected.generate(PROMPTS[:5], SAMPLED[:5]))
    assert set(ours.info()["task_pipeline"]["refused_rounds"]) == {Refusal.SAMPLED_DRAFTS}


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_other_dtypes(paths, dtype):
    ours, expected = make(paths, "on", dtype=dtype), make(paths, "off", 0, graphs="off", dtype=dtype)
    assert tokens(ours.generate(PROMPTS, GREEDY)) == tokens(expected.generate(PROMPTS, GREEDY))


def test_both_slots_run_and_the_host_is_one_round_late(paths):
    llm = make(paths)
    pipeline, seen = llm._engine._pipelined.pipeline, []
    submit = pipeline.submit

    def watched(sequences):
        submit(sequences)
        seen.append((pipeline.rounds[-1].slot, len(pipeline.rounds)))

    pipeline.submit = watched
    llm.generate("hello", GREEDY)
    slots, depths = zip(*seen, strict=True)
    assert slots == tuple(i % 2 for i in range(len(slots)))
    assert depths == (1,) + (2,) * (len(depths) - 1)


def test_a_full_pipeline_takes_nothing(paths):
    llm = make(paths)
    pipeline = llm._engine._pipelined.pipeline
    stream = llm.stream("hello", GREEDY)
    next(stream), next(stream)
    (sequence,) = pipeline.rounds[0].sequences
    while not pipeline.is_full:
        pipeline.submit([sequence])
    before = pipeline.rounds
    with pytest.raises(RuntimeError, match="consume one first"):
        pipeline.submit([sequence])
    assert pipeline.rounds == before
    pipeline.consume()
    with pytest.raises(ValueError, match="1 to 4 sequences"):
        pipeline.submit([])
    stream.close()


def test_stop_strings_tokens_and_eos_learnt_one_round_late(llm, eager):
    """A request that ends in the middle leaves no trace in those that take its blocks."""
    text = eager.generate("hello", GREEDY)[0].outputs[0]
    for cut in (3, 7, 12, 20):
        params = [
            SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[text.token_ids[cut]]),
            SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=text.text[cut : cut + 2]),
            SamplingParams(temperature=0, max_tokens=cut, ignore_eos=True),
        ]
        for one in params:
            ours, expected = llm.generate("hello", one), eager.generate("hello", one)
            assert ours[0].outputs == expected[0].outputs
            follow = ["zq", [200, 9, 30, 77]]
            assert tokens(llm.generate(follow, GREEDY)) == tokens(eager.generate(follow, GREEDY))
    assert_idle(llm)


def test_every_ending_beside_others(paths, eager):
    """Sequences end at different times, their blocks go to the next at once, and some are aborted in the middle."""
    llm = make(paths, block_size=4, kv_cache_memory_bytes=30_000)
    chance = random.Random(3)
    expected = {}
    for turn in range(6):
        params = [
            SamplingParams(temperature=0, max_tokens=chance.randrange(1, 50), ignore_eos=chance.random() < 0.7)
            for _ in PROMPTS
        ]
        ours = llm.generate(PROMPTS, params)
        for prompt, one, output in zip(PROMPTS, params, ours, strict=True):
            key = (str(prompt), one.max_tokens, one.ignore_eos)
            if key not in expected:
                expected[key] = eager.generate([prompt], one)[0].outputs
            assert output.outputs == expected[key]
        stream = llm.stream("hello", GREEDY)
        given = [token for _ in range(turn) for token in next(stream).outputs[0].token_ids]
        stream.close()
        assert given == tokens(eager.generate("hello", GREEDY))[0][: len(given)]
    assert_idle(llm)


def test_context_is_the_same_whatever_ran_before(paths):
    """KV of committed positions, target's and drafter's, equal those of rounds that the host carries, byte by byte."""
    ours, expected = make(paths, "on"), make(paths, "off")
    for llm in (ours, expected):
        with torch.inference_mode():
            for cache in (*llm._loaded.caches, *llm._loaded.passes.drafting.caches):
                cache.keys.zero_()
                cache.values.zero_()
        iterator = llm.stream("a longer prompt, to have rows of several lengths", GREEDY)
        for _ in range(4):
            next(iterator)
        llm.iterator = iterator
    (a,), (b,) = ([completion.sequence for _, completion in llm._engine._owners.values()] for llm in (ours, expected))
    ours._engine._pipelined.reset()
    known = min(a.num_computed_tokens, b.num_computed_tokens)
    assert known > 60
    assert a.output_token_ids == b.output_token_ids
    for left, right in zip(
        (*ours._loaded.caches, *ours._loaded.passes.drafting.caches),
        (*expected._loaded.caches, *expected._loaded.passes.drafting.caches),
        strict=True,
    ):
        for name in ("keys", "values"):
            x, y = (
                getattr(cache, name)[torch.tensor(s.block_table)].flatten(0, 1)[:known]
                for cache, s in ((left, a), (right, b))
            )
            assert torch.equal(x, y)


def test_the_drafters_capacity_is_crossed_as_on_the_host(paths, tmp_path):
    from .speculating_model import write_random_drafter

    drafter = write_random_drafter(tmp_path / "short", max_position_embeddings=40)
    outputs = {}
    for value in ("on", "off"):
        llm = LLM(paths[0], task_pipeline=value, speculative_config={"model": str(drafter)}, **SETTINGS)
        outputs[value] = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        if value == "on":
            assert set(llm.info()["task_pipeline"]["refused_rounds"]) == {Refusal.CONTEXT_TOO_LONG}
    for a, b in zip(outputs["on"], outputs["off"], strict=True):
        assert a.outputs == b.outputs
        assert a.metrics.not_speculated == b.metrics.not_speculated
        assert a.metrics.not_speculated
        assert a.metrics.acceptance_by_position == b.metrics.acceptance_by_position


def test_what_is_refused_runs_beside_what_is_not(llm, eager):
    params = [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=30, logprobs=1),
        SamplingParams(temperature=0, max_tokens=30, speculation=False),
        SamplingParams(temperature=0, max_tokens=30, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=30, logit_bias={3: 5.0}),
        SamplingParams(temperature=0, max_tokens=30, min_tokens=20),
    ]
    ours, expected = llm.generate(PROMPTS, params), eager.generate(PROMPTS, params)
    assert tokens(ours) == tokens(expected)
    assert {Refusal.LOGPROBS, Refusal.NOT_SPECULATED, Refusal.PENALTIES, Refusal.LOGIT_BIAS, Refusal.MIN_TOKENS} <= set(
        llm.info()["task_pipeline"]["refused_rounds"]
    )


def inject_prepare(pipeline, monkeypatch):
    slot, stage = pipeline.slots[1], pipeline.slots[1].stage

    def failing(*arguments):
        monkeypatch.undo()
        stage(*arguments)
        raise RuntimeError("injected")

    monkeypatch.setattr(slot, "stage", failing)


def inject_launch(pipeline, monkeypatch):
    def failing(program):
        monkeypatch.undo()
        raise RuntimeError("injected")

    monkeypatch.setattr(pipeline.stream, "launch", failing)


def inject_kernel(pipeline, monkeypatch):
    slot, stage = pipeline.slots[1], pipeline.slots[1].stage

    def breaking(*arguments):
        monkeypatch.undo()
        stage(*arguments)
        slot.block_tables[0].fill_(10**6)

    monkeypatch.setattr(slot, "stage", breaking)


def inject_copy(pipeline, monkeypatch):
    def failing(*arguments):
        monkeypatch.undo()
        raise RuntimeError("injected")

    monkeypatch.setattr(pipeline.slots[1], "read_results", failing)


def inject_consume(pipeline, monkeypatch):
    consume = pipeline.consume

    def failing():
        monkeypatch.undo()
        consume()
        raise RuntimeError("injected")

    monkeypatch.setattr(pipeline, "consume", failing)


def inject_launched(pipeline, monkeypatch):
    launch = pipeline.stream.launch

    def failing(program):
        monkeypatch.undo()
        launch(program)
        raise RuntimeError("injected")

    monkeypatch.setattr(pipeline.stream, "launch", failing)


INJECTIONS = {
    "prepare": (inject_prepare, "RuntimeError: injected"),
    "launch": (inject_launch, "RuntimeError: injected"),
    "launched": (inject_launched, "RuntimeError: injected"),
    "kernel": (inject_kernel, "RoundFailedError: .*outside the KV cache"),
    "copy": (inject_copy, "RuntimeError: injected"),
    "consume": (inject_consume, "RuntimeError: injected"),
}


@pytest.mark.parametrize("place", INJECTIONS)
@pytest.mark.parametrize("number", [1, 3])
def test_a_failure_ends_its_requests_and_the_next_are_right(paths, llm, eager, monkeypatch, place, number):
    inject, message = INJECTIONS[place]
    expected = tokens(eager.generate(PROMPTS, GREEDY))
    with monkeypatch.context() as patch:
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:number]]
        given = [next(stream).outputs[0].token_ids for stream in streams]
        inject(llm._engine._pipelined.pipeline, patch)
        errors = []
        for index, stream in enumerate(streams):
            try:
                for output in stream:
                    given[index] += output.outputs[0].token_ids
            except EngineError as error:
                errors.append(str(error))
            else:
                # It was not in the round that failed.
                assert given[index] == expected[index]
            assert given[index] == expected[index][: len(given[index])]
        assert errors
        assert all(re.search(message, error) for error in errors)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert_idle(llm)


def test_a_launch_that_nobody_owns_is_not_gone_on_from(paths, eager, monkeypatch):
    llm = make(paths)
    pipeline, stream = llm._engine._pipelined.pipeline, llm.stream(PROMPTS[0], GREEDY)
    given = []
    while not pipeline.rounds:
        given += next(stream).outputs[0].token_ids
    (in_flight,) = pipeline.rounds
    inject_launched(pipeline, monkeypatch)
    with pytest.raises(RuntimeError, match="injected"):
        pipeline.submit(in_flight.sequences)
    assert pipeline.rounds == ()
    assert not pipeline.in_flight
    for output in stream:
        given += output.outputs[0].token_ids
    assert given == list(eager.generate(PROMPTS[:1], GREEDY)[0].outputs[0].token_ids)
    assert_idle(llm)


@contextmanager
def broken(llm, weight):
    """NaN in a weight, while nothing runs."""
    stream = llm._engine._pipelined.pipeline.stream
    assert stream.reset(60.0)
    with torch.inference_mode():
        before = weight.clone()
        weight.fill_(torch.nan)
    yield
    assert stream.reset(60.0)
    with torch.inference_mode():
        weight.copy_(before)


def test_nan_in_the_logits_ends_the_request_and_the_next_is_right(paths, eager):
    llm = LLM(paths[0], speculative_config={"model": paths[1], "prompt_lookup_max": 0}, **SETTINGS)
    expected = tokens(eager.generate(PROMPTS, GREEDY))
    weights = {"model": llm._loaded.target.final_norm, "drafter": llm._loaded.speculation.drafter.weights.heads.w1}
    for name, weight in weights.items():
        for number in (1, 3):
            streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:number]]
            for stream in streams:
                next(stream)
            with broken(llm, weight):
                for stream in streams:
                    with pytest.raises(EngineError, match=f"{name} .* gave logits that are not finite"):
                        list(stream)
            assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert_idle(llm)


@pytest.mark.parametrize("scheduled", [False, True])
def test_what_is_looked_up_needs_no_drafter(tmp_path_factory, scheduled):
    """A broken one ends the requests that it drafts for, and no other."""
    paths = tuple(map(str, write_looping_pair(tmp_path_factory.mktemp("looked-up"), confidences=True)))
    config = {"model": paths[1], "prompt_lookup_max": 3, "prefix_scheduling": scheduled}
    llm = LLM(paths[0], speculative_config=config, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    expected = tokens(make(paths, "off", 0, graphs="off").generate(PROMPTS, params))
    looping = [llm.stream(prompt, params) for prompt in PROMPTS[:2]]
    given = [[], []]

    def take(number):
        for row, stream in zip(given, looping, strict=True):
            for output in islice(stream, number):
                row.extend(output.outputs[0].token_ids)

    while min(map(len, given)) < 40:
        take(1)
    drafts = llm.graph_counts()["replays"]["draft"]
    with broken(llm, llm._loaded.speculation.drafter.weights.heads.w1):
        take(3)
        assert llm.graph_counts()["replays"]["draft"] == drafts
        with pytest.raises(EngineError, match=r"drafter .* gave logits that are not finite"):
            list(llm.stream(PROMPTS[2], params))
        assert llm.graph_counts()["replays"]["draft"] > drafts
        take(None)
    assert [tuple(row) for row in given] == [tuple(row) for row in expected[:2]]
    assert tokens(llm.generate(PROMPTS, params)) == expected
    assert_idle(llm)


def test_an_interrupt_loses_nothing(llm, eager, monkeypatch):
    expected = tokens(eager.generate(PROMPTS, GREEDY))
    pipeline = llm._engine._pipelined.pipeline
    for place in ("submit", "consume"):
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
        given = [list(next(stream).outputs[0].token_ids) for stream in streams]
        original = getattr(pipeline, place)

        def interrupted(*arguments, original=original):
            monkeypatch.undo()
            original(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(pipeline, place, interrupted)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - which step it is does not matter
            while True:
                llm._engine.step()
        for index, request_id in enumerate(list(llm._outputs)):
            output = llm._outputs[request_id]
            while not output or not output[-1].finished:
                for made in llm._engine.step():
                    llm._outputs[made.request_id].append(made)
            given[index] += [token for part in output for token in part.outputs[0].token_ids]
            output.clear()
        del streams
        assert [row[: len(expected[0])] for row in given] == expected[:3]
    assert_idle(llm)


def test_a_binding_withheld_raises(paths):
    llm = make(paths)
    programs = llm._engine._pipelined.pipeline._programs[1]
    withheld = programs._programs.pop(1)
    with pytest.raises(MissingBindingError, match="bound to this Slot"):
        programs.of(1)
    with pytest.raises(EngineError, match="MissingBindingError"):
        llm.generate("hello", GREEDY)
    programs._programs[1] = withheld
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 40


def test_a_round_that_does_not_end_is_an_error(paths, monkeypatch):
    llm = make(paths)
    launch = llm._engine._pipelined.pipeline.stream.launch

    class Never:
        error = ""

        def wait(self, timeout_s):
            return False

    def hanging(program):
        monkeypatch.undo()
        launch(program)
        return Never()

    monkeypatch.setattr(llm._engine._pipelined.pipeline.stream, "launch", hanging)
    with pytest.raises(EngineError, match="a round has not ended after"):
        llm.generate("hello", GREEDY)
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 40


def test_on_refuses_with_the_reason_and_auto_says_so(paths):
    with pytest.raises(ConfigError, match="task_pipeline on is not possible: passes are not captured as graphs"):
        make(paths, "on", graphs="off")
    with pytest.raises(ConfigError, match="not captured"):
        make(paths, True, dtype="float16")
    info = make(paths, "auto", graphs="off").info()["task_pipeline"]
    assert info == {"active": False, "refused": ["passes are not captured as graphs"]}
    assert make(paths, "off").info()["task_pipeline"]["refused"] == ["task_pipeline is off"]
    info = make(paths, "auto").info()["task_pipeline"]
    assert info["active"]
    assert info["slots"] == 2
    assert info["memory_bytes"] > 0
    with pytest.raises(ConfigError, match="task_pipeline must be one of auto, on, off, got 'maybe'"):
        make(paths, "maybe")


def test_rounds_that_the_host_shapes_are_refused(paths):
    config = {"model": paths[1], "adaptive_length": True}
    with pytest.raises(ConfigError, match=str(Refusal.ADAPTIVE_LENGTH)):
        LLM(paths[0], task_pipeline="on", speculative_config=config, **SETTINGS)
    llm = LLM(paths[0], speculative_config=config, **SETTINGS)
    assert llm.info()["task_pipeline"] == {"active": False, "refused": [Refusal.ADAPTIVE_LENGTH]}


def test_command_line(paths, capsys, tmp_path):
    arguments = ["--model", paths[0], "--draft", paths[1], "--task-pipeline", "on", "--max-tokens", "9", "--json"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\nzq\nanother one\n")
    with pytest.raises(SystemExit) as exit_info:
        main(["check", *arguments, "--batch-size", "1", "--batch-size", "3", "--prompts", str(prompts), "--raw"])
    assert exit_info.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] is True
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "hi", *arguments, "--graphs", "off"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.startswith("sparkgap: error: task_pipeline on is not possible: passes are not")


def test_graphs_keep_what_they_are_bound_to(paths, eager):
    """Nobody else holds the tensors of Slots and state, caches and weights that only the device uses."""
    llm = make(paths)
    pipeline, expected = llm._engine._pipelined.pipeline, tokens(eager.generate(PROMPTS, GREEDY))
    borrowed = {
        name: value for slot in pipeline.slots for name, value in vars(slot).items() if isinstance(value, torch.Tensor)
    }
    assert {"anchors", "positions", "token_ids", "slots", "context_slots", "picks", "results"} <= set(borrowed)
    stream = llm.stream("hello", GREEDY)
    given = list(next(stream).outputs[0].token_ids)
    sizes = []
    for holder in (*pipeline.slots, pipeline.state):
        # Arrays of what the host stages and reads stay.
        for name in [name for name, value in vars(holder).items() if isinstance(value, torch.Tensor)]:
            sizes.append(getattr(holder, name).shape)
            delattr(holder, name)
    borrowed.clear()
    gc.collect()
    # Memory that was free again would be taken by these.
    filling = [torch.full(size, 2**30, dtype=dtype) for size in sizes for dtype in (torch.int64, torch.float32) * 4]
    for output in stream:
        given += output.outputs[0].token_ids
    assert given == expected[0]
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert all((tensor == 2**30).all() for tensor in filling)


def test_a_closed_pipeline_ends_its_requests(paths):
    llm = make(paths)
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    llm._engine._pipelined.close()
    for stream in streams:
        with pytest.raises(EngineError, match="the stream was stopped"):
            list(stream)
    with pytest.raises(EngineError, match="the stream was stopped"):
        llm.generate("hello", GREEDY)


ENDINGS = {
    "end": ("pass", 0),
    "no model": ("del llm", 0),
    "at once": ("os._exit(0)", 0),
    "exit": ("raise SystemExit(3)", 3),
    "error": ("1 / 0", 1),
    # Programs that run in the background are started with the signal ignored.
    "interrupt": (
        "signal.signal(signal.SIGINT, signal.default_int_handler); signal.raise_signal(signal.SIGINT)",
        -signal.SIGINT,
    ),
    "termination": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    # One that waits for rounds.
    "thread left behind": ("threading.Thread(target=list, args=(stream,), daemon=True).start(); time.sleep(0.02)", 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_with_rounds_in_flight(paths, ending):
    statement, status = ENDINGS[ending]
    code = f"""
import os, signal, sys, threading, time
sys.path[:0] = {sys.path!r}
from sparkgap import LLM, SamplingParams
llm = LLM({paths[0]!r}, speculative_config={{"model": {paths[1]!r}}}, task_pipeline="on", threads=2, max_model_len=96,
          max_num_seqs=2)
stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
next(stream), next(stream)
assert llm._engine._pipelined.pipeline.rounds
{statement}
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=180, capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stderr


class Crowd:
    """Requests that join, end and are aborted at random between any two steps, checked as they come.

    Args:
        llm: what answers.
        expected: tokens of each prompt.
        alone: draft rounds and accepted draft tokens of a request by itself.
    """

    def __init__(self, llm, expected, alone):
        self.engine = llm._engine
        self.expected = expected
        self.alone = alone
        self.chance = random.Random(1)
        self.requests = {}
        self.given = {}
        self.ends = Counter()
        self.accepted = self.drafted = 0

    def step(self):
        if len(self.requests) < 7 and self.chance.random() < 0.4:
            prompt, max_tokens = self.chance.choice(PROMPTS), self.chance.randrange(1, 41)
            name = self.engine.add_request(prompt, replace(GREEDY, max_tokens=max_tokens))
            self.requests[name], self.given[name] = (str(prompt), max_tokens), []
        if self.requests and self.chance.random() < 0.05:
            self.take(self.engine.abort(self.chance.choice(sorted(self.requests))))
        for output in self.engine.step():
            self.take(output)

    def take(self, output):
        name, (completion,) = output.request_id, output.outputs
        prompt, max_tokens = self.requests[name]
        self.given[name] += completion.token_ids
        assert output.error is None
        assert self.given[name] == self.expected[prompt][: len(self.given[name])]
        if not output.finished:
            return
        self.ends[completion.finish_reason] += 1
        metrics = output.metrics
        self.accepted += metrics.accepted_draft_tokens
        self.drafted += metrics.draft_tokens
        if completion.finish_reason == "length":
            assert len(self.given[name]) == max_tokens
            # Who gave way in the middle goes on with a token of a prompt pass.
            if not metrics.preemptions:
                assert (metrics.draft_rounds, metrics.accepted_draft_tokens) == self.alone[prompt, max_tokens]
        del self.requests[name], self.given[name]


@pytest.mark.slow
def test_ten_thousand_rounds(paths, eager):
    """Joins, leaves and aborts: memory stays flat, tokens right, and acceptance what it is at the start."""
    llm = make(paths, block_size=4, kv_cache_memory_bytes=60_000)
    expected = dict(zip(map(str, PROMPTS), tokens(eager.generate(PROMPTS, GREEDY)), strict=True))
    alone = {}
    for prompt in PROMPTS:
        for count in range(1, 41):
            metrics = llm.generate([prompt], replace(GREEDY, max_tokens=count))[0].metrics
            alone[str(prompt), count] = (metrics.draft_rounds, metrics.accepted_draft_tokens)
    crowd, process = Crowd(llm, expected, alone), psutil.Process()
    sizes, rates = [], []
    begun = llm.graph_counts()["replays"]["target"]
    for tenth in range(1, 11):
        accepted, drafted = crowd.accepted, crowd.drafted
        while llm.graph_counts()["replays"]["target"] < begun + tenth * 1_000:
            crowd.step()
        sizes.append(process.memory_info().rss)
        rates.append((crowd.accepted - accepted) / (crowd.drafted - drafted))
    assert min(crowd.ends["length"], 10 * crowd.ends["abort"]) > 500
    assert max(sizes[1:]) - sizes[0] < 8 << 20
    assert rates[-1] == pytest.approx(rates[0], abs=0.05)
    assert llm.graph_counts()["captures_since_startup"] == 0
    assert llm.info()["task_pipeline"]["refused_rounds"] == {}
    while crowd.requests:
        crowd.take(llm._engine.abort(next(iter(crowd.requests))))
    while llm._engine.has_rounds_in_flight():
        llm._engine.step()
    assert_idle(llm)
