"""Settings and sampling parameters of every type and size: taken, or refused by name in one line."""

import math
from dataclasses import fields

import pytest

from sparkgap.config import EngineConfig, SamplingParams, SpeculativeConfig
from sparkgap.errors import ConfigError

VALUES = [
    *("abc", "", "caf\udce9", b"x", -1, 0, 1, 2, 2.5, True, None, [], [1], ["a"], [None], {}, {"a": 1}, {1: "x"}),
    *(10**12, 10**400, -(10**400), math.nan, math.inf, -math.inf, object()),
]


def check_line(message, name):
    assert name.split("_")[-1] in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, field.name) for kind in (SamplingParams, EngineConfig, SpeculativeConfig) for field in fields(kind)],
)
def test_values_of_every_kind_are_taken_or_refused_by_name(kind, name):
    for value in VALUES:
        try:
            kind(**{name: value})
        except ConfigError as error:
            check_line(str(error), name)
