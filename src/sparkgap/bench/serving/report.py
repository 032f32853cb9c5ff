"""From answers to figures."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkgap.bench.serving.client import Answer
from sparkgap.bench.serving.load import LoadResult
from sparkgap.errors import ConfigError

SLO_METRICS = ("ttft", "tpot", "e2el")
"""What a service level objective may bound, in milliseconds (vLLM's names)."""


@dataclass(frozen=True)
class Distribution:
    """Of one figure over requests (or gaps), in milliseconds.

    Attributes:
        count: values.
        mean, p50, p90, p95, p99, max: None without values. A percentile is the smallest value that so large a share
            does not exceed.
    """

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of_seconds(cls, values_s: Sequence[float]) -> "Distribution":
        """Of values in seconds."""
        if not values_s:
            return cls(0, None, None, None, None, None, None)
        ordered = sorted(value * 1e3 for value in values_s)
        p50, p90, p95, p99 = (_percentile(ordered, share) for share in (50, 90, 95, 99))
        return cls(len(ordered), statistics.fmean(ordered), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True)
class Goodput:
    """Requests that met every objective.

    Attributes:
        objectives_ms: by metric, of `SLO_METRICS`.
        requests: how many met them; one that failed or was refused does not.
        share: of all requests.
        requests_per_s: how many a second.
    """

    objectives_ms: Mapping[str, float]
    requests: int
    share: float
    requests_per_s: float


@dataclass(frozen=True)
class LoadReport:
    """Figures of one load.

    Attributes:
        requests: that were sent.
        completed: that were answered to the end.
        errors: the others, by kind.
        error_details: what the first failure of each kind said.
        duration_s: from the first request to the last answer.
        peak_concurrency: most open requests.
        prompt_tokens, completion_tokens: of completed requests.
        tokens_are_counted_by_server: False where some answer had no usage, and its pieces were counted as tokens.
        requests_per_s, output_tokens_per_s, total_tokens_per_s: of completed requests, over the duration.
        ttft_ms: time to first token.
        tpot_ms: time per output token after the first, of each request.
        itl_ms: gaps between pieces of an answer, of all requests together.
        e2el_ms: time to the last token.
        goodput: None without objectives.
    """

    requests: int
    completed: int
    errors: Mapping[str, int]
    error_details: Mapping[str, str]
    duration_s: float
    peak_concurrency: int
    prompt_tokens: int
    completion_tokens: int
    tokens_are_counted_by_server: bool
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2el_ms: Distribution
    goodput: Goodput | None


def parse_objectives(entries: Sequence[str]) -> dict[str, float]:
    """`METRIC:MILLISECONDS` entries by metric.

    Raises:
        ConfigError: an entry is not of that form.
    """
    objectives: dict[str, float] = {}
    for entry in entries:
        name, _, value = entry.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = 0.0
        if name not in SLO_METRICS or not 0 < limit_ms < float("inf"):
            raise ConfigError(
                f"goodput must be METRIC:MILLISECONDS with a metric of {', '.join(SLO_METRICS)}, such as ttft:500, "
                f"got {entry!r}"
            )
        objectives[name] = limit_ms
    return objectives


def summarize(result: LoadResult, objectives_ms: Mapping[str, float] | None = None) -> LoadReport:
    """Figures of a load; with objectives also the goodput."""
    completed = [answer for answer in result.answers if answer.error is None]
    failed = [answer for answer in result.answers if answer.error is not None]
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in completed)
    completion_tokens = sum(answer.output_tokens for answer in completed)
    duration_s = result.duration_s
    return LoadReport(
        requests=len(result.answers),
        completed=len(completed),
        errors=dict(Counter(answer.error or "" for answer in failed)),
        error_details={answer.error or "": answer.detail for answer in reversed(failed)},
        duration_s=duration_s,
        peak_concurrency=result.peak_concurrency,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        tokens_are_counted_by_server=all(answer.completion_tokens is not None for answer in completed),
        requests_per_s=len(completed) / duration_s,
        output_tokens_per_s=completion_tokens / duration_s,
        total_tokens_per_s=(prompt_tokens + completion_tokens) / duration_s,
        ttft_ms=Distribution.of_seconds([a.ttft_s for a in completed if a.ttft_s is not None]),
        tpot_ms=Distribution.of_seconds([a.tpot_s for a in completed if a.tpot_s is not None]),
        itl_ms=Distribution.of_seconds([gap for answer in completed for gap in answer.gaps_s]),
        e2el_ms=Distribution.of_seconds([answer.latency_s for answer in completed]),
        goodput=_goodput(result, completed, objectives_ms) if objectives_ms else None,
    )


def _goodput(result: LoadResult, completed: Sequence[Answer], objectives_ms: Mapping[str, float]) -> Goodput:
    good = sum(_meets(answer, objectives_ms) for answer in completed)
    return Goodput(dict(objectives_ms), good, good / len(result.answers), good / result.duration_s)


def _meets(answer: Answer, objectives_ms: Mapping[str, float]) -> bool:
    """Whether an answer keeps all objectives; a time that it does not have (no second token) keeps any."""
    times_s = {"ttft": answer.ttft_s, "tpot": answer.tpot_s, "e2el": answer.latency_s}
    return all((times_s[name] or 0.0) * 1e3 <= limit_ms for name, limit_ms in objectives_ms.items())


def _percentile(ordered: Sequence[float], share: int) -> float:
    """The smallest value with at least `share` percent of the values not above it."""
    return ordered[-(-share * len(ordered) // 100) - 1]
