"""Requests through the engine: scheduling, blocks, stop conditions, failures."""

import sys

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sparkgap.config import SamplingParams
from sparkgap.errors import ConfigError, EngineError, PromptError

from .fakes import EOS, VOCAB, assert_idle, generate, make_engine, next_token, run

prompts = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=20)
WORD = [ord(letter) - ord("a") for letter in "thequickbrownfox"]


def expected_tokens(prompt, number):
    tokens = list(prompt)
    for _ in range(number):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@given(
    st.lists(st.tuples(prompts, st.integers(1, 30), st.integers(1, 2)), min_size=1, max_size=7),
    st.integers(13, 40),
    st.integers(1, 6),
    st.integers(1, 25),
    st.integers(0, 3),
    st.data(),
)
@settings(deadline=None, max_examples=150)
def test_tokens_do_not_depend_on_scheduling(requests, blocks, max_num_seqs, budget, draft, data):
    """Any mix of prompts in any KV budget, with late arrivals and preemptions, gives each its own tokens."""
    engine = make_engine(
        blocks=blocks, max_model_len=50, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, draft=draft
    )
    ids, streamed = [], {}

    def step():
        for output in engine.step():
            streamed.setdefault(output.request_id, []).append(output)

    for prompt, max_tokens, n in requests:
        ids.append(engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, n=n)))
        for _ in range(data.draw(st.integers(0, 3))):
            step()
    for _ in range(3_000):
        if not engine.has_unfinished_requests():
            break
        step()
    assert_idle(engine)
    for request_id, (prompt, max_tokens, n) in zip(ids, requests, strict=True):
        expected = expected_tokens(prompt, min(max_tokens, 50 - len(prompt)))
        outputs = streamed[request_id]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        for index in range(n):
            pieces = [c for o in outputs for c in o.outputs if c.index == index]
            assert [t for piece in pieces for t in piece.token_ids] == expected
            assert "".join(p.text for p in pieces) == engine.tokenizer.decode(expected)
            assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert pieces[-1].finish_reason == "length"
    for kind, rows in engine.runner.log:
        assert len(rows) <= max_num_seqs
        if kind == "prefill":
            assert sum(number for _, number in rows) <= budget


def test_preemption_happens_and_takes_the_newest():
    engine = make_engine(blocks=8, block_size=4, max_model_len=32, max_num_seqs=4)
    ids = [engine.add_request([i] * 8, SamplingParams(max_tokens=20), output_kind="final") for i in range(2)]
    outputs = run(engine)
    assert [outputs[i][0].metrics.preemptions for i in ids] == [0, 1]
    assert engine.runner.released.count(1) == 2
    for i, request_id in enumerate(ids):
        assert outputs[request_id][0].outputs[0].token_ids == expected_tokens([i] * 8, 20)


def test_first_come_first_served():
    engine = make_engine(max_num_seqs=2)
    ids = [engine.add_request([i], SamplingParams(max_tokens=4), output_kind="final") for i in range(5)]
    assert list(run(engine)) == ids
    first = {}
    for number, (_, rows) in enumerate(engine.runner.log):
        for row in rows:
            first.setdefault(row[0] if isinstance(row, tuple) else row, number)
    assert sorted(first, key=first.get) == list(range(5))


def test_decoding_goes_on_while_a_long_prompt_is_read():
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=4)
    engine.add_request([1, 2], SamplingParams(max_tokens=30))
    engine.step()
    engine.add_request([3] * 20, SamplingParams(max_tokens=2))
    before = len(engine.runner.log)
    for _ in range(5):
        (output, *_) = engine.step()
        assert output.request_id == "request-0"
    kinds = [kind for kind, _ in engine.runner.log[before:]]
    # The first round is alone, so that it is known how long one takes.
    assert kinds == ["decode", *["decode", "prefill"] * 4]
    run(engine)


def test_a_single_request_takes_the_whole_cache():
    engine = make_engine(blocks=4, block_size=4, max_model_len=16)
    output = generate(engine, [1] * 6, max_tokens=None)
    assert output.outputs[0].token_ids == expected_tokens([1] * 6, 10)
    assert output.outputs[0].finish_reason == "length"


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    engine = make_engine(blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(PromptError, match=r"20 tokens with 10 output tokens needs 8 KV blocks.*has 4"):
        engine.add_request([1] * 20, SamplingParams(max_tokens=10))
    assert_idle(engine)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "empty"),
        ("", "empty"),
        ([1] * 64, "64 tokens and max_model_len is 64"),
        ([1] * 99, "99 tokens and max_model_len is 64"),
        ([1, VOCAB], f"token id {VOCAB}"),
        ([-1], "token id -1"),
        ([1, "a"], "'a'"),
        ([1, True], "True"),
    ],
)
def test_prompts_that_are_refused(prompt, match):
    engine = make_engine()
    with pytest.raises(PromptError, match=match):
        engine.add_request(prompt, SamplingParams())
    assert_idle(engine)


def test_parameters_that_do_not_fit_the_model_are_refused():
    engine = make_engine()
    with pytest.raises(ConfigError, match="logit_bias"):
        engine.add_request([1], SamplingParams(logit_bias={VOCAB: 1.0}))
    with pytest.raises(ConfigError, match="min_tokens is 63"):
        engine.add_request([1, 2], SamplingParams(min_tokens=63, max_tokens=None))
    engine.add_request([1], SamplingParams(), request_id="mine")
    with pytest.raises(ConfigError, match="mine"):
        engine.add_request([1], SamplingParams(), request_id="mine")
    run(engine)


@pytest.mark.parametrize("draft", [0, 1, 3])
class TestStops:
    """A round's tokens are looked at one by one, however many a round gives."""

    def complete(self, draft, script=WORD, **changes):
        params = {"max_tokens": len(script)} | changes
        output = generate(make_engine(script=script, draft=draft), [1, 2, 3], **params)
        (completion,) = output.outputs
        assert output.metrics.completion_tokens == len(completion.token_ids)
        return completion

    def check(self, completion, text, num_tokens, finish_reason, stop_reason=None):
        assert (completion.text, len(completion.token_ids)) == (text, num_tokens)
        assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)

    def test_length(self, draft):
        self.check(self.complete(draft, max_tokens=5), "thequ", 5, "length")

    def test_stop_string(self, draft):
        self.check(self.complete(draft, stop="kbr"), "thequic", 11 - 1, "stop", "kbr")

    def test_stop_string_is_included(self, draft):
        completion = self.complete(draft, stop=["kbr", "zzz"], include_stop_str_in_output=True)
        self.check(completion, "thequickbr", 10, "stop", "kbr")

    def test_stop_string_at_the_last_token(self, draft):
        self.check(self.complete(draft, stop="qu", max_tokens=5), "the", 5, "stop", "qu")

    def test_a_beginning_of_a_stop_string_is_given_at_the_end(self, draft):
        self.check(self.complete(draft, stop="uiz", max_tokens=6), "thequi", 6, "length")

    def test_stop_token(self, draft):
        self.check(self.complete(draft, stop_token_ids=[WORD[4]]), "theq", 5, "stop", WORD[4])

    def test_stop_token_is_included(self, draft):
        completion = self.complete(draft, stop_token_ids=[WORD[4]], include_stop_str_in_output=True)
        self.check(completion, "thequ", 5, "stop", WORD[4])

    def test_end_of_sequence(self, draft):
        self.check(self.complete(draft, [*WORD[:6], EOS, 1]), "thequi", 7, "stop")

    def test_end_of_sequence_among_stop_tokens(self, draft):
        self.check(self.complete(draft, [*WORD[:6], EOS, 1], stop_token_ids=[EOS]), "thequi", 7, "stop")

    def test_ignore_eos(self, draft):
        self.check(self.complete(draft, [*WORD[:2], EOS, 1], ignore_eos=True), "thb", 4, "length")

    def test_special_tokens_are_text_when_asked_for(self, draft):
        completion = self.complete(draft, [*WORD[:2], EOS, 1], ignore_eos=True, skip_special_tokens=False)
        self.check(completion, "th<eos>b", 4, "length")

    def test_min_tokens(self, draft):
        script = [*WORD[:3], EOS, 4, 5, EOS]
        self.check(self.complete(draft, script, min_tokens=5), "theef", 7, "stop")
        self.check(self.complete(draft, WORD + WORD, stop="qu", min_tokens=5), "thequickbrownfoxthe", 21, "stop", "qu")
        self.check(self.complete(draft, stop="qu", min_tokens=4), "the", 5, "stop", "qu")

    def test_stop_strings_are_held_while_streaming(self, draft):
        engine = make_engine(script=WORD, draft=draft)
        request_id = engine.add_request([1], SamplingParams(max_tokens=16, stop=["quiz", "bro"]))
        outputs = run(engine)[request_id]
        text = ""
        for output in outputs:
            text += output.outputs[0].text
            assert "thequick".startswith(text)
        assert text == "thequick"
        assert [t for o in outputs for t in o.outputs[0].token_ids] == WORD[:11]


def test_text_that_may_become_a_stop_string_is_held():
    engine = make_engine(script=WORD)
    engine.add_request([1], SamplingParams(max_tokens=9, stop=["eqx", "uiz"]))
    pieces = []
    while engine.has_unfinished_requests():
        pieces += [output.outputs[0].text for output in engine.step()]
    assert pieces == ["t", "h", "", "", "eq", "", "uic", "k", "b"]


def test_completions_have_seeds_of_their_own():
    engine = make_engine()
    first = engine.make_request([1], SamplingParams(n=3, seed=5))
    again = engine.make_request([1], SamplingParams(n=2, seed=5))
    seeds = [completion.sequence.seed for completion in first.completions]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert [completion.sequence.seed for completion in again.completions] == seeds[:2]
    unseeded = [make_engine(seed=s).make_request([1], SamplingParams()) for s in (0, 0, 1)]
    numbers = [request.completions[0].sequence.seed for request in unseeded]
    assert numbers[0] == numbers[1] != numbers[2]
    other = engine.make_request([1], SamplingParams())
    assert other.completions[0].sequence.seed not in (numbers[0], 5)
    negative = engine.make_request([1], SamplingParams(seed=-1)).completions[0].sequence.seed
    assert negative == 2**64 - 1


def test_abort_frees_everything():
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=4)
    ids = [engine.add_request([1, 2, 3], SamplingParams(max_tokens=20, n=2)) for _ in range(3)]
    for _ in range(4):
        engine.step()
    for request_id in ids:
        output = engine.abort(request_id)
        assert output.finished
        assert {c.finish_reason for c in output.outputs} == {"abort"}
        assert engine.abort(request_id) is None
    assert_idle(engine)
    assert set(engine.runner.released) == set(range(6))


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_failed_round_fails_its_requests_and_no_others(kind):
    broken = {"now": False}

    def fail(what, sequence):
        if broken["now"] and what == kind:
            raise RuntimeError("the kernel is gone\nand more")

    engine = make_engine(fail=fail, max_num_seqs=2)
    first = engine.add_request([1], SamplingParams(max_tokens=8, n=2), output_kind="final")
    waiting = engine.add_request([2], SamplingParams(max_tokens=8), output_kind="final")
    if kind == "decode":
        engine.step()
    broken["now"] = True
    (output,) = engine.step()
    broken["now"] = False
    assert output.request_id == first
    assert output.finished
    assert isinstance(output.error, EngineError)
    assert str(output.error) == "computing with model fake failed: RuntimeError: the kernel is gone"
    assert isinstance(output.error.__cause__, RuntimeError)
    outputs = run(engine)
    assert outputs[waiting][0].outputs[0].token_ids == expected_tokens([2], 8)
    assert generate(engine, [3], max_tokens=4).outputs[0].token_ids == expected_tokens([3], 4)


def test_a_failed_request_takes_its_other_completions_along():
    """One completion decodes and fails while another still reads its prompt in the same step."""

    def fail(what, sequence):
        if what == "decode" and sequence.sequence_id == 0:
            raise ValueError("bad")

    engine = make_engine(fail=fail, max_num_batched_tokens=4, max_num_seqs=3)
    request_id = engine.add_request([1] * 7, SamplingParams(max_tokens=8, n=2))
    outputs = run(engine)[request_id]
    assert isinstance(outputs[-1].error, EngineError)


def test_logprobs():
    output = generate(make_engine(script=[1, 2, 0]), [5], max_tokens=3, logprobs=2).outputs[0]
    assert output.cumulative_logprob == pytest.approx(-1.5)
    assert [list(table) for table in output.logprobs] == [[1, 0], [2, 0, 1], [0, 1]]
    assert output.logprobs[1][2].logprob == -0.5
    assert output.logprobs[1][2].decoded_token == "c"
    assert output.logprobs[1][0].rank == 1
    plain = generate(make_engine(), [5], max_tokens=3).outputs[0]
    assert plain.logprobs is None
    assert plain.cumulative_logprob is None


def test_metrics():
    metrics = generate(make_engine(draft=3), [1, 2, 3], max_tokens=17).metrics
    # Rounds accept 1, 2, 3, 0, 1, 2, ... of 3 draft tokens; the first token comes from the prompt's pass.
    assert (metrics.prompt_tokens, metrics.completion_tokens) == (3, 17)
    assert metrics.draft_rounds == 7
    assert metrics.draft_tokens == 21
    assert metrics.accepted_draft_tokens == 1 + 2 + 3 + 0 + 1 + 2 + 3
    assert metrics.acceptance_rate == pytest.approx(12 / 21)
    assert metrics.accepted_per_round == pytest.approx(12 / 7)
    assert metrics.acceptance_by_position == pytest.approx([6 / 7, 4 / 7, 2 / 7])
    assert metrics.not_speculated == {"unlucky": 1}
    assert 0 < metrics.ttft_ms <= metrics.latency_ms
    assert metrics.tpot_ms == pytest.approx((metrics.latency_ms - metrics.ttft_ms) / 16)
    assert metrics.output_tokens_per_s == pytest.approx(17 / metrics.latency_ms * 1e3)
    plain = generate(make_engine(), [1], max_tokens=1).metrics
    assert plain.tpot_ms is None
    assert (plain.draft_rounds, plain.acceptance_rate, plain.acceptance_by_position) == (0, None, [])


def interrupt_at(line_number, call):
    """Run `call`, raising KeyboardInterrupt before the given line (counted as run) of scheduling and computing."""
    remaining = line_number

    def trace(frame, event, argument):
        nonlocal remaining
        if not frame.f_code.co_filename.endswith(("scheduler.py", "blocks.py", "prefix.py", "fakes.py")):
            return None
        if event == "line":
            remaining -= 1
            if remaining == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


@settings(max_examples=60, deadline=None)
@given(
    line_number=st.integers(1, 300),
    num_steps=st.integers(0, 6),
    draft=st.sampled_from([0, 3]),
    blocks=st.sampled_from([9, 64]),
    kind=st.sampled_from(["delta", "final"]),
)
def test_an_interrupted_step_loses_nothing(line_number, num_steps, draft, blocks, kind):
    engine = make_engine(draft=draft, blocks=blocks, max_num_batched_tokens=5, max_num_seqs=4)
    prompts = [[1] * 7, [2, 3], [4]]
    ids = [
        engine.add_request(p, SamplingParams(max_tokens=6 + i, n=2), output_kind=kind) for i, p in enumerate(prompts)
    ]
    tokens = {}

    def take(outputs):
        for output in outputs:
            for completion in output.outputs:
                tokens.setdefault((output.request_id, completion.index), []).extend(completion.token_ids)

    for _ in range(num_steps):
        take(engine.step())
    stopped = False
    try:
        take(interrupt_at(line_number, engine.step))
    except KeyboardInterrupt:
        stopped = True
    for outputs in run(engine).values():
        take(outputs)
    for i, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        for index in range(2):
            assert tokens[request_id, index] == expected_tokens(prompt, 6 + i)
    event(f"interrupted: {stopped}")
