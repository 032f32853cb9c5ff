"""Sequential temperature scaling finds what distorts confidences, and the served drafter applies it."""

import pytest
import torch

from sparkgap.train.calibration import (
    ConfidenceRounds,
    calibrate,
    confidence_rounds,
    expected_calibration_error,
    fit_temperatures,
    survival_errors,
)
from sparkgap.train.evaluate import ServedAnswer, acceptance, round_starts

DISTORTIONS = (0.5, 2.0, 3.0)
"""What the logits of each place were multiplied by; the temperatures undo it."""


def distorted(rounds, seed):
    """Rounds in which draft k survives with a known probability, and logits that exaggerate or understate it."""
    generator = torch.Generator().manual_seed(seed)
    true = 1.5 * torch.randn(rounds, 3, generator=generator, dtype=torch.float64) + 0.5
    survived = torch.rand(rounds, 3, generator=generator, dtype=torch.float64) < true.sigmoid()
    return true * torch.tensor(DISTORTIONS, dtype=torch.float64), survived.long().cumprod(1).sum(1)


def test_temperatures_undo_a_distortion():
    rounds = ConfidenceRounds(*distorted(40_000, 1))
    found = fit_temperatures(rounds)
    assert found == pytest.approx(DISTORTIONS, rel=0.15)
    other = ConfidenceRounds(*distorted(40_000, 2))
    before, after = survival_errors(other, [1.0] * 3), survival_errors(other, found)
    assert all(error < 0.01 for error in after)
    assert all(error > 2 * better for error, better in zip(before, after, strict=True))


def test_calibrated_confidences_are_left_alone():
    logits, lengths = distorted(40_000, 3)
    rounds = ConfidenceRounds(logits / torch.tensor(DISTORTIONS, dtype=torch.float64), lengths)
    assert fit_temperatures(rounds) == pytest.approx([1.0] * 3, rel=0.15)


def test_expected_calibration_error():
    predicted = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.2, 0.2], dtype=torch.float64)
    happened = torch.tensor([True, True, False, False, False, False])
    assert expected_calibration_error(predicted, happened) == pytest.approx((4 * 0.4 + 2 * 0.2) / 6)
    assert expected_calibration_error(torch.ones(3).double(), torch.ones(3) > 0) == 0
    assert expected_calibration_error(torch.zeros(3).double(), torch.ones(3) > 0) == 1


def answers(seed, count, places=60):
    logits, lengths = distorted(count * places, seed)
    confidences = logits.sigmoid().float().view(count, places, 3)
    return [ServedAnswer(row.tolist(), c) for row, c in zip(lengths.view(count, places), confidences, strict=True)]


def test_rounds_are_those_of_the_replay_with_whole_blocks():
    confidences = torch.rand(7, 3)
    answer = ServedAnswer([1, 3, 0, 2, 0, 0, 1], confidences)
    assert round_starts(answer.lengths) == [0, 2, 3, 6]
    rounds = confidence_rounds([answer, ServedAnswer([], None)], 3)
    assert rounds.lengths.tolist() == [1, 0, 2]
    torch.testing.assert_close(rounds.logits.sigmoid().float(), confidences[[0, 2, 3]])
    measured = acceptance([answer.lengths], 3)
    assert (measured.rounds, measured.accepted) == (4, 4)
    assert measured.by_position == [0.75, 0.25, 0.0]
    assert measured.first_position == pytest.approx(4 / 7)


def test_errors_are_measured_on_answers_that_were_not_fitted():
    given = answers(4, 400)
    result = calibrate(given, 3)
    fitted = confidence_rounds(given[::2], 3)
    assert result.temperatures == fit_temperatures(fitted)
    assert result.fitted_rounds == len(fitted.lengths)
    assert result.measured_rounds == len(confidence_rounds(given[1::2], 3).lengths)
    assert sum(result.error_after) < 0.5 * sum(result.error_before)


def test_what_does_not_help_is_left_out():
    fitted, measured = answers(5, 50), answers(6, 50)
    for answer in fitted:
        answer.confidences.copy_(1 - answer.confidences)
    for answer in measured:
        answer.confidences.copy_((answer.confidences.logit() / torch.tensor(DISTORTIONS)).sigmoid())
    result = calibrate([one for pair in zip(fitted, measured, strict=True) for one in pair], 3)
    assert result.temperatures == [1.0] * 3
    assert result.error_after == result.error_before


def test_nothing_to_calibrate():
    assert calibrate([ServedAnswer([1, 0, 0], None)] * 4, 3) is None
    assert calibrate(answers(1, 1), 3) is None
    assert calibrate([ServedAnswer([1, 0], torch.rand(2, 3))] * 4, 3) is None
