"""What a request gives back."""

from dataclasses import dataclass, field
from typing import NamedTuple

from sparkgap.config import FinishReason
from sparkgap.errors import EngineError


class Logprob(NamedTuple):
    """Log-probability of one token at one position, from the model's logits before any processing.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the most probable token, and so on.
        decoded_token: the token's text by itself.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a request's prompt: all of it, or what is new since the output before (streaming).

    Attributes:
        index: which of the request's `n` completions.
        text: text without a stop string (unless `include_stop_str_in_output`).
        token_ids: tokens, with the one that ended the completion.
        logprobs: at each token a table of the chosen token and the most probable ones, None when not asked for.
        cumulative_logprob: sum over all tokens so far, None when not asked for.
        finish_reason: why it ended, None while it goes on.
        stop_reason: the stop string or stop token id that ended it; None otherwise, also at end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """A finished request's times and counts.

    Attributes:
        ttft_ms: time from arrival to the first token; None when there was none.
        tpot_ms: (latency - time to first token) / (output tokens - 1), of the longest completion; None below two
            tokens.
        latency_ms: time from arrival to the last token.
        output_tokens_per_s: output tokens of all completions / latency.
        queue_ms: time from arrival until the request got its first KV blocks; None when it never did.
        prompt_tokens: tokens of the prompt.
        num_cached_tokens: how many of them were not computed, because their KV was there.
        completion_tokens: output tokens of all completions.
        preemptions: how often a completion gave up its KV blocks and was recomputed.
        draft_rounds: rounds that verified at least one draft token.
        draft_tokens: draft tokens verified.
        accepted_draft_tokens: draft tokens accepted.
        acceptance_rate: accepted / verified draft tokens; None without any.
        accepted_per_round: accepted draft tokens / draft rounds, without the bonus token; None without any.
        acceptance_by_position: for each place in the draft, the share of all draft rounds that accepted the token
            there; never rises from one place to the next. Rounds that verified fewer tokens count, too.
        not_speculated: rounds that a speculating engine decoded plainly, by reason.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    latency_ms: float
    output_tokens_per_s: float
    prompt_tokens: int
    completion_tokens: int
    queue_ms: float | None = None
    num_cached_tokens: int = 0
    preemptions: int = 0
    draft_rounds: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    acceptance_rate: float | None = None
    accepted_per_round: float | None = None
    acceptance_by_position: list[float] = field(default_factory=list)
    not_speculated: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request, or what is new since its output before (streaming).

    Attributes:
        request_id: as given or assigned.
        prompt: the prompt's text, None when it came as token ids.
        prompt_token_ids: the prompt.
        outputs: completions by index; when streaming only those with something new.
        finished: whether this is the request's last output.
        metrics: of a finished request.
        num_cached_tokens: prompt tokens that were not computed, because their KV was there.
        error: why the request failed; its completions are then what it had so far.
        prompt_logprobs: at each token of the prompt a table of it and the most probable ones, None at the first, which
            follows nothing. None when not asked for, and when streaming in all outputs but the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: EngineError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
