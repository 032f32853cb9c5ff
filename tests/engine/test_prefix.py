"""Prefix reuse: which blocks are found, and that it never changes a token."""

from hypothesis import given
from hypothesis import strategies as st

from sparkgap.config import SamplingParams

from .fakes import assert_idle, generate, make_engine, run
from .test_engine import expected_tokens


def num_computed(engine):
    """Prompt rows that the runner was given."""
    return sum(number for kind, rows in engine.runner.log if kind == "prefill" for _, number in rows)


def test_a_prompt_that_was_served_is_found():
    engine = make_engine(block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    first = generate(engine, prompt, max_tokens=4)
    again = generate(engine, prompt, max_tokens=4)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 8)
    assert again.metrics.num_cached_tokens == 8
    assert again.outputs == first.outputs
    assert num_computed(engine) == 10 + 2
    longer = generate(engine, [*prompt[:8], 20, 21, 22], max_tokens=4)
    assert longer.num_cached_tokens == 8
    other = generate(engine, [2, *prompt[1:]], max_tokens=4)
    assert other.num_cached_tokens == 0
    stats = engine.stats
    assert (stats.prefix_cache_queried_tokens, stats.prefix_cache_hit_tokens) == (10 + 10 + 11 + 10, 16)


def test_the_last_token_is_always_computed():
    engine = make_engine(block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    generate(engine, prompt, max_tokens=1)
    assert generate(engine, prompt, max_tokens=1).num_cached_tokens == 4


def test_a_context_that_reads_ahead_is_found_only_where_the_next_token_is_the_same():
    engine = make_engine(block_size=4, reads_ahead=True)
    first = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert generate(engine, first, max_tokens=2).num_cached_tokens == 0
    assert generate(engine, first, max_tokens=2).num_cached_tokens == 8
    other = [*first[:8], 20, 21]
    assert generate(engine, other, max_tokens=2).num_cached_tokens == 4
    assert generate(engine, other, max_tokens=2).num_cached_tokens == 8
    assert generate(engine, first, max_tokens=2).num_cached_tokens == 8
    # The token behind the last block is the answer's first one, which the next turn has, too.
    answer = generate(engine, [11, 12, 13, 14], max_tokens=1).outputs[0].token_ids
    assert generate(engine, [11, 12, 13, 14, *answer, 9], max_tokens=1).num_cached_tokens == 4
    assert_idle(engine)


def test_an_answer_is_found_by_the_next_turn():
    """Positions that decode rounds wrote count, but none beyond what the answer kept."""
    for draft in (0, 1, 3):
        for max_tokens in range(1, 14):
            engine = make_engine(block_size=4, draft=draft)
            first = generate(engine, [1, 2, 3], max_tokens=max_tokens)
            turn = [1, 2, 3, *first.outputs[0].token_ids, 9, 9]
            cached = generate(engine, turn, max_tokens=5).num_cached_tokens
            # The last token of an answer has no KV yet, unless a round happened to accept more than was kept.
            assert cached in {(2 + max_tokens) // 4 * 4, (3 + max_tokens) // 4 * 4}


def test_off_finds_nothing():
    engine = make_engine(block_size=4, enable_prefix_caching=False)
    for _ in range(2):
        assert generate(engine, [1] * 12, max_tokens=4).num_cached_tokens == 0
    assert engine.stats.num_reusable_blocks == engine.stats.prefix_cache_queried_tokens == 0


def test_a_request_may_have_its_prompt_computed():
    engine = make_engine(block_size=4)
    generate(engine, [1] * 12, max_tokens=4)
    output = generate(engine, [1] * 12, max_tokens=4, skip_reading_prefix_cache=True)
    assert output.num_cached_tokens == 0
    assert generate(engine, [1] * 12, max_tokens=4).num_cached_tokens == 8


def test_completions_of_one_prompt_compute_it_once():
    engine = make_engine(block_size=4, max_num_batched_tokens=8)
    request_id = engine.add_request([1, 2, 3] * 7, SamplingParams(n=5, max_tokens=3))
    outputs = run(engine)[request_id]
    assert num_computed(engine) == 21 + 4 * 1
    assert outputs[-1].num_cached_tokens == 0


def test_requests_that_arrive_together_wait_for_a_prefix_that_is_being_read():
    engine = make_engine(block_size=4, max_num_batched_tokens=8)
    shared = [5, 6, 7, 8] * 4
    ids = [engine.add_request([*shared, i], SamplingParams(max_tokens=3), output_kind="final") for i in range(4)]
    outputs = run(engine)
    assert [outputs[i][0].num_cached_tokens for i in ids] == [0, 16, 16, 16]
    assert list(outputs) == ids


def test_a_failed_pass_publishes_nothing():
    broken = {"now": True}

    def fail(what, sequence):
        if broken["now"] and what == "prefill" and sequence.num_computed_tokens >= 4:
            raise RuntimeError("gone")

    engine = make_engine(block_size=4, max_num_batched_tokens=4, fail=fail)
    assert generate(engine, [1] * 12, max_tokens=4).error is not None
    broken["now"] = False
    assert generate(engine, [1] * 12, max_tokens=4).num_cached_tokens == 4


def test_content_is_given_up_for_new_requests():
    engine = make_engine(blocks=6, block_size=4, max_model_len=24)
    for number in range(30):
        prompt = [number % 3, *[3] * (number % 11)]
        output = generate(engine, prompt, max_tokens=4)
        assert output.outputs[0].token_ids == expected_tokens(prompt, 4)
    assert engine.stats.prefix_cache_hit_tokens > 0


@st.composite
def related_prompts(draw):
    """A beginning that others may share, and more."""
    shared = draw(st.sampled_from([[], [1] * 9, [1] * 13, [1, 2] * 6, [1, 2] * 8]))
    return (shared + draw(st.lists(st.integers(0, 2), max_size=6))) or [0]


@given(
    requests=st.lists(
        st.tuples(related_prompts(), st.integers(1, 20), st.integers(1, 2), st.integers(0, 3), st.booleans()),
        min_size=2,
        max_size=10,
    ),
    blocks=st.integers(15, 40),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 25),
    beside=st.one_of(st.none(), st.integers(1, 6)),
    draft=st.integers(0, 3),
    enabled=st.booleans(),
)
def test_tokens_do_not_depend_on_what_is_found(requests, blocks, max_num_seqs, budget, beside, draft, enabled):
    """Related prompts that come, go and are aborted in any KV budget: the runner checks every position it reads."""
    engine = make_engine(
        blocks=blocks,
        max_model_len=50,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefill_tokens_beside_decodes=beside,
        draft=draft,
        enable_prefix_caching=enabled,
    )
    wanted, got = {}, {}

    def step():
        for output in engine.step():
            for completion in output.outputs:
                got.setdefault((output.request_id, completion.index), []).extend(completion.token_ids)

    for prompt, max_tokens, n, num_steps, aborted in requests:
        request_id = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, n=n))
        for _ in range(num_steps):
            step()
        if aborted:
            engine.abort(request_id)
        else:
            wanted |= {(request_id, i): expected_tokens(prompt, min(max_tokens, 50 - len(prompt))) for i in range(n)}
    for _ in range(2_000):
        if not engine.has_unfinished_requests():
            break
        step()
    assert_idle(engine)
    assert {key: got[key] for key in wanted} == wanted
    assert enabled or not engine.stats.prefix_cache_hit_tokens
