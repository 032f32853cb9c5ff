"""What `/metrics` tells Prometheus. Names and meanings are vLLM's, with the prefix `sparkgap:`."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sparkgap import __version__
from sparkgap.async_llm import AsyncLLM
from sparkgap.engine.outputs import RequestMetrics
from sparkgap.server.state import ServerState

_PREFIX = "sparkgap:"
_LATENCY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480)
_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
_TOKEN_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class ServerMetrics:
    """Counts and times of requests, and the engine's own numbers as they are when somebody asks."""

    def __init__(self, state: ServerState) -> None:
        # Times of creation would be half of all lines.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_BUCKETS_S
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds",
            "Between outputs of a request; a round gives one or more tokens.",
            _TOKEN_BUCKETS_S,
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "(latency - time to first token) / (tokens - 1).", _TOKEN_BUCKETS_S
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token.", _LATENCY_BUCKETS_S
        )
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _COUNT_BUCKETS)
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a request.", _COUNT_BUCKETS
        )
        self._finished = Counter(
            f"{_PREFIX}request_success", "Completions by what ended them.", ["finished_reason"], registry=self.registry
        )
        self._failed = Counter(
            f"{_PREFIX}request_failure", "Requests that failed in computing.", registry=self.registry
        )
        self._responses = Counter(
            f"{_PREFIX}http_requests", "HTTP requests.", ["method", "handler", "status"], registry=self.registry
        )
        self.registry.register(_EngineCollector(state))

    def first_token(self, seconds: float) -> None:
        """Time from a request's arrival to its first token."""
        self._first_token.observe(seconds)

    def gap(self, seconds: float) -> None:
        """Time between two outputs of a request."""
        self._gap.observe(seconds)

    def finished(self, metrics: RequestMetrics, reasons: Sequence[str], latency_s: float) -> None:
        """A request has ended, its completions for these reasons."""
        for reason in reasons:
            self._finished.labels(reason).inc()
        self._latency.observe(latency_s)
        self._prompt_tokens.observe(metrics.prompt_tokens)
        self._generation_tokens.observe(metrics.completion_tokens)
        if metrics.tpot_ms is not None:
            self._per_token.observe(metrics.tpot_ms / 1000)

    def aborted(self, number: int) -> None:
        """So many completions were given up: the client went away, or time was over."""
        self._finished.labels("abort").inc(number)

    def failed(self) -> None:
        """Computing a request failed."""
        self._failed.inc()

    def responded(self, method: str, handler: str, status: int) -> None:
        """A request was answered by the route `handler`."""
        self._responses.labels(method, handler, str(status)).inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)


class _EngineCollector:
    """The engine's numbers, read when they are asked for."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """All of them; before the model is loaded, whether the server is healthy."""
        yield _gauge("healthy", "Whether /health says so.", float(self._state.health().healthy))
        if not self._state.is_loaded:
            return
        llm = self._state.llm
        info = GaugeMetricFamily(f"{_PREFIX}build_info", "Version and model.", labels=["version", "model_name"])
        info.add_metric([__version__, self._state.model_name], 1)
        yield info
        yield from _engine_metrics(llm)
        yield from _speculation_metrics(llm)
        yield from _graph_metrics(llm)


def _engine_metrics(llm: AsyncLLM) -> Iterator[Metric]:
    stats = llm.stats
    num_waiting = max(llm.num_unfinished_seqs - stats.num_running_sequences, 0)
    yield _gauge("num_requests_running", "Sequences that have KV blocks.", stats.num_running_sequences)
    yield _gauge("num_requests_waiting", "Sequences without KV blocks.", num_waiting)
    yield _gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use, 1 is all.", stats.kv_cache_usage)
    yield _counter("num_preemptions", "Sequences that gave up their KV blocks.", stats.num_preemptions)
    yield _counter("prompt_tokens", "Prompt tokens of requests that got a token.", stats.num_prompt_tokens)
    yield _counter("generation_tokens", "Output tokens.", stats.num_generated_tokens)
    yield _counter("prefix_cache_queries", "Tokens looked for in the KV cache.", stats.prefix_cache_queried_tokens)
    yield _counter("prefix_cache_hits", "Tokens found there, and not computed.", stats.prefix_cache_hit_tokens)
    yield _counter("decode_rounds", "Decode rounds, over all sequences together.", stats.num_decode_rounds)
    yield _counter("prefill_passes", "Passes over prompts.", stats.num_prefill_passes)


def _speculation_metrics(llm: AsyncLLM) -> Iterator[Metric]:
    stats = llm.stats
    yield _counter("spec_decode_num_drafts", "Rounds that verified draft tokens.", stats.num_draft_rounds)
    yield _counter("spec_decode_num_draft_tokens", "Draft tokens verified.", stats.num_draft_tokens)
    yield _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.num_accepted_tokens)
    by_position = CounterMetricFamily(
        f"{_PREFIX}spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at a position.", labels=["position"]
    )
    for position, number in enumerate(stats.accepted_by_position):
        by_position.add_metric([str(position)], number)
    yield by_position
    plain = CounterMetricFamily(
        f"{_PREFIX}spec_decode_num_plain_rounds", "Rounds of a speculating engine without a draft.", labels=["reason"]
    )
    for reason, number in stats.num_not_speculated.items():
        plain.add_metric([reason], number)
    yield plain


def _graph_metrics(llm: AsyncLLM) -> Iterator[Metric]:
    counts = llm.graph_counts()
    captures = CounterMetricFamily(f"{_PREFIX}graph_captures", "Graphs captured.", labels=["when"])
    captures.add_metric(["startup"], counts["captures_at_startup"])
    captures.add_metric(["since_startup"], counts["captures_since_startup"])
    yield captures
    replays = CounterMetricFamily(f"{_PREFIX}graph_replays", "Passes replayed from graphs.", labels=["family"])
    for family, number in counts["replays"].items():
        replays.add_metric([family], number)
    yield replays
    eager = CounterMetricFamily(f"{_PREFIX}graph_eager", "Decode passes computed eagerly.", labels=["reason"])
    for reason, number in counts["eager"].items():
        eager.add_metric([reason], number)
    yield eager


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=value)
