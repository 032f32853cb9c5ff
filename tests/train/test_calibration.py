"""Sequential temperature scaling finds what distorts confidences, and the served drafter applies it."""

import pytest
import torch

from sparkgap.train.calibration import (
    ConfidenceRounds,
    calibrate,
    confidence_rounds,
    expected_calibration_error,
    fit_scaling,
    survival_errors,
)
from sparkgap.train.evaluate import ServedAnswer, acceptance, round_starts

DISTORTIONS = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
SHIFTS = torch.tensor([0.5, -1.0, 3.0], dtype=torch.float64)
"""What the logits of each place were multiplied by, and what was added then."""

PLAIN = [(1.0, 0.0)] * 3


def distorted(rounds, seed):
    """Rounds in which draft k survives with a known probability, and logits that exaggerate or understate it."""
    generator = torch.Generator().manual_seed(seed)
    true = 1.5 * torch.randn(rounds, 3, generator=generator, dtype=torch.float64) + 0.5
    survived = torch.rand(rounds, 3, generator=generator, dtype=torch.float64) < true.sigmoid()
    return true * DISTORTIONS + SHIFTS, survived.long().cumprod(1).sum(1)


def test_scaling_undoes_a_distortion():
    rounds = ConfidenceRounds(*distorted(8_000, 1))
    found = fit_scaling(rounds)
    temperatures, offsets = zip(*found, strict=True)
    assert temperatures == pytest.approx(DISTORTIONS.tolist(), rel=0.25)
    assert offsets == pytest.approx((-SHIFTS / DISTORTIONS).tolist(), abs=0.25)
    other = ConfidenceRounds(*distorted(8_000, 2))
    before, after = (survival_errors(other, scaling) for scaling in (PLAIN, found))
    assert all(error < 0.025 for error in after)
    assert all(error > 1.5 * better for error, better in zip(before, after, strict=True))


def test_right_confidences_are_left_alone():
    logits, lengths = distorted(8_000, 3)
    temperatures, offsets = zip(*fit_scaling(ConfidenceRounds((logits - SHIFTS) / DISTORTIONS, lengths)), strict=True)
    assert temperatures == pytest.approx([1.0] * 3, rel=0.25)
    assert offsets == pytest.approx([0.0] * 3, abs=0.2)


def test_few_rounds_change_little():
    """Where no round reaches, nothing is known of the place."""
    rounds = ConfidenceRounds(torch.zeros(5, 3, dtype=torch.float64), torch.zeros(5, dtype=torch.int64))
    scaling = fit_scaling(rounds)
    assert all(0.3 < temperature < 3 and abs(offset) < 2 for temperature, offset in scaling)


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


def test_errors_are_those_of_answers_that_were_not_fitted():
    given = answers(4, 100)
    result = calibrate(given, 3)
    together, *halves = (confidence_rounds(part, 3) for part in (given, given[::2], given[1::2]))
    assert list(zip(result.temperatures, result.offsets, strict=True)) == fit_scaling(together)
    assert result.rounds == len(together.lengths) == sum(len(half.lengths) for half in halves)
    errors = [survival_errors(halves[i], fit_scaling(halves[1 - i])) for i in (0, 1)]
    shares = [len(half.lengths) / result.rounds for half in halves]
    assert result.error_after == pytest.approx([shares[0] * a + shares[1] * b for a, b in zip(*errors, strict=True)])
    assert sum(result.error_after) < 0.5 * sum(result.error_before)


def test_what_does_not_help_is_left_out():
    """The two halves say the opposite of each other."""
    both = [answers(seed, 30) for seed in (5, 6)]
    for half, sign in zip(both, (1, -1), strict=True):
        for answer in half:
            right = (answer.confidences.double().logit() - SHIFTS) / DISTORTIONS
            answer.confidences.copy_((right + sign * 0.5).sigmoid())
    result = calibrate([one for pair in zip(*both, strict=True) for one in pair], 3)
    assert (result.temperatures, result.offsets) == ([1.0] * 3, [0.0] * 3)
    assert result.error_after == result.error_before


def test_nothing_to_calibrate():
    assert calibrate([ServedAnswer([1, 0, 0], None)] * 4, 3) is None
    assert calibrate(answers(1, 1), 3) is None
    assert calibrate([ServedAnswer([1, 0], torch.rand(2, 3))] * 4, 3) is None
