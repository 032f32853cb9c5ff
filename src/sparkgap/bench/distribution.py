"""Whether sampled output has the target's distribution: samples with speculation against exact probabilities.

An answer's first token comes from the prompt's own pass; the tokens after it come from speculative rounds. So three
tokens are sampled, many times, and each is tested where the tokens before it are the most probable ones: given what
stands before, the target's probabilities are exact, and few samples are lost.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.api import LLM
from sparkgap.bench.prompts import EncodedPrompt
from sparkgap.config import SamplingParams

HORIZON_TOKENS = 3
"""Tokens of each sample."""

FEWEST_SAMPLES = 50
"""Below this no test is made."""

_LEAST_EXPECTED = 5.0
"""Tokens expected less often than this share one cell."""


@dataclass(frozen=True)
class DistributionTest:
    """A chi-square test of one token of an answer.

    Attributes:
        prompt_id: of the prompt.
        place: 1 for the answer's first token (no speculation), 2 and 3 for speculated ones.
        given: the answer's tokens before it.
        num_samples: samples that begin with `given`.
        num_cells: cells of the test; tokens that are rare share one.
        statistic: chi-square.
        p_value: how likely a right sampler is to deviate as much; None when there are too few samples or cells to say.
    """

    prompt_id: str
    place: int
    given: list[int]
    num_samples: int
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
    samples: list[tuple[int, ...]] = []
    rounds = 0
    for start in range(0, num_samples, batch_size):
        seeds = range(start, min(start + batch_size, num_samples))
        params = [
            SamplingParams(temperature=temperature, max_tokens=HORIZON_TOKENS, seed=seed, ignore_eos=True)
            for seed in seeds
        ]
        for output in llm.generate([prompt.token_ids] * len(params), params):
            samples.append(tuple(output.outputs[0].token_ids))
            rounds += 0 if output.metrics is None else output.metrics.draft_rounds
        advance(len(params))
    given: list[int] = []
    tests = []
    for place in range(1, HORIZON_TOKENS + 1):
        exact = llm.next_token_probabilities([*prompt.token_ids, *given], SamplingParams(temperature=temperature))
        following = Counter(sample[place - 1] for sample in samples if sample[: place - 1] == tuple(given))
        tests.append(_test(prompt.prompt.id, place, list(given), following, exact))
        given.append(int(exact.argmax()))
    return DistributionCheck(tests, rounds)


def _test(
    prompt_id: str, place: int, given: list[int], counts: Mapping[int, int], probabilities: Tensor
) -> DistributionTest:
    num_samples = sum(counts.values())
    statistic, cells, p_value = chi_square(counts, probabilities) if num_samples >= FEWEST_SAMPLES else (0.0, 0, None)
    return DistributionTest(prompt_id, place, given, num_samples, cells, statistic, p_value)


def chi_square(counts: Mapping[int, int], probabilities: Tensor) -> tuple[float, int, float | None]:
    """Pearson's test of `counts` by token id against `probabilities` `[vocab]`.

    Returns:
        The statistic, the number of cells, and the p-value: 0 when a token of probability 0 was drawn, None with one
        cell.
    """
    exact = probabilities.to(torch.float64).cpu()
    observed = torch.zeros_like(exact)
    for token_id, number in counts.items():
        observed[token_id] = number
    if bool(observed[exact == 0].any()):
        return float("inf"), 0, 0.0
    expected = exact / exact.sum() * observed.sum()
    alone = expected >= _LEAST_EXPECTED
    cells = [(observed[alone], expected[alone])]
    rest = expected[~alone].sum()
    if float(rest) >= _LEAST_EXPECTED:
        cells.append((observed[~alone].sum()[None], rest[None]))
    elif bool(alone.any()):
        # Too little for a cell of its own: it goes to the rarest one.
        rarest = int(cells[0][1].argmin())
        cells[0][0][rarest] += observed[~alone].sum()
        cells[0][1][rarest] += rest
    seen, wanted = (torch.cat(parts) for parts in zip(*cells, strict=True))
    if len(seen) < 2:
        return 0.0, len(seen), None
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(statistic), len(seen), float(torch.special.gammaincc(freedom, statistic / 2))
