"""A request: its completions, its clock and its counts."""

import time
from typing import Literal

from sparkgap.config import SamplingParams
from sparkgap.engine.completion import Completion
from sparkgap.engine.outputs import RequestMetrics, RequestOutput
from sparkgap.engine.stats import SpeculationCounts
from sparkgap.errors import EngineError
from sparkgap.rounds.sequence import RoundOutput

OutputKind = Literal["delta", "final"]
"""Whether a request gives an output at each step with what is new, or one at its end with everything."""


class Request:
    """A prompt with its completions.

    Attributes:
        request_id: unique among the requests in the engine.
        prompt: text, None when it came as token ids.
        prompt_token_ids: the prompt.
        params: how tokens are chosen.
        completions: `params.n` of them.
        output_kind: when outputs are given.
        error: why the request failed.
        num_preemptions: of all completions.
        num_cached_tokens: prompt tokens whose KV was there when the request started.
        speculation: counts over all completions.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        completions: list[Completion],
        output_kind: OutputKind,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.completions = completions
        self.output_kind = output_kind
        self.error: EngineError | None = None
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.speculation = SpeculationCounts()
        self._arrived_s = self._last_token_s = time.perf_counter()
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self._has_given_output = False

    @property
    def is_started(self) -> bool:
        """Whether a completion has been given KV blocks."""
        return self._started_s is not None

    @property
    def has_tokens(self) -> bool:
        """Whether a first token has come."""
        return self._first_token_s is not None

    @property
    def deadline_s(self) -> float | None:
        """When the request is to end, by `time.perf_counter()`; None if it may run."""
        return None if self.params.deadline_s is None else self._arrived_s + self.params.deadline_s

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(completion.finished for completion in self.completions)

    def start_clock(self) -> None:
        """The request arrives now."""
        self._arrived_s = self._last_token_s = time.perf_counter()

    def start(self, num_cached_tokens: int) -> None:
        """The first completion has got its KV blocks, with the content of so many tokens."""
        self._started_s = time.perf_counter()
        self.num_cached_tokens = num_cached_tokens

    def append(self, completion: Completion, output: RoundOutput) -> None:
        """Give a completion what a round made."""
        self.speculation.add(output)
        completion.append_tokens(output.tokens)
        self._last_token_s = time.perf_counter()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s

    def output(self) -> RequestOutput | None:
        """What there is to give now, None if nothing."""
        if self.output_kind == "final":
            outputs = [completion.whole() for completion in self.completions] if self.finished else []
        else:
            outputs = [new for completion in self.completions if (new := completion.take_new()) is not None]
        if not outputs:
            return None
        is_first, self._has_given_output = not self._has_given_output, True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            metrics=self.metrics() if self.finished else None,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            prompt_logprobs=self.completions[0].prompt_logprobs() if is_first else None,
        )

    def metrics(self) -> RequestMetrics:
        """Times and counts up to now."""
        lengths = [len(completion.sequence.output_token_ids) for completion in self.completions]
        latency_s = self._last_token_s - self._arrived_s
        ttft_s = None if self._first_token_s is None else self._first_token_s - self._arrived_s
        decoded = max(lengths) - 1
        counts = self.speculation
        verified, accepted = sum(counts.verified), sum(counts.accepted)
        return RequestMetrics(
            ttft_ms=None if ttft_s is None else ttft_s * 1e3,
            tpot_ms=None if ttft_s is None or decoded < 1 else (latency_s - ttft_s) * 1e3 / decoded,
            latency_ms=latency_s * 1e3,
            output_tokens_per_s=sum(lengths) / latency_s if latency_s else 0.0,
            queue_ms=None if self._started_s is None else (self._started_s - self._arrived_s) * 1e3,
            prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            completion_tokens=sum(lengths),
            preemptions=self.num_preemptions,
            draft_rounds=counts.rounds,
            draft_tokens=verified,
            accepted_draft_tokens=accepted,
            acceptance_rate=accepted / verified if verified else None,
            accepted_per_round=accepted / counts.rounds if counts.rounds else None,
            acceptance_by_position=[number / counts.rounds for number in counts.accepted],
            not_speculated=dict(counts.not_speculated),
        )
