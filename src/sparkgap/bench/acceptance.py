"""How many draft tokens a target accepts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sparkgap.api import LLM
from sparkgap.bench.prompts import EncodedPrompt, batches
from sparkgap.config import SamplingParams
from sparkgap.engine.outputs import RequestMetrics

Measured = tuple[EncodedPrompt, RequestMetrics]
"""A prompt and the counts of its request."""


@dataclass(frozen=True)
class Acceptance:
    """Counts and rates over some prompts.

    Attributes:
        num_prompts: prompts.
        completion_tokens: output tokens.
        draft_rounds: rounds that verified draft tokens.
        draft_tokens, accepted_draft_tokens: draft tokens verified, and accepted.
        acceptance_rate: mean over requests of accepted / verified draft tokens; None without any.
        accepted_per_round: accepted draft tokens / draft rounds, without the bonus token; None without any.
        tokens_per_round: the same with the target's own token of each round.
        acceptance_by_position: for each place in the draft, the share of all rounds that accepted the token there.
        conditional_acceptance: the share of those rounds that had accepted all tokens before; None where there was
            no such round.
        not_speculated: plain rounds, by reason.
    """

    num_prompts: int
    completion_tokens: int
    draft_rounds: int
    draft_tokens: int
    accepted_draft_tokens: int
    acceptance_rate: float | None
    accepted_per_round: float | None
    tokens_per_round: float | None
    acceptance_by_position: list[float] = field(default_factory=list)
    conditional_acceptance: list[float | None] = field(default_factory=list)
    not_speculated: dict[str, int] = field(default_factory=dict)


def measure_acceptance(
    llm: LLM,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    *,
    batch_size: int,
    advance: Callable[[int], None] = lambda number: None,
) -> list[Measured]:
    """Complete every prompt with speculation.

    Args:
        llm: a model with a drafter.
        prompts: at least one.
        params: how tokens are chosen, and how many.
        batch_size: prompts that run together.
        advance: told how many prompts are done.

    Raises:
        EngineError: computing failed.
    """
    measured: list[Measured] = []
    for group in batches(prompts, batch_size):
        for prompt, output in zip(group, llm.generate([prompt.token_ids for prompt in group], params), strict=True):
            assert output.metrics is not None
            measured.append((prompt, output.metrics))
        advance(len(group))
    return measured


def by_category(measured: Sequence[Measured]) -> dict[str, Acceptance]:
    """Each category by itself, in the order of the prompts; those without one are left out."""
    groups: dict[str, list[RequestMetrics]] = {}
    for prompt, metrics in measured:
        if prompt.prompt.category is not None:
            groups.setdefault(prompt.prompt.category, []).append(metrics)
    return {category: summarize(requests) for category, requests in groups.items()}


def summarize(requests: Sequence[RequestMetrics]) -> Acceptance:
    """The rates of several requests together."""
    rounds = sum(request.draft_rounds for request in requests)
    accepted = sum(request.accepted_draft_tokens for request in requests)
    rates = [request.acceptance_rate for request in requests if request.acceptance_rate is not None]
    at_place = _accepted_at_each_place(requests)
    not_speculated: Counter[str] = Counter()
    for request in requests:
        not_speculated.update(request.not_speculated)
    return Acceptance(
        num_prompts=len(requests),
        completion_tokens=sum(request.completion_tokens for request in requests),
        draft_rounds=rounds,
        draft_tokens=sum(request.draft_tokens for request in requests),
        accepted_draft_tokens=accepted,
        acceptance_rate=sum(rates) / len(rates) if rates else None,
        accepted_per_round=accepted / rounds if rounds else None,
        tokens_per_round=(accepted + rounds) / rounds if rounds else None,
        acceptance_by_position=[number / rounds for number in at_place],
        conditional_acceptance=[
            number / before if before else None for before, number in zip([rounds, *at_place], at_place, strict=False)
        ],
        not_speculated=dict(not_speculated),
    )


def _accepted_at_each_place(requests: Sequence[RequestMetrics]) -> list[int]:
    """Rounds that accepted the draft token at each place, over all requests."""
    counts: Counter[int] = Counter()
    for request in requests:
        for place, share in enumerate(request.acceptance_by_position):
            counts[place] += round(share * request.draft_rounds)
    return [counts[place] for place in range(len(counts))]
