"""What the task pipeline takes, and why it does not take the rest."""

from dataclasses import dataclass
from enum import StrEnum

from sparkgap.rounds.logits import has_penalties
from sparkgap.rounds.sequence import Sequence


class Refusal(StrEnum):
    """Why an engine, or a sequence's next round, is not for the pipeline."""

    SWITCHED_OFF = "task_pipeline is off"
    NO_CAPTURED_GRAPHS = "passes are not captured as graphs"
    ADAPTIVE_LENGTH = "the number of draft tokens adapts to what pays"
    NOT_SPECULATED = "speculation is switched off for the request"
    SAMPLED_DRAFTS = "draft tokens are sampled"
    LOGPROBS = "log-probabilities are wanted"
    PENALTIES = "a penalty changes the logits"
    LOGIT_BIAS = "logit_bias changes the logits"
    MIN_TOKENS = "min_tokens masks tokens"
    CONTEXT_TOO_LONG = "context longer than the drafter's capacity"
    TOO_MANY_SEQUENCES = "more sequences than the largest graph"


@dataclass(frozen=True)
class EngineFacts:
    """What admission must know of an engine.

    Attributes:
        task_pipeline: the setting: `auto`, `on` or `off`.
        captured: whether passes are captured as graphs.
        speculates: whether there is a drafter.
        samples_drafts: whether it samples draft tokens of sampled requests.
        looks_up: whether drafts are only looked up in a sequence's own past.
        adapts_length: whether the host chooses how many draft tokens a round verifies.
        max_context_length: longest context that the drafter can follow; None without one.
    """

    task_pipeline: str
    captured: bool
    speculates: bool
    samples_drafts: bool
    looks_up: bool
    adapts_length: bool
    max_context_length: int | None


def refusals(facts: EngineFacts, sequence: Sequence | None = None) -> tuple[Refusal, ...]:
    """Why the pipeline does not take an engine or, where one is given, a sequence's next round; empty when it does.

    What it refuses takes the rounds that the host carries from one to the next.
    """
    found = []
    if facts.task_pipeline == "off":
        found.append(Refusal.SWITCHED_OFF)
    if not facts.captured:
        found.append(Refusal.NO_CAPTURED_GRAPHS)
    if facts.adapts_length:
        found.append(Refusal.ADAPTIVE_LENGTH)
    if sequence is not None:
        found += _refusals_of(facts, sequence)
    return tuple(found)


def _refusals_of(facts: EngineFacts, sequence: Sequence) -> list[Refusal]:
    params, found = sequence.params, []
    if (facts.speculates or facts.looks_up) and not params.speculation:
        found.append(Refusal.NOT_SPECULATED)
    if facts.samples_drafts and not params.greedy:
        found.append(Refusal.SAMPLED_DRAFTS)
    if params.logprobs is not None:
        found.append(Refusal.LOGPROBS)
    if has_penalties(params):
        found.append(Refusal.PENALTIES)
    if params.logit_bias:
        found.append(Refusal.LOGIT_BIAS)
    if len(sequence.output_token_ids) < params.min_tokens:
        found.append(Refusal.MIN_TOKENS)
    if facts.max_context_length is not None and sequence.num_computed_tokens > facts.max_context_length:
        found.append(Refusal.CONTEXT_TOO_LONG)
    return found
