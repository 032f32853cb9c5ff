"""Figures of answers whose times are known."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.bench.serving.client import Answer
from sparkgap.bench.serving.load import LoadResult
from sparkgap.bench.serving.report import Distribution, summarize
from sparkgap.bench.serving.scrape import between, parse_metrics
from sparkgap.bench.serving.workload import synthetic, with_poisson_arrivals


def test_times_of_an_answer():
    answer = Answer(10.0, [10.5, 10.6, 10.9], 11.5, prompt_tokens=4, completion_tokens=5)
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.latency_s == pytest.approx(0.9)
    assert answer.tpot_s == pytest.approx(0.1)
    assert answer.gaps_s == pytest.approx([0.1, 0.3])
    empty = Answer(10.0, [], 11.5)
    assert (empty.ttft_s, empty.tpot_s, empty.latency_s, empty.gaps_s) == (None, None, 1.5, [])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_percentiles(values):
    result = Distribution.of_seconds(values)
    assert result.count == len(values)
    for share, figure in ((50, result.p50), (90, result.p90), (95, result.p95), (99, result.p99)):
        assert figure in [value * 1e3 for value in values]
        not_above = sum(value * 1e3 <= figure for value in values)
        below = sum(value * 1e3 < figure for value in values)
        assert 100 * not_above >= share * len(values)
        assert 100 * below < share * len(values)
    assert result.max == max(values) * 1e3


def test_failed_requests_count_as_sent_only():
    good = Answer(0.0, [1.0, 2.0], 2.0, 3, 2)
    bad = Answer(0.0, [0.1], 0.2, error="timeout", detail="slow")
    report = summarize(LoadResult([good, bad, bad], 4.0, 3), {"ttft": 1500.0})
    assert (report.requests, report.completed, report.errors) == (3, 1, {"timeout": 2})
    assert report.requests_per_s == 0.25
    assert report.ttft_ms.max == 1000.0
    assert (report.goodput.requests, report.goodput.share) == (1, pytest.approx(1 / 3))
    assert summarize(LoadResult([good], 4.0, 1), {"ttft": 999.0}).goodput.requests == 0


def test_arrivals_are_those_of_a_poisson_process():
    requests = with_poisson_arrivals(synthetic(20_000, 1, 1, 0), 50.0, seed=3)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.03)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(0.02, rel=0.05)
    assert requests[0].arrival_s == 0
    assert with_poisson_arrivals(requests, 50.0, seed=3) == requests


def test_pages_of_metrics():
    page = """
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 1.05e+02
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 12.0
vllm:num_requests_running 1
not a sample
"""
    sample = parse_metrics(page)
    assert (sample.rounds, sample.drafted, sample.accepted) == (15, 105, 30)
    assert sample.accepted_by_position == {0: 12}
    assert parse_metrics("vllm:num_requests_running 1\n") is None
    assert between(None, sample) is None
    assert between(sample, sample) is None
    doubled = parse_metrics(page.replace("1.05e+02", "210"))
    assert between(sample, doubled).draft_tokens == 105
