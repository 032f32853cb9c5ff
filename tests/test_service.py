"""What a crowded engine owes each request, seen through `LLM`: the output that it would have alone."""

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from sparkgap import LLM, SamplingParams
from sparkgap.bench.latency import EngineColumn

from .speculating_model import write_looping_pair

SETTINGS = {"threads": 1, "device": "cpu", "max_model_len": 96, "block_size": 4}
BLOCK_BYTES = (2 * 2 * 2 * 8 + 2 * 2 * 2 * 8) * 4 * 2
"""Of four positions: keys and values of two layers of target and drafter, two heads of eight, two bytes each."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    model, drafter = write_looping_pair(tmp_path_factory.mktemp("service"))
    return str(model), str(drafter)


def make(paths, speculation="greedy", **changes):
    config = None if speculation is None else {"model": paths[1], "draft_sample_method": speculation}
    return LLM(paths[0], speculative_config=config, **(SETTINGS | changes))


@pytest.fixture(scope="module")
def roomy(paths):
    return make(paths, enable_prefix_caching=False)


def check_nothing_is_held(llm):
    stats = llm.stats
    assert stats.num_requests == stats.num_running_sequences == stats.num_waiting_sequences == 0
    assert stats.num_used_blocks == stats.num_queued_requests == 0


def acceptance(output):
    metrics = output.metrics
    return metrics.draft_rounds, metrics.accepted_draft_tokens, metrics.acceptance_by_position


CASES = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 3},
    "several": {"temperature": 0.9, "seed": 5, "n": 3},
    "penalties": {"temperature": 0.5, "seed": 1, "frequency_penalty": 0.7},
    "not speculated": {"temperature": 0, "speculation": False},
}


@pytest.mark.parametrize("speculation", ["greedy", "probabilistic", None])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_prefix_that_is_found_changes_no_bit(paths, speculation, dtype):
    """Tokens, log-probabilities and accepted drafts are those of a prompt that was computed."""
    on = make(paths, speculation, dtype=dtype)
    off = make(paths, speculation, dtype=dtype, enable_prefix_caching=False)
    shared = list(range(40, 71))
    prompts = [shared, [*shared, 9, 8, 7], shared[:17], [*shared[:20], *range(100, 120)], shared]
    for case in CASES.values():
        params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=3, **case)
        for prompt in prompts:
            (ours,), (expected,) = on.generate(prompt, params), off.generate(prompt, params)
            assert ours.outputs == expected.outputs
            assert acceptance(ours) == acceptance(expected)
            assert expected.num_cached_tokens == 0
    assert ours.num_cached_tokens == 28
    check_nothing_is_held(on)


def test_an_answer_is_the_prefix_of_the_next_turn(paths, roomy):
    """KV that rounds wrote for accepted drafts, of target and drafter, serves a later prompt as its own would."""
    llm = make(paths)
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, logprobs=3)
    turn = [72, 101, 108, 108, 111]
    for _ in range(3):
        (ours,), (expected,) = llm.generate(turn, params), roomy.generate(turn, params)
        assert ours.outputs == expected.outputs
        assert acceptance(ours) == acceptance(expected)
        turn = [*turn, *ours.outputs[0].token_ids, 63]
    assert ours.num_cached_tokens >= 48
    assert ours.metrics.accepted_draft_tokens > 0


@st.composite
def requests(draw):
    """A prompt that others may share the beginning of, and how it is to be answered."""
    prompt = draw(st.sampled_from([[5] * 9, list(range(70, 96)), [3, 250]])) + draw(
        st.lists(st.integers(0, 255), max_size=5)
    )
    sampled = draw(st.booleans())
    params = SamplingParams(
        temperature=0.9 if sampled else 0,
        seed=draw(st.integers(0, 3)),
        n=draw(st.integers(1, 3)) if sampled else 1,
        max_tokens=draw(st.integers(1, 50)),
        stop=draw(st.sampled_from([None, "e", ["\x05", "th"], "st"])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        ignore_eos=draw(st.booleans()),
        speculation=draw(st.sampled_from([True, True, False])),
    )
    return prompt, params


@pytest.fixture(scope="module", params=[("greedy", True), ("greedy", False), (None, True)], ids=str)
def crowded(paths, request):
    """One sequence of the longest length fits, and little more."""
    speculation, caching = request.param
    drafter_share = 2 if speculation is None else 1
    return make(
        paths,
        speculation,
        kv_cache_memory_bytes=26 * BLOCK_BYTES // drafter_share,
        max_num_batched_tokens=32,
        enable_prefix_caching=caching,
    )


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests(), min_size=3, max_size=7))
def test_preemption_changes_no_output(crowded, roomy, wanted):
    prompts, params = [prompt for prompt, _ in wanted], [p for _, p in wanted]
    before = crowded.stats.num_preemptions
    ours = crowded.generate(prompts, params)
    assert [o.outputs for o in ours] == [o.outputs for o in roomy.generate(prompts, params)]
    preempted = crowded.stats.num_preemptions - before
    assert sum(o.metrics.preemptions for o in ours) == preempted
    event(f"preempted: {preempted > 0}")
    check_nothing_is_held(crowded)


def test_the_crowded_engine_preempts(crowded):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = crowded.generate([[i] * 12 for i in range(5)], params)
    assert sum(o.metrics.preemptions for o in outputs) > 0


def test_a_stream_that_is_closed_frees_its_blocks(paths):
    llm = make(paths)
    stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    next(stream)
    assert llm.stats.num_used_blocks > 0
    rounds = llm.stats.num_decode_rounds
    stream.close()
    check_nothing_is_held(llm)
    assert llm.stats.num_decode_rounds == rounds
    assert llm.stats.num_finished == {"abort": 1}


def test_a_measured_prompt_is_read_in_full_each_time(paths):
    llm = make(paths)
    column = EngineColumn(llm)
    for _ in range(3):
        column.generate(list(range(40)), 4)
    assert llm.stats.prefix_cache_hit_tokens == 0
    assert llm.generate([list(range(40))], SamplingParams(max_tokens=1))[0].num_cached_tokens == 36
