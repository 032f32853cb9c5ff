"""How many draft tokens a round verifies: as many as pay, down to none.

A round that verifies n draft tokens takes longer than a plain one, and gives 1 + the expected number of accepted drafts
instead of 1 token. Both are known from the rounds before: how long rounds of so many sequences and draft tokens took,
and how often drafts were accepted at each place. The length with the most expected tokens a second is taken. It
depends on earlier rounds only, never on the drafts at hand, and verification is exact: it changes no token, only when
they come.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import cycle

from sparkgap.rounds.sequence import Sequence

DOES_NOT_PAY = "drafting does not pay"
"""Reason for a plain round: more drafts are expected to cost more than they give."""

_SHORT_LENGTHS = (1, 2, 3, 5)
"""Lengths below the full one that are tried; each has graphs of its own."""

_KEPT_DURATIONS = 7
"""Rounds whose lower quartile is what a length costs: what else the machine does makes rounds longer, never shorter."""

_FIRST_TRIES = 2
"""Rounds of each length before lengths are compared: the first of a kind may be slow."""

_TRIED_SHARE = 0.02
"""Most of the time that goes to lengths other than the best: costs grow with the context, and drafters get better."""

_ROUNDS_BETWEEN_TRIES = 8
"""Fewest rounds from one such try to the next, where they seem to cost nothing."""

_FADE = 0.97
"""What an earlier round counts for acceptance, from one round to the next: some thirty rounds matter."""

_PRIOR_ROUNDS = 6.0
"""Rounds of a sequence's own that weigh as much as what all sequences did."""


def draft_lengths(num_speculative_tokens: int) -> tuple[int, ...]:
    """Draft tokens that a round may verify, largest first."""
    shorter = (length for length in reversed(_SHORT_LENGTHS) if length < num_speculative_tokens)
    return (num_speculative_tokens, *shorter)


class _Acceptance:
    """How often drafts were accepted at each place where all before were; earlier rounds fade."""

    def __init__(self, places: int) -> None:
        self.reached = [0.0] * places
        self.accepted = [0.0] * places

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        for place in range(num_draft_tokens):
            self.reached[place] = self.reached[place] * _FADE + (place <= num_accepted)
            self.accepted[place] = self.accepted[place] * _FADE + (place < num_accepted)

    def rates(self, prior: Seq[float]) -> list[float]:
        """Acceptance at each place, between this and `prior` by what is known."""
        return [
            (accepted + _PRIOR_ROUNDS * expected) / (reached + _PRIOR_ROUNDS)
            for accepted, reached, expected in zip(self.accepted, self.reached, prior, strict=True)
        ]


class _Tries:
    """Lengths in turn, each tried when the time for it has been saved up."""

    def __init__(self, lengths: Seq[int]) -> None:
        self._lengths = cycle(lengths)
        self.next = next(self._lengths)
        self._saved_s = 0.0
        self._rounds = 0

    def allow(self, round_s: float, lost_s: float) -> bool:
        """Whether, at a round that may take `round_s`, the next length may lose `lost_s`."""
        self._saved_s += _TRIED_SHARE * round_s
        self._rounds += 1
        return self._rounds >= _ROUNDS_BETWEEN_TRIES and self._saved_s >= lost_s

    def take(self, lost_s: float) -> int:
        """The next length, which loses `lost_s`."""
        self._saved_s -= lost_s
        self._rounds = 0
        length, self.next = self.next, next(self._lengths)
        return length


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


class DraftLengthPolicy:
    """Chooses the number of draft tokens for each round of a batch.

    Attributes:
        lengths: numbers to choose from, the full one first and 0, a plain round, last.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.lengths = (*draft_lengths(num_speculative_tokens), 0)
        self._places = num_speculative_tokens
        self._all = _Acceptance(num_speculative_tokens)
        self._each: dict[int, _Acceptance] = {}
        self._durations_s: dict[tuple[int, int], deque[float]] = {}
        self._tries: dict[int, _Tries] = {}

    def choose(self, sequences: Seq[Sequence]) -> int:
        """Draft tokens that the next round of these sequences verifies; 0 for a plain round."""
        number = len(sequences)
        for length in self.lengths:
            if len(self._durations_s.get((number, length), ())) < _FIRST_TRIES:
                return length
        tokens = self._expected_tokens(sequences)
        costs_s = {length: _lower_quartile(self._durations_s[number, length]) for length in self.lengths}
        s_per_token = {length: costs_s[length] / tokens[length] for length in self.lengths}
        best = min(self.lengths, key=lambda length: s_per_token[length])
        tries = self._tries.setdefault(number, _Tries(self.lengths))
        # What a round of another length takes beyond the time that the best needs for as many tokens.
        lost_s = costs_s[tries.next] - tokens[tries.next] * s_per_token[best]
        return tries.take(lost_s) if tries.allow(costs_s[best], lost_s) else best

    def add_round(self, num_sequences: int, num_draft_tokens: int, duration_s: float) -> None:
        """A round of so many sequences, all with so many draft tokens, took so long."""
        key = num_sequences, num_draft_tokens
        self._durations_s.setdefault(key, deque(maxlen=_KEPT_DURATIONS)).append(duration_s)

    def add_acceptance(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """A round of a sequence accepted so many of its draft tokens."""
        self._all.add(num_draft_tokens, num_accepted)
        own = self._each.setdefault(sequence.sequence_id, _Acceptance(self._places))
        own.add(num_draft_tokens, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended or is to be recomputed."""
        self._each.pop(sequence.sequence_id, None)

    def _expected_tokens(self, sequences: Seq[Sequence]) -> list[float]:
        """Tokens that a round of all sequences gives, for 0, 1, ... draft tokens."""
        everybody = self._all.rates([0.5] * self._places)
        totals = [float(len(sequences))] * (self._places + 1)
        for sequence in sequences:
            own = self._each.get(sequence.sequence_id)
            survival, expected = 1.0, 0.0
            for place, rate in enumerate(everybody if own is None else own.rates(everybody), start=1):
                survival *= rate
                expected += survival
                totals[place] += expected
        return totals
