"""Rows of texts are given back when nobody writes to them any more."""

import pytest

from sparkgap.rounds.pipeline.texts import TextRows


def test_a_row_is_free_when_its_rounds_have_ended() -> None:
    rows = TextRows(2)
    first, second = rows.of(1), rows.of(2)
    assert first != second
    assert rows.of(1) == first
    rows.retire(1)
    rows.free_retired({1})
    with pytest.raises(IndexError):
        rows.of(3)
    rows.free_retired(set())
    assert rows.of(3) == first


def test_a_sequence_that_comes_back_gets_another_row_while_its_old_one_is_written() -> None:
    rows = TextRows(3)
    old = rows.of(1)
    rows.retire(1)
    rows.free_retired({1})
    assert rows.of(1) != old
    rows.retire(1)
    rows.retire(9)
    rows.free_retired(set())
    assert len({rows.of(4), rows.of(5), rows.of(6)}) == 3
