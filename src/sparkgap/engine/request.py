"""A request: its completions, its clock and its counts."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from sparkgap.config import SamplingParams
from sparkgap.engine.completion import Completion
from sparkgap.engine.outputs import RequestMetrics, RequestOutput
from sparkgap.errors import EngineError
from sparkgap.rounds.sequence import RoundOutput

OutputKind = Literal["delta", "final"]
"""Whether a request gives an output at each step with what is new, or one at its end with everything."""


@dataclass
class SpeculationCounts:
    """What speculation did for a request.

    Attributes:
        rounds: rounds with draft tokens.
        verified, accepted: draft tokens at each place of the draft.
        not_speculated: plain rounds of a speculating engine, by reason.
    """

    rounds: int = 0
    verified: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    not_speculated: Counter[str] = field(default_factory=Counter)

    def add(self, output: RoundOutput) -> None:
        """Count one round of one sequence."""
        self.rounds += output.num_draft_tokens > 0
        self.verified.update(range(output.num_draft_tokens))
        self.accepted.update(range(output.num_accepted_tokens))
        if output.not_speculated is not None:
            self.not_speculated[output.not_speculated] += 1


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
        self.speculation = SpeculationCounts()
        self._arrived_s = self._last_token_s = time.perf_counter()
        self._first_token_s: float | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(completion.finished for completion in self.completions)

    def start_clock(self) -> None:
        """The request arrives now."""
        self._arrived_s = self._last_token_s = time.perf_counter()

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
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            metrics=self.metrics() if self.finished else None,
            error=self.error,
        )

    def metrics(self) -> RequestMetrics:
        """Times and counts up to now."""
        lengths = [len(completion.sequence.output_token_ids) for completion in self.completions]
        latency_s = self._last_token_s - self._arrived_s
        ttft_s = None if self._first_token_s is None else self._first_token_s - self._arrived_s
        decoded = max(lengths) - 1
        counts = self.speculation
        verified, accepted = counts.verified.total(), counts.accepted.total()
        return RequestMetrics(
            ttft_ms=None if ttft_s is None else ttft_s * 1e3,
            tpot_ms=None if ttft_s is None or decoded < 1 else (latency_s - ttft_s) * 1e3 / decoded,
            latency_ms=latency_s * 1e3,
            output_tokens_per_s=sum(lengths) / latency_s if latency_s else 0.0,
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(lengths),
            preemptions=self.num_preemptions,
            draft_rounds=counts.rounds,
            draft_tokens=verified,
            accepted_draft_tokens=accepted,
            acceptance_rate=accepted / verified if verified else None,
            accepted_per_round=accepted / counts.rounds if counts.rounds else None,
            acceptance_by_position=[counts.accepted[k] / counts.rounds for k in sorted(counts.verified)],
            not_speculated=dict(counts.not_speculated),
        )
