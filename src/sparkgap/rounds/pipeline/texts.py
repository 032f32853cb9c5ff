"""Which row of the texts on the device belongs to which sequence."""

from collections.abc import Set as AbstractSet


class TextRows:
    """Gives rows to sequences, and takes one back when no round in flight writes to it any more.

    Args:
        count: number of rows.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._rows: dict[int, int] = {}
        self._retired: dict[int, list[int]] = {}

    def of(self, sequence_id: int) -> int:
        """The sequence's row, from now on if it had none."""
        if sequence_id not in self._rows:
            self._rows[sequence_id] = self._free.pop()
        return self._rows[sequence_id]

    def retire(self, sequence_id: int) -> None:
        """The sequence has ended or is to be recomputed; it gets another row if it comes back."""
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._retired.setdefault(sequence_id, []).append(row)

    def free_retired(self, in_flight: AbstractSet[int]) -> None:
        """Take back the rows of retired sequences that are in no round in flight."""
        for sequence_id in [number for number in self._retired if number not in in_flight]:
            self._free += self._retired.pop(sequence_id)
