"""Configuration values of every JSON type and size: read as what they are, or refused by name."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.catalog.keys import Keys
from sparkgap.errors import CheckpointError

HUGE = 10**400
SCALARS = st.none() | st.booleans() | st.integers() | st.just(HUGE) | st.floats() | st.text(max_size=5)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
)

READERS = {
    "integer": (lambda keys: keys.integer("k", 3), lambda v: type(v) is int and 1 <= v < 2**31),
    "optional_integer": (lambda keys: keys.optional_integer("k"), lambda v: type(v) is int and 1 <= v < 2**31),
    "number": (lambda keys: keys.number("k", 1.0, above=0.0), lambda v: type(v) is float and 0 < v < math.inf),
    "flag": (lambda keys: keys.flag("k"), lambda v: type(v) is bool),
    "text": (lambda keys: keys.text("k", "x"), lambda v: type(v) is str),
    "strings": (lambda keys: keys.strings("k"), lambda v: type(v) is list and all(type(i) is str for i in v)),
    "mapping": (lambda keys: keys.mapping("k"), lambda v: type(v) is dict),
}


def check_line(message):
    assert "'k' must be" in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("name", READERS)
@given(value=ANYTHING)
def test_a_value_is_of_its_kind_or_refused_in_one_line(name, value):
    read, is_right = READERS[name]
    try:
        result = read(Keys({"k": value}))
    except CheckpointError as error:
        check_line(str(error))
    else:
        assert is_right(result) if value is not None else result == read(Keys({}))


def test_bounds_and_what_is_missing():
    keys = Keys({"k": 5, "zero": 0}, "place: {key}")
    assert keys.integer("k", minimum=5, maximum=5) == 5
    with pytest.raises(CheckpointError, match="place: k must be an integer of at least 6, got 5"):
        keys.integer("k", minimum=6)
    with pytest.raises(CheckpointError, match="place: k must be an integer of at most 4, got 5"):
        keys.integer("k", maximum=4)
    with pytest.raises(CheckpointError, match="place: zero must be a finite number above 0, got 0"):
        keys.number("zero", above=0.0)
    for read in (keys.integer, keys.number):
        with pytest.raises(CheckpointError, match="place: other is missing"):
            read("other")
