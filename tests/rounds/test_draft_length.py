"""The choice of draft lengths, on simulated drafters and machines."""

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sparkgap.config import SamplingParams
from sparkgap.rounds.draft_length import DraftLengthPolicy, draft_lengths
from sparkgap.rounds.sequence import Sequence


def sequences(number):
    return [Sequence(i, SamplingParams(), 0, [1]) for i in range(number)]


class Machine:
    """Rounds that take the time of `cost_ms(sequences, length)`, with drafts accepted at `rates`."""

    def __init__(self, policy, cost_ms, rates, seed=0):
        self.policy = policy
        self.cost_ms = cost_ms
        self.rates = rates
        self.random = random.Random(seed)
        self.tokens = 0
        self.ms = 0.0
        self.lengths = []

    def accepted(self, length):
        number = 0
        while number < length and self.random.random() < self.rates[number]:
            number += 1
        return number

    def run(self, batch, rounds):
        for _ in range(rounds):
            length = self.policy.choose(batch)
            duration_ms = self.cost_ms(len(batch), length)
            self.policy.add_round(len(batch), length, duration_ms / 1e3)
            self.ms += duration_ms
            self.lengths.append(length)
            for sequence in batch:
                number = self.accepted(length)
                self.policy.add_acceptance(sequence, length, number)
                self.tokens += number + 1
        return self


def expected_rate(cost_ms, number, length, rates):
    survival, tokens = 1.0, 1.0
    for rate in rates[:length]:
        survival *= rate
        tokens += survival
    return number * tokens / cost_ms(number, length)


def test_lengths():
    assert draft_lengths(7) == (7, 5, 3, 2, 1)
    assert draft_lengths(5) == (5, 3, 2, 1)
    assert draft_lengths(1) == (1,)
    assert DraftLengthPolicy(3).lengths == (3, 2, 1, 0)


@settings(max_examples=25, phases=[Phase.generate])
@given(
    draft_ms=st.floats(0.5, 8),
    pass_ms=st.floats(3, 8),
    row_ms=st.floats(0.01, 1),
    rates=st.lists(st.floats(0.0, 0.98), min_size=1, max_size=7),
    number=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_it_is_not_slower_than_any_fixed_length(draft_ms, pass_ms, row_ms, rates, number, seed):
    def cost_ms(sequences, length):
        return (draft_ms if length else 0) + pass_ms + row_ms * sequences * (length + 1)

    policy = DraftLengthPolicy(len(rates))
    machine = Machine(policy, cost_ms, rates, seed).run(sequences(number), 800)
    best = max(expected_rate(cost_ms, number, length, rates) for length in policy.lengths)
    # What trying costs, and what luck does to the number of accepted drafts.
    assert machine.tokens / machine.ms > 0.85 * best
    plain = expected_rate(cost_ms, number, 0, rates)
    assert machine.tokens / machine.ms > 0.9 * plain


def linear_ms(sequences, length):
    return (4 if length else 0) + 4 + 0.2 * sequences * (length + 1)


def test_a_useless_drafter_is_given_up_and_noticed_again():
    policy, batch = DraftLengthPolicy(7), sequences(1)
    machine = Machine(policy, linear_ms, [0.02] * 7).run(batch, 400)
    later = machine.lengths[100:]
    assert later.count(0) > 0.9 * len(later)
    machine.rates = [0.95] * 7
    machine.run(batch, 1200)
    assert machine.lengths[-150:].count(7) > 110


def test_a_good_drafter_drafts_in_full():
    machine = Machine(DraftLengthPolicy(7), linear_ms, [0.95] * 7).run(sequences(1), 400)
    assert machine.lengths[100:].count(7) > 250


def test_late_places_that_fail_are_left_out():
    machine = Machine(DraftLengthPolicy(7), linear_ms, [0.9, 0.9, 0.02, 0, 0, 0, 0]).run(sequences(4), 400)
    later = machine.lengths[100:]
    assert later.count(2) > 0.8 * len(later)


def test_it_depends_on_the_number_of_sequences():
    """Where rows are expensive, drafts pay for one sequence and not for many."""

    def cost_ms(sequences, length):
        return 1 + 10 + 0.9 * max(sequences * (length + 1) - 8, 0)

    policy = DraftLengthPolicy(7)
    machine = Machine(policy, cost_ms, [0.6] * 7)
    machine.run(sequences(1), 300)
    assert machine.lengths[-100:].count(0) < 10
    machine.lengths.clear()
    machine.run(sequences(16), 300)
    assert sum(machine.lengths[-100:]) < 100


def test_a_slow_round_now_and_then_means_little():
    slow = random.Random(3)

    def cost_ms(sequences, length):
        return linear_ms(sequences, length) * (20 if slow.random() < 0.1 else 1)

    machine = Machine(DraftLengthPolicy(7), cost_ms, [0.95] * 7).run(sequences(1), 600)
    assert machine.lengths[100:].count(7) > 350


def test_a_sequence_has_its_own_acceptance():
    policy = DraftLengthPolicy(7)
    good, bad = sequences(2)
    for _ in range(200):
        policy.add_acceptance(good, 7, 7)
        policy.add_acceptance(bad, 7, 0)
    for length in policy.lengths:
        for _ in range(3):
            policy.add_round(1, length, linear_ms(1, length) / 1e3)
    assert policy.choose([good]) == 7
    assert policy.choose([bad]) == 0
    policy.forget(bad)
    assert policy.choose([bad]) != 0


@pytest.mark.parametrize("number", [1, 3])
def test_without_measured_rounds_it_drafts_in_full(number):
    """Rounds of mixed kinds are not measured."""
    policy = DraftLengthPolicy(5)
    assert [policy.choose(sequences(number)) for _ in range(20)] == [5] * 20
