"""What an engine has done so far and what it holds now, as counts that another thread may read."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkgap.rounds.sequence import RoundOutput


@dataclass
class SpeculationCounts:
    """What speculation did for a request, or for all.

    Attributes:
        rounds: rounds with draft tokens.
        verified, accepted: draft tokens at each place of the draft.
        not_speculated: plain rounds of a speculating engine, by reason.
    """

    rounds: int = 0
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    not_speculated: Counter[str] = field(default_factory=Counter)

    def add(self, output: RoundOutput) -> None:
        """Count one round of one sequence."""
        self.rounds += output.num_draft_tokens > 0
        if (missing := output.num_draft_tokens - len(self.verified)) > 0:
            self.verified += [0] * missing
            self.accepted += [0] * missing
        for place in range(output.num_draft_tokens):
            self.verified[place] += 1
        for place in range(output.num_accepted_tokens):
            self.accepted[place] += 1
        if output.not_speculated is not None:
            self.not_speculated[output.not_speculated] += 1


@dataclass
class EngineCounters:
    """Counts since the engine started; see `EngineStats`."""

    num_decode_rounds: int = 0
    num_prefill_passes: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    last_progress_s: float | None = None
    finished: Counter[str] = field(default_factory=Counter)
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment. A snapshot never changes, so it may be read from any thread.

    Attributes:
        num_running_sequences: sequences that have KV blocks; a request has `n` sequences.
        num_waiting_sequences: sequences that have none, yet or no more.
        num_requests: requests in the engine.
        num_queued_requests: requests none of whose sequences has started.
        num_blocks: KV blocks of the cache.
        num_used_blocks: blocks that running sequences use.
        num_reusable_blocks: free blocks whose content may still be found.
        prefix_cache_queried_tokens: tokens of admitted sequences that were looked for in the cache.
        prefix_cache_hit_tokens: how many of them were found, and not computed.
        num_preemptions: how often a sequence gave up its blocks to be recomputed.
        num_decode_rounds: decode rounds over all sequences together.
        num_prefill_passes: passes over prompt chunks.
        num_prompt_tokens: prompt tokens of requests that have got their first token.
        num_generated_tokens: output tokens.
        num_finished: completions that ended, by finish reason; `error` for those of failed requests.
        num_draft_rounds: rounds with draft tokens, each sequence's counted.
        drafted_by_position: draft tokens that were verified, at each place of the draft.
        accepted_by_position: how many of them were accepted.
        num_not_speculated: plain rounds of a speculating engine, by reason.
        last_progress_s: `time.perf_counter()` when a pass last succeeded; None before the first.
    """

    num_running_sequences: int
    num_waiting_sequences: int
    num_requests: int
    num_queued_requests: int
    num_blocks: int
    num_used_blocks: int
    num_reusable_blocks: int
    prefix_cache_queried_tokens: int
    prefix_cache_hit_tokens: int
    num_preemptions: int
    num_decode_rounds: int
    num_prefill_passes: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_finished: Mapping[str, int]
    num_draft_rounds: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    num_not_speculated: Mapping[str, int]
    last_progress_s: float | None

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that running sequences use, from 0 to 1."""
        return self.num_used_blocks / self.num_blocks

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that were verified."""
        return sum(self.drafted_by_position)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.accepted_by_position)
