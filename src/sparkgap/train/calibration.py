"""Calibration of confidences, place by place of a block, as sequential temperature scaling (arXiv 2607.05147, 3.2.1).

A confidence is the probability that a draft token survives given that all before it did, so the product of a block's
first k confidences should be the share of rounds that accept k tokens or more. Place by place, the logit of the
confidence is divided by a temperature and moved by an offset, which are chosen so that the product is most likely, with
those of the places before fixed.

The paper has temperatures alone. The head learns the overlap of the two distributions at all places of an answer;
drafts here are verified by exact match, and a round starts where the one before failed. So confidences are wrong as a
whole, and a temperature moves them only towards or away from one half.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.train.evaluate import ServedAnswer, round_starts

_BINS = 10
_LARGEST_TEMPERATURE = 8.0
_TEMPERATURE_STEPS = 12
"""Temperatures tried on either side of 1, evenly in their logarithm."""

_LARGEST_OFFSET = 4.0
_OFFSET_STEPS = 24
"""Offsets tried on either side of 0."""

Scaling = tuple[float, float]
"""Temperature and offset of the logit of a place's confidence."""


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
        temperatures, offsets: one for each token of a block; all 1 and 0 where calibration did not help.
        rounds: rounds that they were chosen on.
        error_before, error_after: expected calibration error of the probability that so many tokens are accepted, for
            each token of a block; afterwards on answers that were left out of the choice (twofold).
    """

    temperatures: list[float]
    offsets: list[float]
    rounds: int
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


def survival_errors(rounds: ConfidenceRounds, scaling: Sequence[Scaling]) -> list[float]:
    """Expected calibration error of the product of the first k confidences, for each k."""
    temperatures, offsets = torch.tensor(scaling, dtype=torch.float64).T
    survival = (rounds.logits / temperatures + offsets).sigmoid().cumprod(1)
    return [expected_calibration_error(survival[:, k], rounds.lengths > k) for k in range(survival.shape[1])]


def fit_scaling(rounds: ConfidenceRounds) -> list[Scaling]:
    """Temperature and offset of each place of a block, chosen one place after the other.

    Of a grid, the likeliest of the product of confidences, with a normal prior around temperature 1 and offset 0 that
    matters where rounds are few.
    """
    exponents = torch.linspace(-1, 1, 2 * _TEMPERATURE_STEPS + 1, dtype=torch.float64)
    temperatures = _LARGEST_TEMPERATURE**exponents
    offsets = torch.linspace(-_LARGEST_OFFSET, _LARGEST_OFFSET, 2 * _OFFSET_STEPS + 1, dtype=torch.float64)
    survival = torch.ones(rounds.lengths.shape[0], dtype=torch.float64)
    scaling: list[Scaling] = []
    for k in range(rounds.logits.shape[1]):
        happened = (rounds.lengths > k).double()
        losses = torch.stack(
            [_loss(survival * (rounds.logits[:, k] / t + offsets[:, None]).sigmoid(), happened) for t in temperatures]
        )
        losses += (temperatures.log()[:, None] ** 2 + offsets**2) / 2
        row, column = divmod(int(losses.argmin()), offsets.shape[0])
        scaling.append((round(float(temperatures[row]), 4), round(float(offsets[column]), 4)))
        survival = survival * (rounds.logits[:, k] / scaling[k][0] + scaling[k][1]).sigmoid()
    return scaling


def _loss(predicted: Tensor, happened: Tensor) -> Tensor:
    """Negative log-likelihood of each row of `predicted` `[rows, rounds]`."""
    predicted = predicted.clamp(1e-12, 1 - 1e-12)
    return -(happened * predicted.log() + (1 - happened) * (-predicted).log1p()).sum(1)


def calibrate(answers: Sequence[ServedAnswer], tokens: int) -> Calibration | None:
    """Choose temperatures and offsets, and measure what such a choice is worth on other answers.

    Args:
        answers: greedy replays with a drafter that is not calibrated yet.
        tokens: draft tokens a round.

    Returns:
        None without a confidence head, or with too few answers.
    """
    halves = [confidence_rounds(answers[first::2], tokens) for first in (0, 1)]
    together = confidence_rounds(answers, tokens)
    if together is None or halves[0] is None or halves[1] is None:
        return None
    scaling, plain = fit_scaling(together), [(1.0, 0.0)] * tokens
    before, after = [0.0] * tokens, [0.0] * tokens
    for fitted, measured in (halves, halves[::-1]):
        assert fitted is not None
        assert measured is not None
        share = measured.lengths.shape[0] / together.lengths.shape[0]
        of_fitted = fit_scaling(fitted)
        before = [a + share * b for a, b in zip(before, survival_errors(measured, plain), strict=True)]
        after = [a + share * b for a, b in zip(after, survival_errors(measured, of_fitted), strict=True)]
    if sum(after) >= sum(before):
        scaling, after = plain, before
    temperatures, offsets = ([pair[part] for pair in scaling] for part in (0, 1))
    return Calibration(temperatures, offsets, together.lengths.shape[0], before, after)
