"""Whether sampled output has the target's distribution: samples with speculation against exact probabilities.

An answer's first token comes from the prompt's own pass; the tokens after it come from speculative rounds. So the
first three tokens are sampled, many times, and each is tested given the tokens before it. Where many samples begin
alike, how often each token follows is compared with the target's probabilities there. All other samples are tested
together: how often each token follows, with the sum of its probabilities after their beginnings. So no sample is lost.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.api import LLM
from sparkgap.bench.prompts import EncodedPrompt
from sparkgap.config import SamplingParams

HORIZON_TOKENS = 3
"""Tokens of each sample."""

DRAFT_TOKENS = HORIZON_TOKENS - 1
"""Draft tokens that can be among them."""

FEWEST_SAMPLES = 50
"""Below this no test is made."""

_LEAST_EXPECTED = 5.0
"""Tokens expected less often than this share one cell."""

_TEXTS_TOGETHER = 64
"""Beginnings whose distributions are computed in one pass."""


@dataclass(frozen=True)
class DistributionTest:
    """A chi-square test of one token of an answer.

    Attributes:
        prompt_id: of the prompt.
        place: 1 for the answer's first token (no speculation), 2 and 3 for speculated ones.
        num_samples: samples tested, which are all.
        num_beginnings: different texts before the token.
        num_cells: of the test; tokens that are rare share one.
        statistic: chi-square; infinite when a token of probability 0 was drawn.
        p_value: how likely a right sampler is to deviate as much, or a bound on that; None when there are too few
            samples, or nearly always the same token.
    """

    prompt_id: str
    place: int
    num_samples: int
    num_beginnings: int
    num_cells: int
    statistic: float
    p_value: float | None


@dataclass(frozen=True)
class DistributionCheck:
    """The tests of one prompt, and how many rounds speculated for it."""

    tests: list[DistributionTest]
    draft_rounds: int


def check_distribution(
    llm: LLM,
    prompt: EncodedPrompt,
    *,
    temperature: float,
    num_samples: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda number: None,
) -> DistributionCheck:
    """Sample the beginning of a prompt's answer `num_samples` times with speculation, and test it.

    Args:
        llm: a model with a drafter.
        prompt: what is continued.
        temperature: above 0.
        num_samples: answers, each with a seed of its own.
        batch_size: answers that are sampled together.
        advance: told how many samples are done.

    Raises:
        EngineError: computing failed.
    """
    samples: list[list[int]] = []
    rounds = 0
    for start in range(0, num_samples, batch_size):
        seeds = range(start, min(start + batch_size, num_samples))
        params = [
            SamplingParams(temperature=temperature, max_tokens=HORIZON_TOKENS, seed=seed, ignore_eos=True)
            for seed in seeds
        ]
        for output in llm.generate([prompt.token_ids] * len(params), params):
            samples.append(output.outputs[0].token_ids)
            rounds += 0 if output.metrics is None else output.metrics.draft_rounds
        advance(len(params))
    tests = [_test(llm, prompt, place, samples, temperature) for place in range(1, HORIZON_TOKENS + 1)]
    return DistributionCheck(tests, rounds)


def _test(
    llm: LLM, prompt: EncodedPrompt, place: int, samples: Sequence[Sequence[int]], temperature: float
) -> DistributionTest:
    following: dict[tuple[int, ...], Counter[int]] = {}
    for sample in samples:
        following.setdefault(tuple(sample[: place - 1]), Counter())[sample[place - 1]] += 1
    groups = _Groups()
    beginnings = list(following)
    for start in range(0, len(beginnings), _TEXTS_TOGETHER):
        part = beginnings[start : start + _TEXTS_TOGETHER]
        texts = [[*prompt.token_ids, *beginning] for beginning in part]
        exact = llm.next_token_probabilities(texts, SamplingParams(temperature=temperature))
        for beginning, probabilities in zip(part, exact, strict=True):
            groups.add(following[beginning], probabilities)
    statistic, num_cells, p_value = groups.test() if len(samples) >= FEWEST_SAMPLES else (0.0, 0, None)
    return DistributionTest(prompt.prompt.id, place, len(samples), len(beginnings), num_cells, statistic, p_value)


class _Groups:
    """Counts of tokens beside how often they are expected: each frequent beginning by itself, the others together.

    Draws from several distributions vary less than as many from their mean, so a test of them together finds a right
    sampler wrong more seldom than its p-value says, never more often.
    """

    def __init__(self) -> None:
        self._alone: list[tuple[Tensor, Tensor]] = []
        self._others: tuple[Tensor, Tensor] | None = None
        self._impossible = False

    def add(self, counts: Mapping[int, int], probabilities: Tensor) -> None:
        """Tokens that followed one beginning, and the distribution there, `[vocab]`."""
        exact = probabilities.to(torch.float64).cpu()
        observed = torch.zeros_like(exact)
        observed[torch.tensor(list(counts))] = torch.tensor(list(counts.values()), dtype=torch.float64)
        self._impossible |= bool(observed[exact == 0].any())
        expected = exact / exact.sum() * observed.sum()
        if float(observed.sum()) >= FEWEST_SAMPLES:
            self._alone.append((observed, expected))
        elif self._others is None:
            self._others = observed, expected
        else:
            self._others[0].add_(observed)
            self._others[1].add_(expected)

    def test(self) -> tuple[float, int, float | None]:
        """Statistic, number of cells, and p-value, as in `DistributionTest`."""
        if self._impossible:
            return float("inf"), 0, 0.0
        parts = [chi_square(*group) for group in (*self._alone, *([self._others] if self._others else []))]
        freedom = sum(cells - 1 for _, cells in parts)
        statistic = sum(statistic for statistic, _ in parts)
        if not freedom:
            return 0.0, len(parts), None
        half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
        return statistic, freedom + len(parts), float(torch.special.gammaincc(half[0], half[1]))


def chi_square(observed: Tensor, expected: Tensor) -> tuple[float, int]:
    """Pearson's statistic of counts `[vocab]`, and the number of cells.

    Args:
        observed, expected: float64 `[vocab]` of equal sums; `observed` is 0 where `expected` is.
    """
    alone = expected >= _LEAST_EXPECTED
    cells = [(observed[alone], expected[alone])]
    rest = expected[~alone].sum()
    if float(rest) >= _LEAST_EXPECTED or not bool(alone.any()):
        cells.append((observed[~alone].sum()[None], rest[None]))
    else:
        # Too little for a cell of its own: it goes to the rarest one.
        rarest = int(cells[0][1].argmin())
        cells[0][0][rarest] += observed[~alone].sum()
        cells[0][1][rarest] += rest
    seen, wanted = (torch.cat(parts) for parts in zip(*cells, strict=True))
    return float(((seen - wanted) ** 2 / wanted).sum()), len(seen)
