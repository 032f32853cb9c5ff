"""How soon tokens come: plain decoding, speculation and other engines, measured in turn.

For each prompt every column answers once before the first answers again. A machine that slows down or speeds up
during the run does so for all of them, and ratios are taken within a turn.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkgap.api import LLM
from sparkgap.bench.builtin_prompts import BUILTIN_PROMPTS
from sparkgap.bench.check import first_difference
from sparkgap.bench.prompts import BenchPrompt, EncodedPrompt
from sparkgap.config import SamplingParams
from sparkgap.errors import ConfigError, PromptError

PLAIN = "plain"
SPECULATIVE = "speculative"

_SETTLE_S = 0.05
"""Pause between two answers: threads of the one before spin on their cores for a while before they sleep."""

_PHASE_SETTLE_S = 0.005

PHASE_WARMUPS = 3
"""Times that phases are run before they are measured."""

_DRAFT_COUNTS = ("draft_rounds", "draft_tokens", "accepted_draft_tokens")


@dataclass(frozen=True)
class Generation:
    """One answer of one column.

    Attributes:
        token_ids: output tokens, at least two.
        ttft_ms: time to the first of them.
        latency_ms: time to the last.
        draft_rounds, accepted_draft_tokens, draft_tokens: of speculation.
    """

    token_ids: list[int]
    ttft_ms: float
    latency_ms: float
    draft_rounds: int = 0
    accepted_draft_tokens: int = 0
    draft_tokens: int = 0

    @property
    def tpot_ms(self) -> float:
        """(latency - time to first token) / (output tokens - 1)."""
        return (self.latency_ms - self.ttft_ms) / (len(self.token_ids) - 1)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens / latency."""
        return len(self.token_ids) / self.latency_ms * 1e3


class Column(Protocol):
    """One way to answer."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What it runs: version, dtype, weights; in JSON's types."""
        ...

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        """Exactly `num_tokens` tokens after a prompt, greedy, past any end of sequence; nothing kept from before."""
        ...


class EngineColumn:
    """Sparkgap's own engine, with speculation where the model was loaded with a drafter.

    Args:
        llm: the model.
        name: of the column; None takes `plain` or `speculative`.
    """

    def __init__(self, llm: LLM, name: str | None = None) -> None:
        self._llm = llm
        self.info = llm.info()
        self.name = name or (PLAIN if self.info["speculation"] is None else SPECULATIVE)

    @property
    def facts(self) -> dict[str, Any]:
        """dtype, quantization, instruction set, drafter and captured graphs."""
        names = ("dtype", "quantization", "instruction_set", "speculation", "graphs")
        return {name: self.info[name] for name in names}

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        """See `Column.generate`. Raises EngineError when computing failed."""
        # Every turn gives the same prompts; each is to be read in full.
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, skip_reading_prefix_cache=True)
        output = self._llm.generate([list(token_ids)], params)[0]
        metrics = output.metrics
        assert metrics is not None
        assert metrics.ttft_ms is not None
        assert not metrics.num_cached_tokens, "a prompt that was not computed is no measure"
        return Generation(
            output.outputs[0].token_ids,
            metrics.ttft_ms,
            metrics.latency_ms,
            metrics.draft_rounds,
            metrics.accepted_draft_tokens,
            metrics.draft_tokens,
        )

    @property
    def graph_counts(self) -> dict[str, Any]:
        """Captures and replays since the model was loaded, as `LLM.graph_counts`."""
        return self._llm.graph_counts()

    def time_phases(self, context_tokens: int, accepted_rows: int) -> dict[str, float]:
        """See `LLM.time_phases`."""
        return self._llm.time_phases(context_tokens, accepted_rows)


@dataclass(frozen=True)
class Turn:
    """Every column's answer to one prompt, one after the other.

    Attributes:
        prompt_id: of the prompt.
        repeat: counts from 0.
        read_bytes_per_s: memory bandwidth measured just before.
        generations: by column, in the order in which they ran.
    """

    prompt_id: str
    repeat: int
    read_bytes_per_s: float
    generations: dict[str, Generation]


def measure_latency(
    columns: Sequence[Column],
    prompts: Sequence[EncodedPrompt],
    *,
    num_tokens: int,
    repeats: int,
    warmups: int,
    read_bandwidth: Callable[[], float],
    pause: Callable[[float], None] = time.sleep,
    advance: Callable[[int], None] = lambda number: None,
) -> list[Turn]:
    """Let the columns answer in turn, all prompts once a repeat.

    Args:
        columns: different names.
        prompts: at least one.
        num_tokens: output tokens of each answer, at least 2.
        repeats: times that every prompt is measured.
        warmups: times that every prompt is answered before, unmeasured.
        read_bandwidth: measures memory bandwidth in bytes/s.
        pause: sleeps for some seconds.
        advance: told how many turns are done.

    Raises:
        EngineError: computing failed.
    """
    turns: list[Turn] = []
    for repeat in range(-warmups, repeats):
        for prompt in prompts:
            bandwidth = read_bandwidth()
            generations: dict[str, Generation] = {}
            for column in columns:
                pause(_SETTLE_S)
                generation = column.generate(prompt.token_ids, num_tokens)
                if len(generation.token_ids) != num_tokens:
                    raise RuntimeError(f"{column.name} gave {len(generation.token_ids)} tokens, not {num_tokens}")
                generations[column.name] = generation
            if repeat >= 0:
                turns.append(Turn(prompt.prompt.id, repeat, bandwidth, generations))
            advance(1)
    return turns


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of at least one value."""
        listed = list(values)
        return cls(statistics.median(listed), min(listed), max(listed))


@dataclass(frozen=True)
class Speedup:
    """How many times as fast as another column, by its time / this one's in each turn.

    Attributes:
        ttft: to the first token.
        tpot: each further token.
        latency: to the last token.
    """

    ttft: Spread
    tpot: Spread
    latency: Spread


@dataclass(frozen=True)
class ColumnSummary:
    """One column over all turns.

    Attributes:
        ttft_ms, tpot_ms, latency_ms, output_tokens_per_s: over its answers.
        draft_rounds: of all answers.
        accepted_per_round: accepted draft tokens / draft rounds; None without any.
        per_request: mean numbers of `draft_rounds`, `draft_tokens` and `accepted_draft_tokens` of an answer; None
            without any.
        acceptance_rate: mean over answers of accepted / verified draft tokens; None without any.
        answers, same_answers: how many there are, and how many have the tokens of plain decoding's first answer to
            the prompt.
        same_leading_tokens: tokens of an answer before the first that differs from those.
        times_floor: time per output token / the floor of the turn; None where the floor says nothing.
        speedup_over: by the other column's name.
    """

    ttft_ms: Spread
    tpot_ms: Spread
    latency_ms: Spread
    output_tokens_per_s: Spread
    draft_rounds: int
    accepted_per_round: float | None
    per_request: dict[str, float] | None
    acceptance_rate: float | None
    answers: int
    same_answers: int
    same_leading_tokens: Spread
    times_floor: Spread | None
    speedup_over: dict[str, Speedup] = field(default_factory=dict)


@dataclass(frozen=True)
class Floor:
    """What memory alone allows: every token of plain decoding reads all weights once.

    It does not count KV cache reads, which grow with the context. Caches that hold a good part of the weights from
    one token to the next can beat it.

    Attributes:
        weight_bytes_per_token: as the engine holds them.
        read_bytes_per_s: measured memory bandwidth.
        tpot_ms: the first / the second.
    """

    weight_bytes_per_token: int
    read_bytes_per_s: Spread
    tpot_ms: float


def floor_of(turns: Sequence[Turn], weight_bytes_per_token: int) -> Floor:
    """The floor at the median of the bandwidths measured."""
    bandwidth = Spread.of(turn.read_bytes_per_s for turn in turns)
    return Floor(weight_bytes_per_token, bandwidth, weight_bytes_per_token / bandwidth.median * 1e3)


def summarize(turns: Sequence[Turn], weight_bytes_per_token: int) -> dict[str, ColumnSummary]:
    """Each column of at least one turn, `plain` among them."""
    plain_answers: dict[str, list[int]] = {}
    for turn in turns:
        plain_answers.setdefault(turn.prompt_id, turn.generations[PLAIN].token_ids)
    return {name: _summary(name, turns, plain_answers, weight_bytes_per_token) for name in turns[0].generations}


def _summary(
    name: str, turns: Sequence[Turn], plain_answers: dict[str, list[int]], weight_bytes_per_token: int
) -> ColumnSummary:
    answers = [turn.generations[name] for turn in turns]
    rounds = sum(answer.draft_rounds for answer in answers)
    differences = [first_difference(plain_answers[turn.prompt_id], turn.generations[name].token_ids) for turn in turns]
    floors_ms = [weight_bytes_per_token / turn.read_bytes_per_s * 1e3 for turn in turns]
    return ColumnSummary(
        ttft_ms=Spread.of(answer.ttft_ms for answer in answers),
        tpot_ms=Spread.of(answer.tpot_ms for answer in answers),
        latency_ms=Spread.of(answer.latency_ms for answer in answers),
        output_tokens_per_s=Spread.of(answer.output_tokens_per_s for answer in answers),
        draft_rounds=rounds,
        accepted_per_round=sum(answer.accepted_draft_tokens for answer in answers) / rounds if rounds else None,
        per_request={name: statistics.fmean(getattr(answer, name) for answer in answers) for name in _DRAFT_COUNTS}
        if rounds
        else None,
        acceptance_rate=statistics.fmean(
            answer.accepted_draft_tokens / answer.draft_tokens for answer in answers if answer.draft_tokens
        )
        if any(answer.draft_tokens for answer in answers)
        else None,
        answers=len(answers),
        same_answers=differences.count(None),
        same_leading_tokens=Spread.of(
            len(answer.token_ids) if place is None else place
            for answer, place in zip(answers, differences, strict=True)
        ),
        times_floor=Spread.of(a.tpot_ms / floor for a, floor in zip(answers, floors_ms, strict=True))
        if name == PLAIN
        else None,
        speedup_over={other: _speedup(turns, name, other) for other in turns[0].generations if other != name},
    )


def _speedup(turns: Sequence[Turn], name: str, other: str) -> Speedup:
    pairs = [(turn.generations[other], turn.generations[name]) for turn in turns]
    return Speedup(
        ttft=Spread.of(base.ttft_ms / own.ttft_ms for base, own in pairs),
        tpot=Spread.of(base.tpot_ms / own.tpot_ms for base, own in pairs),
        latency=Spread.of(base.latency_ms / own.latency_ms for base, own in pairs),
    )


def identical(summaries: dict[str, ColumnSummary], speculative: Sequence[str] = (SPECULATIVE,)) -> bool | None:
    """Whether `speculative` columns gave the tokens of plain decoding in all answers; None without any of them."""
    present = [name for name in speculative if name in summaries]
    if not present:
        return None
    return all(summaries[name].same_answers == summaries[name].answers for name in (PLAIN, *present))


def measure_phases(
    columns: Sequence[EngineColumn],
    summaries: dict[str, ColumnSummary],
    context_tokens: int,
    repeats: int,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, dict[str, Spread]]:
    """Cost of each phase of a round, in milliseconds, by column and phase.

    Columns take turns, and so do the phases of one. Context updates have as many rows as a round of the column accepted
    on average in `summaries`, the target's own token included.

    Raises:
        ConfigError: there is no room for a round after `context_tokens` tokens.
    """
    times: dict[str, dict[str, list[float]]] = {column.name: {} for column in columns}
    for repeat in range(-PHASE_WARMUPS, repeats):
        for column in columns:
            accepted = summaries[column.name].accepted_per_round
            pause(_PHASE_SETTLE_S)
            for phase, time_ms in column.time_phases(context_tokens, 1 + round(accepted or 0)).items():
                if repeat >= 0:
                    times[column.name].setdefault(phase, []).append(time_ms)
    return {name: {phase: Spread.of(values) for phase, values in phases.items()} for name, phases in times.items()}


def synthetic_prompt(llm: LLM, num_tokens: int) -> EncodedPrompt:
    """A prompt of exactly `num_tokens` tokens: the built-in texts, over and over, without a chat template."""
    texts = "\n".join(text for category in BUILTIN_PROMPTS.values() for text in category) + "\n"
    token_ids = llm.tokenizer.encode(texts)
    if not token_ids:
        raise PromptError("the tokenizer gives no tokens for the built-in texts")
    copies = -(-num_tokens // len(token_ids))
    return EncodedPrompt(BenchPrompt(f"{num_tokens} tokens", ""), (token_ids * copies)[:num_tokens])


def check_room(prompts: Sequence[EncodedPrompt], num_tokens: int, max_model_len: int) -> None:
    """Raises ConfigError unless `num_tokens` output tokens fit after every prompt."""
    for prompt in prompts:
        if len(prompt.token_ids) + num_tokens > max_model_len:
            raise ConfigError(
                f"prompt {prompt.prompt.id} has {len(prompt.token_ids)} tokens, and {num_tokens} output tokens do not "
                f"fit in max_model_len {max_model_len}; lower max-tokens or shorten the prompt"
            )
