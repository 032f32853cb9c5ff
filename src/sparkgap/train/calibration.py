"""Calibration of confidences: sequential temperature scaling (arXiv 2607.05147, section 3.2.1).

A confidence is the probability that a draft token survives given that all before it did, so the product of a block's
first k confidences should be the share of rounds that accept k tokens or more. Place by place, the temperature of the
place is chosen from a grid so that the expected calibration error of that product is least, with the temperatures
before it fixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.train.evaluate import ServedAnswer, round_starts

_BINS = 10
_LARGEST_TEMPERATURE = 8.0
_GRID_STEPS = 60
"""Temperatures tried on either side of 1, evenly in their logarithm."""


@dataclass(frozen=True)
class ConfidenceRounds:
    """Rounds to calibrate on.

    Attributes:
        logits: float64 `[rounds, tokens]`, of the confidences.
        lengths: int64 `[rounds]`, accepted draft tokens.
    """

    logits: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`.

    Attributes:
        temperatures: one for each token of a block; all 1 where calibration did not help.
        fitted_rounds, measured_rounds: rounds that they were chosen on, and other rounds of the errors.
        error_before, error_after: expected calibration error of the probability that so many tokens are accepted, for
            each token of a block.
    """

    temperatures: list[float]
    fitted_rounds: int
    measured_rounds: int
    error_before: list[float]
    error_after: list[float]


def confidence_rounds(answers: Sequence[ServedAnswer], tokens: int) -> ConfidenceRounds | None:
    """The rounds of a greedy replay whose whole block lies inside the answer; None without any or without a head."""
    logits, lengths = [], []
    for answer in answers:
        starts = [place for place in round_starts(answer.lengths) if place + tokens <= len(answer.lengths)]
        if answer.confidences is not None and starts:
            logits.append(torch.special.logit(answer.confidences[starts].double(), eps=1e-7))
            lengths += [answer.lengths[place] for place in starts]
    return ConfidenceRounds(torch.cat(logits), torch.tensor(lengths)) if logits else None


def expected_calibration_error(predicted: Tensor, happened: Tensor) -> float:
    """Mean distance between predicted probabilities and frequencies, over ten equal parts of [0, 1].

    Args:
        predicted: float64 `[rounds]`.
        happened: bool `[rounds]`.
    """
    bins = (predicted * _BINS).long().clamp_max(_BINS - 1)
    difference = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins, predicted - happened.double())
    return float(difference.abs().sum()) / predicted.shape[0]


def survival_errors(rounds: ConfidenceRounds, temperatures: Sequence[float]) -> list[float]:
    """Expected calibration error of the product of the first k confidences, for each k."""
    survival = (rounds.logits / torch.tensor(temperatures, dtype=torch.float64)).sigmoid().cumprod(1)
    return [expected_calibration_error(survival[:, k], rounds.lengths > k) for k in range(survival.shape[1])]


def fit_temperatures(rounds: ConfidenceRounds) -> list[float]:
    """Temperatures of each place of a block, chosen one after the other."""
    exponents = torch.linspace(-1, 1, 2 * _GRID_STEPS + 1, dtype=torch.float64)
    # Among equally good ones, the nearest to 1.
    grid = (_LARGEST_TEMPERATURE ** exponents[exponents.abs().argsort(stable=True)]).tolist()
    survival = torch.ones(rounds.lengths.shape[0], dtype=torch.float64)
    temperatures: list[float] = []
    for k in range(rounds.logits.shape[1]):
        happened = rounds.lengths > k
        products = [survival * (rounds.logits[:, k] / temperature).sigmoid() for temperature in grid]
        errors = [expected_calibration_error(product, happened) for product in products]
        best = min(range(len(grid)), key=errors.__getitem__)
        temperatures.append(grid[best])
        survival = products[best]
    return temperatures


def calibrate(answers: Sequence[ServedAnswer], tokens: int) -> Calibration | None:
    """Choose temperatures on every other answer, and measure them on the rest.

    Args:
        answers: greedy replays with a drafter that is not calibrated yet.
        tokens: draft tokens a round.

    Returns:
        None without a confidence head, or with too few answers.
    """
    fitted, measured = (confidence_rounds(answers[first::2], tokens) for first in (0, 1))
    if fitted is None or measured is None:
        return None
    temperatures, plain = fit_temperatures(fitted), [1.0] * tokens
    before, after = survival_errors(measured, plain), survival_errors(measured, temperatures)
    if sum(after) >= sum(before):
        temperatures, after = plain, before
    return Calibration(temperatures, fitted.lengths.shape[0], measured.lengths.shape[0], before, after)
