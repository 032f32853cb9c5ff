"""MTP drafters seen through `LLM`: plain decoding's tokens in every mode, whatever is drafted."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparkgap import LLM, SamplingParams
from sparkgap.errors import CheckpointError, ConfigError, EngineError, UnsupportedModelError
from sparkgap.models.drafter_config import DrafterConfig
from sparkgap.rounds.speculative import CONTEXT_TOO_LONG

from .speculating_model import mtp_settings, write_looping_pair, write_mtp

SETTINGS = {"threads": 1, "device": "cpu", "max_model_len": 96, "max_num_seqs": 4}
PROMPTS = ["hello", [1], "a longer prompt, to have rows of several lengths", [200, 9, 30, 77], "zq", [5, 6]]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0.8, seed=3, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=2**64 - 1, max_tokens=25, ignore_eos=True, top_k=9),
    SamplingParams(temperature=0.7, seed=5, max_tokens=25, ignore_eos=True, top_p=0.8),
    GREEDY,
    SamplingParams(temperature=0.5, seed=3, n=2, max_tokens=30),
    SamplingParams(temperature=0.6, seed=2, max_tokens=25, frequency_penalty=0.5, logprobs=2),
]
MODES = {
    "eager": {"graphs": "off"},
    "masked": {"task_pipeline": "off", "context_graph": "masked"},
    "compact": {"task_pipeline": "off", "context_graph": "compact"},
    "context off": {"task_pipeline": "off", "context_graph": "off"},
    "pipeline": {"task_pipeline": "on"},
}
DRAFTERS = [("right", 3), ("wrong", 5), ("random", 1), ("right", 5)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mtp")
    model, _ = write_looping_pair(directory)
    kinds = {kind: str(write_mtp(directory / kind, model, kind)) for kind in ("right", "wrong", "random")}
    return {"model": str(model), "directory": directory} | kinds


def make(paths, drafter, number=None, **settings):
    speculation = settings.pop("speculation", {})
    config = None
    if drafter is not None:
        config = {"model": paths[drafter], "num_speculative_tokens": number, "prompt_lookup_max": 0} | speculation
    return LLM(paths["model"], speculative_config=config, **(SETTINGS | settings))


@pytest.fixture(scope="module")
def plain(paths):
    """No drafter, no graphs, no pipeline."""
    return make(paths, None, graphs="off")


@pytest.fixture(scope="module")
def expected(plain):
    params = (GREEDY, SAMPLED, SamplingParams(temperature=0))
    return [(p, plain.generate(PROMPTS, p)) for p in params]


def outputs(results):
    return [result.outputs for result in results]


def acceptance(results):
    return [(r.metrics.draft_rounds, r.metrics.acceptance_by_position) for r in results]


@pytest.mark.parametrize(("drafter", "number"), DRAFTERS)
def test_tokens_are_those_without_speculation_in_every_mode(paths, expected, drafter, number):
    """And every mode accepts the same drafts in the same rounds, so contexts are the same, too."""
    found = {}
    for mode, settings in MODES.items():
        llm = make(paths, drafter, number, **settings)
        results = [llm.generate(PROMPTS, params) for params, _ in expected]
        for ours, (_, theirs) in zip(results, expected, strict=True):
            assert outputs(ours) == outputs(theirs)
        assert outputs(llm.generate(PROMPTS[2:3], GREEDY)) == outputs(expected[0][1][2:3])
        found[mode] = [acceptance(r) for r in results]
        counts = llm.graph_counts()
        assert counts["captures_since_startup"] == 0
        assert counts["eager"] == {}
        if mode == "pipeline":
            assert counts["replays"]["draft"] > 20
    assert all(rounds == found["eager"] for rounds in found.values())
    metrics = [r.metrics for r in results[0]]
    accepted, rounds = sum(m.accepted_draft_tokens for m in metrics), sum(m.draft_rounds for m in metrics)
    if drafter == "right":
        assert accepted > 0.6 * number * rounds
    if drafter == "wrong":
        assert accepted == 0


def test_lookup_beside_it(paths, expected):
    speculation = {"prompt_lookup_max": 3}
    for settings in (MODES["pipeline"], MODES["masked"]):
        llm = make(paths, "random", 3, speculation=speculation, **settings)
        for params, theirs in expected[:2]:
            assert outputs(llm.generate(PROMPTS, params)) == outputs(theirs)


def test_adaptive_lengths(paths, expected):
    llm = make(paths, "right", 5, speculation={"adaptive_length": True})
    for params, theirs in expected[:2]:
        assert outputs(llm.generate(PROMPTS, params)) == outputs(theirs)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_sampled_drafts(paths, expected, graphs):
    """Greedy requests keep their tokens; a sampled one with a truncation to one token, too."""
    llm = make(paths, "right", 3, graphs=graphs, speculation={"draft_sample_method": "probabilistic"})
    assert outputs(llm.generate(PROMPTS, GREEDY)) == outputs(expected[0][1])
    one = SamplingParams(temperature=0.9, top_k=1, seed=4, max_tokens=30, ignore_eos=True)
    found = llm.generate(PROMPTS, one)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected[0][1]]
    sampled = llm.generate(PROMPTS, SAMPLED[:1] * len(PROMPTS))
    assert sum(o.metrics.accepted_draft_tokens for o in sampled) > 0


@pytest.mark.parametrize("mode", ["pipeline", "eager"])
def test_a_prefix_that_is_found_changes_no_bit(paths, mode):
    """Also where a prompt goes on differently right behind a block: its last entry knows the token after it."""
    settings = {"block_size": 4, **MODES[mode]}
    on = make(paths, "right", 3, **settings)
    off = make(paths, "right", 3, enable_prefix_caching=False, **settings)
    shared = list(range(40, 71))
    prompts = [shared, [*shared, 9, 8, 7], shared[:17], [*shared[:20], *range(100, 120)], [*shared[:16], 9, 9], shared]
    for prompt in prompts:
        (ours,), (theirs,) = on.generate([prompt], GREEDY), off.generate([prompt], GREEDY)
        assert ours.outputs == theirs.outputs
        assert acceptance([ours]) == acceptance([theirs])
    assert ours.num_cached_tokens == 28


def test_the_key_of_a_block_covers_the_token_behind_it(paths):
    llm = make(paths, "right", 3, block_size=4)
    first, other = [*range(40, 48), 1, 2], [*range(40, 48), 3, 4]
    cached = [llm.generate([prompt], GREEDY)[0].num_cached_tokens for prompt in (first, other, first, other)]
    assert cached == [0, 4, 8, 8]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_preemption_joins_and_leaves(paths, plain, temperature):
    params = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=12 + 5 * index, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    expected = outputs(plain.generate(PROMPTS, params))
    for mode in ("pipeline", "masked"):
        blocks = 26 * 4 * (2 * 2 * 2 * 8 + 2 * 2 * 8 + 2 * 16) * 2
        crowded = make(paths, "right", 3, block_size=4, kv_cache_memory_bytes=blocks, **MODES[mode])
        assert outputs(crowded.generate(PROMPTS, params)) == expected
        assert crowded.stats.num_preemptions > 0


def test_contexts_beyond_the_drafters_capacity(paths, plain):
    transformer = {**mtp_settings().transformer, "max_position_embeddings": 40}
    short = write_mtp(paths["directory"] / "short", paths["directory"] / "target", "right", transformer=transformer)
    for mode in ("pipeline", "eager"):
        llm = make(paths | {"short": str(short)}, "short", 3, **MODES[mode])
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        found = llm.generate(PROMPTS[:3], params)
        assert outputs(found) == outputs(plain.generate(PROMPTS[:3], params))
        assert all(o.metrics.not_speculated.get(CONTEXT_TOO_LONG, 0) > 0 for o in found)
        assert all(o.metrics.accepted_draft_tokens > 0 for o in found[:2])


def test_the_end_of_the_context(paths, plain):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for settings in MODES.values():
        llm = make(paths, "right", 5, **settings)
        assert outputs(llm.generate(PROMPTS[:3], params)) == outputs(plain.generate(PROMPTS[:3], params))


def test_prompts_in_chunks(paths, expected):
    for mode in ("pipeline", "eager"):
        llm = make(paths, "right", 3, max_num_batched_tokens=7, **MODES[mode])
        whole = make(paths, "right", 3, **MODES[mode])
        ours, theirs = llm.generate(PROMPTS, GREEDY), whole.generate(PROMPTS, GREEDY)
        assert outputs(ours) == outputs(expected[0][1])
        assert acceptance(ours) == acceptance(theirs)


def test_a_request_may_switch_it_off_and_the_next_finds_its_context(paths, plain):
    llm = make(paths, "right", 3, block_size=4)
    fresh = make(paths, "right", 3, block_size=4)
    off = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation=False)
    (answer,) = llm.generate(["hello"], off)
    assert answer.metrics.draft_rounds == 0
    turn = [*answer.prompt_token_ids, *answer.outputs[0].token_ids, 7]
    (ours,), (theirs,) = llm.generate([turn], GREEDY), fresh.generate([turn], GREEDY)
    assert ours.num_cached_tokens >= 20
    assert ours.outputs == theirs.outputs == plain.generate([turn], GREEDY)[0].outputs
    assert acceptance([ours]) == acceptance([theirs])


@pytest.mark.parametrize("mode", ["pipeline", "masked", "eager"])
def test_a_drafter_whose_logits_are_no_numbers_is_an_error(paths, mode):
    damaged = write_mtp(paths["directory"] / "damaged", paths["directory"] / "target", "right")
    tensors = load_file(damaged / "model.safetensors")
    tensors["norm.weight"] *= torch.nan
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    llm = make(paths | {"damaged": str(damaged)}, "damaged", 3, dtype="float32", **MODES[mode])
    with pytest.raises(EngineError, match=r"drafter .*damaged gave logits that are not finite numbers"):
        llm.generate(PROMPTS[:1], GREEDY)


def test_info(paths):
    speculation = make(paths, "right").info()["speculation"]
    assert speculation["method"] == "mtp"
    assert speculation["num_speculative_tokens"] == 3
    assert make(paths, "right", speculation={"method": "MTP"}).info()["speculation"]["method"] == "mtp"


@pytest.mark.parametrize(
    ("speculation", "number", "message"),
    [
        ({}, 17, "num_speculative_tokens must be from 1 to 16, the most passes of an mtp drafter"),
        ({"method": "dspark"}, None, "the speculative method is dspark, and drafter .* is mtp"),
    ],
)
def test_settings_that_do_not_fit(paths, speculation, number, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make(paths, "right", number, speculation=speculation)
    assert "\n" not in str(caught.value)


def test_drafters_for_other_targets(paths):
    other = write_mtp(paths["directory"] / "deep", paths["directory"] / "target", "right", target_layer_ids=(2,))
    with pytest.raises(CheckpointError, match="the target has 2 layers"):
        make(paths | {"deep": str(other)}, "deep")
    below = write_mtp(paths["directory"] / "below", paths["directory"] / "target", "right", target_layer_ids=(-1,))
    with pytest.raises(UnsupportedModelError, match="embedding output"):
        make(paths | {"below": str(below)}, "below")


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 0), ("rms_norm_eps", "x"), ("max_position_embeddings", 0)])
def test_a_damaged_configuration_is_told_from_the_targets(key, value):
    settings = mtp_settings()
    damaged = replace(settings, transformer={**settings.transformer, key: value})
    with pytest.raises(CheckpointError, match=f"drafter somewhere: .*'{key}' must be"):
        DrafterConfig.from_settings(damaged, "somewhere")
