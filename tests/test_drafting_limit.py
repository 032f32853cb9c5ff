"""Rounds of many sequences do not draft where that does not pay; their tokens are the same."""

import pytest

from sparkgap import LLM, SamplingParams
from sparkgap.config import SpeculativeConfig
from sparkgap.errors import ConfigError
from sparkgap.rounds.speculative import TOO_MANY_TO_DRAFT

from .speculating_model import write_looping_pair

SETTINGS = {"threads": 1, "device": "cpu", "max_num_seqs": 8}
LENGTHS = (50, 7, 33, 21, 64)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("limit"))
    return str(model), str(drafter)


def make(paths, *, most=None, lookup=None, **changes):
    config = {"model": paths[1], "disable_by_batch_size": most, "prompt_lookup_max": lookup}
    return LLM(paths[0], speculative_config=config, **(SETTINGS | changes))


@pytest.fixture(scope="module")
def plain(paths):
    return LLM(paths[0], speculation=False, **SETTINGS)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 4}])
@pytest.mark.parametrize("lookup", [0, None])
@pytest.mark.parametrize("pipeline", ["on", "off"])
@pytest.mark.parametrize("most", [1, 3])
def test_tokens_are_those_without_drafts(paths, plain, pipeline, lookup, most, sampling):
    """Sequences end one after another, so rounds begin plain and go on with drafts, whose context must be whole."""
    llm = make(paths, most=most, lookup=lookup, task_pipeline=pipeline)
    prompts = [[i, 7, 3 * i] for i in range(len(LENGTHS))]
    params = [SamplingParams(max_tokens=length, ignore_eos=True, **sampling) for length in LENGTHS]
    ours, expected = llm.generate(prompts, params), plain.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in expected]
    counts = [o.metrics.not_speculated.get(TOO_MANY_TO_DRAFT, 0) for o in ours]
    assert all(counts)
    assert ours[1].metrics.draft_rounds == 0
    longest = ours[4].metrics
    assert longest.draft_rounds > 0
    assert longest.accepted_draft_tokens > 0
    assert llm.stats.num_not_speculated[TOO_MANY_TO_DRAFT] == sum(counts)
    # Alone, it drafts from its first round on.
    (alone,) = llm.generate(prompts[4:], params[4:])
    assert alone.outputs == expected[4].outputs
    assert alone.metrics.not_speculated == {}


def test_a_limit_between_two_numbers_of_sequences_with_graphs_is_kept(paths, plain):
    """Nine sequences would be padded to ten, which are more than may draft."""
    llm = make(paths, most=9, max_num_seqs=10, task_pipeline="on")
    prompts = [[i, 7, 3 * i] for i in range(10)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    few, many = llm.generate(prompts[:9], params), llm.generate(prompts, params)
    assert all(o.metrics.draft_rounds > 0 and o.metrics.not_speculated == {} for o in few)
    assert any(TOO_MANY_TO_DRAFT in o.metrics.not_speculated for o in many)
    assert [o.outputs for o in many] == [o.outputs for o in plain.generate(prompts, params)]


def test_the_drafts_after_plain_rounds_are_those_of_a_sequence_that_always_drafted(paths):
    """Acceptance says whether plain rounds kept the drafter's context: it would fall, and no token would show it."""
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    limited, free = make(paths, most=1, lookup=0), make(paths, lookup=0)
    ours = limited.generate([[5, 6], [9, 9]], [params, short])[0].metrics
    expected = free.generate([[5, 6]], params)[0].metrics
    assert ours.accepted_per_round == pytest.approx(expected.accepted_per_round, abs=0.25)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"disable_by_batch_size": 0}, "disable_by_batch_size must be an integer of at least 1"),
        ({"disable_by_batch_size": True}, "disable_by_batch_size must be an integer of at least 1"),
        ({"disable_by_batch_size": 2, "draft_sample_method": "probabilistic"}, "needs draft_sample_method greedy"),
        ({"disable_by_batch_size": 2, "adaptive_length": True}, "use one of them"),
        ({"disable_by_batch_size": 2, "method": "ngram"}, "needs a drafter"),
    ],
)
def test_limits_that_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        SpeculativeConfig(**change)


def test_small_models_have_no_limit_by_themselves(paths):
    assert make(paths).info()["speculation"]["disable_by_batch_size"] is None
    assert make(paths, most=4).info()["speculation"]["disable_by_batch_size"] == 4


@pytest.mark.model
def test_the_default_model_has_one(default_model_path):
    llm = LLM(str(default_model_path), threads=1, device="cpu", max_model_len=256)
    assert llm.info()["speculation"]["disable_by_batch_size"] == 3
    every = LLM(str(default_model_path), threads=1, max_model_len=256, speculative_config={"prefix_scheduling": False})
    assert every.info()["speculation"]["disable_by_batch_size"] == 2
