"""Deadlines, the bounded queue, the pace of running requests, and statistics."""

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.config import SamplingParams
from sparkgap.engine.pacing import PrefillPacer
from sparkgap.errors import QueueFullError

from .fakes import assert_idle, generate, make_engine, run
from .test_engine import expected_tokens


class Clock:
    """Stands still unless moved."""

    def __init__(self, monkeypatch):
        self.now_s = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class TestDeadlines:
    def test_a_request_ends_with_what_it_has(self, clock):
        engine = make_engine()
        late = engine.add_request([1], SamplingParams(max_tokens=20, n=2, deadline_s=5.0), output_kind="final")
        other = engine.add_request([2], SamplingParams(max_tokens=20), output_kind="final")
        for _ in range(4):
            engine.step()
        clock.now_s += 5.0
        (output,) = engine.step()
        assert output.request_id == late
        assert output.finished
        assert output.error is None
        for completion in output.outputs:
            assert completion.finish_reason == "timeout"
            assert completion.token_ids == expected_tokens([1], len(completion.token_ids))
            assert len(completion.token_ids) >= 3
        assert run(engine)[other][0].outputs[0].token_ids == expected_tokens([2], 20)
        assert engine.stats.num_finished == {"timeout": 2, "length": 1}

    def test_a_request_that_waits_ends_without_a_token(self, clock):
        engine = make_engine(max_num_seqs=1)
        first = engine.add_request([1], SamplingParams(max_tokens=9), output_kind="final")
        late = engine.add_request([2], SamplingParams(max_tokens=9, deadline_s=1.0))
        engine.step()
        clock.now_s += 2.0
        outputs = run(engine)
        (output,) = outputs[late]
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "timeout")
        assert output.metrics.queue_ms is None
        assert outputs[first][0].outputs[0].finish_reason == "length"

    def test_an_earlier_end_counts(self, clock):
        engine = make_engine()
        output = generate(engine, [1], max_tokens=3, deadline_s=1.0)
        clock.now_s += 2.0
        assert output.outputs[0].finish_reason == "length"
        assert engine.step() == []


class TestQueue:
    @pytest.mark.parametrize("limit", [0, 2])
    def test_one_more_than_may_wait_is_refused(self, limit):
        engine = make_engine(max_num_seqs=3, max_queued_requests=limit)
        accepted = [engine.add_request([i], SamplingParams(max_tokens=3)) for i in range(3 + limit)]
        before = engine.stats
        with pytest.raises(QueueFullError, match=rf"max_queued_requests is {limit}"):
            engine.add_request([9], SamplingParams())
        assert engine.stats == before
        outputs = run(engine)
        assert list(outputs) == accepted
        engine.add_request([9], SamplingParams())
        run(engine)

    def test_places_become_free(self):
        engine = make_engine(max_num_seqs=1, max_queued_requests=1)
        first, second = (engine.add_request([i], SamplingParams(max_tokens=30)) for i in range(2))
        engine.step()
        with pytest.raises(QueueFullError):
            engine.add_request([3], SamplingParams())
        engine.abort(second)
        third = engine.add_request([3], SamplingParams())
        with pytest.raises(QueueFullError):
            engine.add_request([4], SamplingParams())
        engine.abort(first)
        engine.step()
        engine.add_request([4], SamplingParams())
        engine.abort(third)
        run(engine)

    def test_preempted_sequences_do_not_fill_it(self):
        engine = make_engine(blocks=8, block_size=4, max_model_len=32, max_num_seqs=2, max_queued_requests=0)
        for i in range(2):
            engine.add_request([i] * 8, SamplingParams(max_tokens=20))
        while not engine.stats.num_preemptions:
            engine.step()
        assert engine.stats.num_queued_requests == 0
        assert engine.stats.num_waiting_sequences == 1
        run(engine)

    def test_no_limit(self):
        engine = make_engine(max_num_seqs=1)
        for i in range(200):
            engine.add_request([i % 20], SamplingParams(max_tokens=1))
        assert engine.stats.num_queued_requests == 200
        run(engine)


class TestPace:
    def test_a_fixed_number_of_prompt_tokens_beside_decodes(self):
        engine = make_engine(max_num_batched_tokens=16, prefill_tokens_beside_decodes=3)
        engine.add_request([1] * 20, SamplingParams(max_tokens=30))
        engine.add_request([2] * 20, SamplingParams(max_tokens=5))
        run(engine)
        log = engine.runner.log
        beside = [False, *(kind == "decode" for kind, _ in log[:-1])]
        sizes = [
            (sum(n for _, n in rows), after)
            for (kind, rows), after in zip(log, beside, strict=True)
            if kind == "prefill"
        ]
        assert max(size for size, after in sizes if not after) == 16
        assert max(size for size, after in sizes if after) == 3

    @given(
        decode_ms=st.floats(0.5, 200),
        pass_ms=st.floats(0.1, 100),
        token_ms=st.floats(0.001, 10),
        stretch=st.floats(1.2, 5),
        largest=st.integers(1, 2048),
        multiple=st.sampled_from([1, 4]),
    )
    def test_a_step_is_stretched_as_far_as_allowed(self, decode_ms, pass_ms, token_ms, stretch, largest, multiple):
        pacer = PrefillPacer(largest, stretch, multiple=multiple)
        # A round alone comes first, from which the pace is known.
        assert pacer.num_tokens(3) == 0
        pacer.add_step(3, 0, decode_ms / 1e3)
        numbers = []
        for _ in range(80):
            number = pacer.num_tokens(3)
            assert 1 <= number <= largest
            assert number % multiple == 0 or number == largest
            numbers.append(number)
            pacer.add_step(3, number, (decode_ms + pass_ms + number * token_ms) / 1e3)
        # Between two numbers that fit less and more than exactly it alternates.
        most = max(numbers[-20:])
        most_ms, allowed_ms = pass_ms + most * token_ms, (stretch - 1) * decode_ms
        if most > min(multiple, largest):
            assert most_ms < 1.25 * allowed_ms + multiple * token_ms
        if most + multiple <= largest:
            assert 1.25 * (most_ms + multiple * token_ms) > allowed_ms
        assert pacer.num_tokens(0) == largest

    def test_passes_that_are_not_full_tell_nothing(self):
        pacer = PrefillPacer(512, 2.0)
        pacer.add_step(1, 400, 1.0)
        pacer.add_step(1, 0, 0.01)
        number = pacer.num_tokens(1)
        pacer.add_step(1, 3, 0.011)
        assert pacer.num_tokens(1) == number

    def test_one_slow_step_means_little(self):
        pacer = PrefillPacer(512, 2.0)
        for duration_s in (0.01, 0.01, 0.01, 5.0):
            pacer.add_step(1, 0, duration_s)
        for _ in range(20):
            number = pacer.num_tokens(1)
            pacer.add_step(1, number, 0.01 + number * 1e-3)
        assert pacer.num_tokens(1) == 10

    def test_each_number_of_sequences_has_its_pace(self):
        pacer = PrefillPacer(512, 2.0)
        for sequences in (1, 4):
            assert pacer.num_tokens(sequences) == 0
            pacer.add_step(sequences, 0, 0.01 * sequences)
        for sequences, expected in ((1, 10), (4, 40), (1, 10)):
            for _ in range(20):
                number = pacer.num_tokens(sequences)
                pacer.add_step(sequences, number, 0.01 * sequences + number * 1e-3)
            assert pacer.num_tokens(sequences) == expected

    def test_prompts_are_read_even_where_no_pace_becomes_known(self):
        pacer = PrefillPacer(512, 2.0)
        assert [pacer.num_tokens(1) > 0 for _ in range(4)] == [False, False, True, True]

    def test_a_prompt_beside_decodes_waits_for_one_round_at_most_for_each_number(self):
        engine = make_engine(max_num_batched_tokens=16)
        engine.add_request([1] * 20, SamplingParams(max_tokens=30))
        engine.add_request([2] * 20, SamplingParams(max_tokens=5))
        run(engine)
        kinds = [kind for kind, _ in engine.runner.log]
        first = kinds.index("decode")
        assert kinds[first : first + 3] == ["decode", "decode", "prefill"]


class TestStats:
    def test_counts_add_up(self):
        engine = make_engine(draft=3, max_num_seqs=2)
        ids = [engine.add_request([i] * 5, SamplingParams(max_tokens=9, n=2), output_kind="final") for i in range(3)]
        waiting = engine.stats
        assert (waiting.num_requests, waiting.num_queued_requests, waiting.num_waiting_sequences) == (3, 3, 6)
        engine.step()
        first = engine.stats
        # The second completion waits for the prompt that the first one reads.
        assert (first.num_running_sequences, first.num_waiting_sequences) == (1, 5)
        assert 0 < first.kv_cache_usage < 1
        outputs = run(engine)
        metrics = [outputs[i][0].metrics for i in ids]
        stats = engine.stats
        assert stats.num_prompt_tokens == 15
        assert stats.num_generated_tokens == sum(m.completion_tokens for m in metrics) == 54
        assert stats.num_finished == {"length": 6}
        assert stats.num_draft_rounds == sum(m.draft_rounds for m in metrics)
        assert stats.num_draft_tokens == sum(m.draft_tokens for m in metrics)
        assert stats.num_accepted_tokens == sum(m.accepted_draft_tokens for m in metrics)
        assert len(stats.drafted_by_position) == len(stats.accepted_by_position) == 3
        assert stats.num_not_speculated == {"unlucky": sum(m.not_speculated.get("unlucky", 0) for m in metrics)}
        kinds = [kind for kind, _ in engine.runner.log]
        assert stats.num_decode_rounds == kinds.count("decode")
        assert stats.num_prefill_passes == kinds.count("prefill")
        assert stats.last_progress_s is not None
        assert waiting.num_generated_tokens == 0

    def test_a_snapshot_cannot_change(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            make_engine().stats.num_requests = 3

    def test_a_failure_is_no_progress(self, clock):
        def fail(what, sequence):
            raise RuntimeError("gone")

        engine = make_engine(fail=fail)
        generate(engine, [1], max_tokens=2)
        assert engine.stats.last_progress_s is None
        assert engine.stats.num_finished == {"error": 1}
        assert_idle(engine)

    def test_progress_is_told(self, clock):
        engine = make_engine()
        engine.add_request([1], SamplingParams(max_tokens=2))
        engine.step()
        assert engine.stats.last_progress_s == 100.0
        clock.now_s = 103.0
        engine.step()
        assert engine.stats.last_progress_s == 103.0
