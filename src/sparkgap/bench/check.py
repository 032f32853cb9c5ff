"""Whether greedy output is the same token ids with and without speculation.

Requests without speculation take plain rounds, in the row shapes of an engine that has no drafter. As rows are
independent, plain tokens are the same at every batch size and in every execution mode: one plain run (`decode_plain`)
serves many checks of the same target.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from sparkgap.api import LLM
from sparkgap.bench.prompts import EncodedPrompt, batches
from sparkgap.config import SamplingParams
from sparkgap.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sparkgap.errors import ConfigError

_CONTINUATION_TOKENS = 16
"""Most tokens of each continuation that a difference shows."""

_ALTERNATIVES = 2


@dataclass(frozen=True)
class Candidate:
    """One of a run's most probable tokens at a position."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True)
class Side:
    """One run's view of a difference.

    Attributes:
        token_ids: its tokens from the difference on, at most 16; empty where it had ended.
        text: the text of these.
        top: its two most probable tokens there, best first; empty where it had ended, or when a second run, made to
            record them, did not give the same tokens again.
        margin: difference of their log-probabilities, which is that of their logits; None without `top`.
    """

    token_ids: list[int]
    text: str
    top: list[Candidate]
    margin: float | None


@dataclass(frozen=True)
class Difference:
    """Where the two runs of a prompt part.

    Attributes:
        prompt_id: of the prompt.
        batch_size: prompts that ran together.
        position: number of output tokens before the first that differs.
        plain, speculative: the two runs from there on.
    """

    prompt_id: str
    batch_size: int
    position: int
    plain: Side
    speculative: Side


@dataclass(frozen=True)
class BatchCheck:
    """The comparison at one batch size.

    Attributes:
        batch_size: prompts that ran together.
        num_prompts: prompts compared.
        num_tokens: output tokens compared, of the runs without speculation.
        draft_rounds, draft_tokens, accepted_draft_tokens: of the runs with speculation.
        not_speculated: plain rounds of the runs with speculation, by reason.
        differences: one for each prompt that differs.
        digest: SHA-256 of all token ids of the runs with speculation; two checks of the same prompts with equal
            digests had the same tokens.
    """

    batch_size: int
    num_prompts: int
    num_tokens: int
    draft_rounds: int
    draft_tokens: int
    accepted_draft_tokens: int
    not_speculated: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    digest: str = ""


def decode_plain(
    llm: LLM,
    prompts: Sequence[EncodedPrompt],
    *,
    max_tokens: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda number: None,
) -> list[list[int]]:
    """Token ids of every prompt's greedy answer without speculation.

    Args:
        llm: with a drafter or without.
        prompts, max_tokens, batch_size, advance: as `check_greedy`.

    Raises:
        EngineError: computing failed.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, speculation=False)
    answers = []
    for group in batches(prompts, batch_size):
        answers += [_token_ids(output) for output in _complete(llm, group, params)]
        advance(len(group))
    return answers


def check_greedy(
    llm: LLM,
    prompts: Sequence[EncodedPrompt],
    *,
    max_tokens: int,
    batch_size: int,
    plain: Sequence[list[int]] | None = None,
    advance: Callable[[int], None] = lambda number: None,
) -> BatchCheck:
    """Complete every prompt with speculation, and compare token ids with those without.

    Args:
        llm: a model with a drafter.
        prompts: at least one.
        max_tokens: most output tokens of each.
        batch_size: prompts that run together.
        plain: what `decode_plain` gave for these prompts and `max_tokens`; None decodes plainly on `llm`, at the same
            batch size.
        advance: told how many prompts are done.

    Raises:
        ConfigError: nothing was speculated, so the comparison would show nothing.
        EngineError: computing failed.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    num_tokens, digest, done = 0, sha256(), 0
    metrics: list[RequestMetrics] = []
    differences: list[Difference] = []
    for group in batches(prompts, batch_size):
        if plain is None:
            expected = decode_plain(llm, group, max_tokens=max_tokens, batch_size=batch_size)
        else:
            expected = list(plain[done : done + len(group)])
        outputs = _complete(llm, group, params)
        answers = [_token_ids(output) for output in outputs]
        num_tokens += sum(len(token_ids) for token_ids in expected)
        for token_ids in answers:
            digest.update(repr(token_ids).encode())
        metrics += [output.metrics for output in outputs if output.metrics is not None]
        differences += _differences(llm, group, params, batch_size, expected, answers)
        done += len(group)
        advance(len(group))
    not_speculated: Counter[str] = Counter()
    for request in metrics:
        not_speculated.update(request.not_speculated)
    rounds = sum(request.draft_rounds for request in metrics)
    if not rounds:
        reasons = ", ".join(not_speculated) or "every answer ended with its first token"
        raise ConfigError(f"no prompt was decoded with speculation, so nothing was checked: {reasons}")
    return BatchCheck(
        batch_size=batch_size,
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        draft_rounds=rounds,
        draft_tokens=sum(request.draft_tokens for request in metrics),
        accepted_draft_tokens=sum(request.accepted_draft_tokens for request in metrics),
        not_speculated=dict(not_speculated),
        differences=differences,
        digest=digest.hexdigest(),
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter ends; None when both are the same."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _complete(llm: LLM, group: Sequence[EncodedPrompt], params: SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate([prompt.token_ids for prompt in group], params)
    if not params.speculation and any(output.metrics is None or output.metrics.draft_rounds for output in outputs):
        raise RuntimeError("a request without speculation was decoded with it")
    return outputs


def _completion(output: RequestOutput) -> CompletionOutput:
    return output.outputs[0]


def _token_ids(output: RequestOutput) -> list[int]:
    return _completion(output).token_ids


def _differences(
    llm: LLM,
    group: Sequence[EncodedPrompt],
    params: SamplingParams,
    batch_size: int,
    plain: Sequence[list[int]],
    speculative: Sequence[list[int]],
) -> list[Difference]:
    positions = [first_difference(a, b) for a, b in zip(plain, speculative, strict=True)]
    if all(position is None for position in positions):
        return []
    # What is compared runs as users run it; log-probabilities come from a second run of the same batch.
    recording = replace(params, logprobs=_ALTERNATIVES)
    plain_again = _complete(llm, group, replace(recording, speculation=False))
    speculative_again = _complete(llm, group, recording)
    return [
        Difference(
            prompt_id=group[index].prompt.id,
            batch_size=batch_size,
            position=position,
            plain=_side(llm, position, plain[index], _completion(plain_again[index])),
            speculative=_side(llm, position, speculative[index], _completion(speculative_again[index])),
        )
        for index, position in enumerate(positions)
        if position is not None
    ]


def _side(llm: LLM, position: int, answer: list[int], again: CompletionOutput) -> Side:
    token_ids = answer[position : position + _CONTINUATION_TOKENS]
    top: list[Candidate] = []
    repeated = answer[: position + 1] == again.token_ids[: position + 1]
    if token_ids and repeated and again.logprobs is not None:
        table = sorted(again.logprobs[position].items(), key=lambda item: item[1].rank)
        top = [Candidate(token_id, entry.decoded_token, entry.logprob) for token_id, entry in table[:_ALTERNATIVES]]
    margin = top[0].logprob - top[1].logprob if len(top) == _ALTERNATIVES else None
    return Side(token_ids, llm.tokenizer.decode(token_ids, skip_special_tokens=False), top, margin)
