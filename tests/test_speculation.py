"""Speculation seen through `LLM`: the same output as without it, honest counts, and clear errors."""

import json
import shutil

import pytest

from sparkgap import LLM, SamplingParams
from sparkgap.cli import main
from sparkgap.engine import loading
from sparkgap.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedModelError
from sparkgap.rounds.lookup import NOT_FOUND
from sparkgap.rounds.speculative import CONTEXT_TOO_LONG
from sparkgap.rounds.verifying import SWITCHED_OFF

from .speculating_model import write_looping_pair, write_random_drafter

PROMPTS = ["hello", [1], "a longer prompt, to have rows of several lengths", [200, 9, 30, 77], "zq"]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SETTINGS = {"dtype": "float32", "threads": 1, "device": "cpu"}
CASES = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.7, "seed": 11},
    "truncated": {"temperature": 1.2, "seed": 4, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "sampled penalties": {"temperature": 0.6, "seed": 2, "frequency_penalty": 0.5},
    "logit bias": {"temperature": 0.5, "seed": 8, "logit_bias": {44: 4.0, 205: -100.0}},
    "several": {"temperature": 0.9, "seed": 3, "n": 3},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("speculation")
    model, drafter = write_looping_pair(directory)
    random, other = directory / "random", directory / "other"
    write_random_drafter(random)
    write_random_drafter(other, target_hidden_size=48)
    return {"model": str(model), "right": str(drafter), "random": str(random), "other": str(other)}


def make(paths, drafter=None, number=None, **settings):
    if drafter == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_min": 1}
    elif drafter == "looking up":
        config = {"model": paths["random"], "num_speculative_tokens": number, "prompt_lookup_max": 3}
    else:
        config = None if drafter is None else {"model": paths.get(drafter, drafter), "num_speculative_tokens": number}
    return LLM(paths["model"], speculative_config=config, **(SETTINGS | settings))


@pytest.fixture(scope="module")
def plain(paths):
    return make(paths)


KINDS = [("right", None), ("random", 3), ("right", 1), ("ngram", None), ("ngram", 2), ("looking up", 4)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda p: f"{p[0]}-{p[1]}")
def llm(paths, request):
    return make(paths, *request.param)


@pytest.fixture(scope="module")
def right(paths):
    return make(paths, "right")


def completions(llm, prompts, params):
    return [output.outputs for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_without_speculation(llm, plain, case):
    params = SamplingParams(max_tokens=30, ignore_eos=True, **CASES[case])
    expected = completions(plain, PROMPTS, params)
    assert completions(llm, PROMPTS, params) == expected
    assert [completions(llm, [prompt], params)[0] for prompt in PROMPTS] == expected


def test_the_pair_accepts_several_tokens_a_round(right):
    metrics = [output.metrics for output in right.generate(PROMPTS, GREEDY)]
    assert sum(m.accepted_draft_tokens for m in metrics) > 2 * sum(m.draft_rounds for m in metrics)


@pytest.mark.parametrize("kind", ["ngram", "looking up"])
def test_what_stood_before_is_accepted(paths, kind):
    llm = make(paths, kind, 4)
    metrics = [output.metrics for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=100))]
    assert sum(m.accepted_draft_tokens for m in metrics) > 50
    assert llm.info()["speculation"]["num_speculative_tokens"] == 4
    assert llm.graph_counts()["captures_since_startup"] == 0


def test_requests_of_all_kinds_in_one_batch(right, plain):
    params = [SamplingParams(max_tokens=25, **CASES[case]) for case in CASES]
    prompts = ["hello"] * len(params)
    assert completions(right, prompts, params) == completions(plain, prompts, params)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_max_tokens_inside_a_block(right, plain, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = completions(right, PROMPTS, params)
    assert outputs == completions(plain, PROMPTS, params)
    assert {len(o.token_ids) for (o,) in outputs} == {max_tokens}


@pytest.mark.parametrize("index", range(12))
def test_ends_inside_a_block(right, plain, index):
    """A stop token, a stop string and a long minimum, at each place of the answer in turn."""
    (whole,) = completions(plain, ["hello"], GREEDY)[0]
    token = whole.token_ids[index]
    text = whole.text[: len(plain.tokenizer.decode(whole.token_ids[: index + 1]))][-2:]
    for changes in (
        {"stop_token_ids": [token]},
        {"stop_token_ids": [token], "min_tokens": index + 2},
        {"stop": text},
        {"stop": text, "include_stop_str_in_output": True},
        {"stop": [text, "never"], "min_tokens": index + 3},
    ):
        params = SamplingParams(temperature=0, max_tokens=30, **changes)
        assert completions(right, ["hello"], params) == completions(plain, ["hello"], params)
    stopped = completions(right, ["hello"], SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[token]))
    assert stopped[0][0].finish_reason == "stop"
    assert stopped[0][0].token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


@pytest.mark.parametrize("index", [3, 8, 9, 10, 11])
def test_end_of_sequence_inside_a_block(paths, plain, tmp_path, index):
    """The model's end token is one that the drafter drafts."""
    (whole,) = completions(plain, ["hello"], GREEDY)[0]
    model = shutil.copytree(paths["model"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": whole.token_ids[index]}))
    params = SamplingParams(temperature=0, max_tokens=30)
    llm = make({**paths, "model": str(model)}, "right")
    (output,) = llm.generate("hello", params)
    assert output.outputs == completions(make({"model": str(model)}), ["hello"], params)[0]
    (completion,) = output.outputs
    assert completion.finish_reason == "stop"
    assert completion.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[index]) + 1]
    assert completion.text == plain.tokenizer.decode(completion.token_ids[:-1])
    later = SamplingParams(temperature=0, max_tokens=30, min_tokens=len(completion.token_ids) + 2)
    assert completions(llm, ["hello"], later) == completions(make({"model": str(model)}), ["hello"], later)


def test_logprobs(llm, plain):
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=25, ignore_eos=True, logprobs=4)
    for (ours,), (theirs,) in zip(completions(llm, PROMPTS, params), completions(plain, PROMPTS, params), strict=True):
        assert ours.token_ids == theirs.token_ids
        for left, right in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert {i: entry.rank for i, entry in left.items()} == {i: entry.rank for i, entry in right.items()}
            assert {i: entry.decoded_token for i, entry in left.items()} == {
                i: entry.decoded_token for i, entry in right.items()
            }
            for token_id, entry in left.items():
                assert entry.logprob == pytest.approx(right[token_id].logprob, abs=1e-4)
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_preemption(paths, plain, temperature):
    params = SamplingParams(temperature=temperature, seed=6, max_tokens=70, ignore_eos=True)
    expected = completions(plain, PROMPTS, params)
    # One sequence of the longest length, and little more.
    block_bytes = (2 * 2 * 2 * 8 + 2 * 2 * 2 * 8) * 4 * 4
    crowded = make(paths, "right", block_size=4, kv_cache_memory_bytes=34 * block_bytes)
    outputs = crowded.generate(PROMPTS, params)
    assert [o.outputs for o in outputs] == expected
    assert sum(o.metrics.preemptions for o in outputs) > 0
    assert sum(o.metrics.accepted_draft_tokens for o in outputs) > 0


def test_streams_add_up(right):
    for params in (GREEDY, SamplingParams(temperature=0.6, seed=1, max_tokens=30, logprobs=1, stop="never", n=2)):
        (whole,) = right.generate("hello", params)
        outputs = list(right.stream("hello", params))
        assert max(len(piece.token_ids) for output in outputs for piece in output.outputs) > 1
        for completion in whole.outputs:
            pieces = [p for output in outputs for p in output.outputs if p.index == completion.index]
            assert "".join(piece.text for piece in pieces) == completion.text
            assert [t for piece in pieces for t in piece.token_ids] == completion.token_ids
        assert outputs[-1].metrics.accepted_draft_tokens == whole.metrics.accepted_draft_tokens


def test_counts_agree_with_each_other(llm, plain):
    looks_up_alone = llm.info()["speculation"]["method"] == "ngram"
    number = llm.info()["speculation"]["num_speculative_tokens"]
    for params in (GREEDY, SamplingParams(n=2, seed=1, max_tokens=30)):
        for output in llm.generate(PROMPTS, params):
            m = output.metrics
            assert m.draft_rounds > 0
            assert m.draft_tokens == m.draft_rounds * number
            assert m.acceptance_rate == pytest.approx(m.accepted_draft_tokens / m.draft_tokens)
            assert m.accepted_per_round == pytest.approx(m.accepted_draft_tokens / m.draft_rounds)
            shares = m.acceptance_by_position
            assert len(shares) == number
            assert shares == sorted(shares, reverse=True)
            assert sum(shares) * m.draft_rounds == pytest.approx(m.accepted_draft_tokens)
            plain_rounds = sum(m.not_speculated.values())
            made = m.accepted_draft_tokens + m.draft_rounds + plain_rounds + params.n
            assert made - params.n * number <= m.completion_tokens <= made
            assert set(m.not_speculated) <= ({NOT_FOUND} if looks_up_alone else set())
    metrics = plain.generate("hello", GREEDY)[0].metrics
    assert (metrics.draft_rounds, metrics.draft_tokens, metrics.acceptance_by_position) == (0, 0, [])


def test_a_request_may_switch_it_off(right, plain):
    expected = completions(plain, PROMPTS, GREEDY)
    off = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculation=False)
    outputs = right.generate(PROMPTS, [off, GREEDY, off, GREEDY, GREEDY])
    assert [o.outputs for o in outputs] == expected
    for output, switched_off in zip(outputs, [True, False, True, False, False], strict=True):
        assert (output.metrics.draft_rounds == 0) == switched_off
        assert output.metrics.not_speculated == ({SWITCHED_OFF: 29} if switched_off else {})


def test_switched_off_is_plain_decoding_to_the_bit(right, plain):
    off = SamplingParams(temperature=0.8, seed=9, max_tokens=30, ignore_eos=True, speculation=False, logprobs=5)
    assert completions(right, PROMPTS, off) == completions(plain, PROMPTS, off)


def test_prompts_beyond_the_drafters_capacity(paths, plain, tmp_path, capsys):
    short = str(write_random_drafter(tmp_path / "short", max_position_embeddings=40))
    llm = make(paths, short)
    capacity = llm.info()["speculation"]["max_context_length"]
    assert 20 < capacity < 60
    prompts = ["x" * 60, "x" * 20, "x" * capacity]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs for o in outputs] == completions(plain, prompts, GREEDY)
    assert outputs[0].metrics.not_speculated == {CONTEXT_TOO_LONG: 29}
    assert outputs[0].metrics.draft_rounds == 0
    assert outputs[1].metrics.draft_rounds > 0
    assert outputs[1].metrics.not_speculated[CONTEXT_TOO_LONG] > 0
    assert outputs[2].metrics.draft_rounds == 1
    arguments = ["generate", "--raw", "x" * 60, "--model", paths["model"], "--draft", short, "--max-tokens", "8"]
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, "--ignore-eos", "--dtype", "float32", "--json"])
    assert exit_info.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metrics"]["not_speculated"] == {CONTEXT_TOO_LONG: 7}
    assert report["graphs"]["eager"] == {CONTEXT_TOO_LONG: 7}
    assert report["metrics"]["draft_rounds"] == 0


ERRORS = [
    ({"num_speculative_tokens": 9}, ConfigError, ["from 1 to 5", "got 9"]),
    ({"num_speculative_tokens": 0}, ConfigError, ["num_speculative_tokens", "got 0"]),
    ({"method": "eagle3"}, ConfigError, ["dspark, dflash", "'eagle3'"]),
    ({"method": "DFlash"}, ConfigError, ["method is dflash", "is dspark"]),
    ({"method": "ngram"}, ConfigError, ["ngram needs no drafter"]),
    ({"prompt_lookup_max": 1}, ConfigError, ["prompt_lookup_max", "at least prompt_lookup_min (2)", "got 1"]),
    ({"prompt_lookup_min": 0}, ConfigError, ["prompt_lookup_min", "got 0"]),
    (
        {"prompt_lookup_max": 3, "draft_sample_method": "probabilistic"},
        ConfigError,
        ["needs draft_sample_method greedy"],
    ),
    ({"model": None, "method": "ngram", "prompt_lookup_max": 0}, ConfigError, ["at least 1"]),
    ({"model": None, "method": "ngram", "adaptive_length": True}, ConfigError, ["adaptive_length needs a drafter"]),
    ({"drafts": 3}, ConfigError, ["'drafts'", "num_speculative_tokens"]),
    ({"draft_sample_method": "best"}, ConfigError, ["draft_sample_method", "'best'"]),
    ({"model": None}, ConfigError, ["needs a drafter", "--draft"]),
    ({"model": "./no/such/drafter"}, ModelNotFoundError, ["no/such/drafter"]),
    ({"model": "nope"}, ModelNotFoundError, ["no drafter directory nope", "hf:owner/name"]),
    ({"model": "OTHER"}, CheckpointError, ["reads hidden states of size 48", "the target's have 32"]),
    ({"model": "TARGET"}, (CheckpointError, UnsupportedModelError), ["drafter"]),
]


@pytest.mark.parametrize(("changes", "kind", "parts"), ERRORS, ids=[str(changes) for changes, *_ in ERRORS])
def test_errors(paths, capsys, monkeypatch, changes, kind, parts):
    """In one line, and before the target's weights are read."""
    monkeypatch.setattr(loading, "build_target", lambda *_, **__: pytest.fail("the target was read"))
    config = {"model": paths["random"]} | changes
    if config["model"] == "TARGET":
        config["model"] = paths["model"]
    if config["model"] == "OTHER":
        config["model"] = paths["other"]
    with pytest.raises(kind) as raised:
        LLM(paths["model"], speculative_config=config, **SETTINGS)
    for command in (["generate", "hi"], ["check"], ["bench", "acceptance"]):
        with pytest.raises(SystemExit) as exit_info:
            main([*command, "--model", paths["model"], "--speculative-config", json.dumps(config)])
        assert exit_info.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        for part in parts:
            assert part in str(raised.value)
            assert part in captured.err


def test_method_names_in_any_case(paths):
    assert (
        LLM(paths["model"], speculative_config={"model": paths["right"], "method": "DSpark"}, **SETTINGS).info()[
            "speculation"
        ]["method"]
        == "dspark"
    )
