"""Typed access to a checkpoint's configuration, whose values may be of any JSON type and size."""

import math
from collections.abc import Mapping
from typing import Any

from sparkgap.config import is_finite, is_integer
from sparkgap.errors import CheckpointError

LARGEST_INTEGER = 2**31 - 1
"""Largest integer taken where nothing tighter is known; above it only damage is to be found."""

_LONGEST_VALUE_SHOWN = 60


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a huge integer"
    return text if len(text) <= _LONGEST_VALUE_SHOWN else f"{text[:_LONGEST_VALUE_SHOWN]}..."


class Keys:
    """Keys of a JSON object. A key that is null counts as absent.

    Each reader raises CheckpointError that names the place, the key, what it must be and what it is.

    Args:
        values: the object.
        label: how messages name a key of it, with `{key}` for the key.
    """

    def __init__(self, values: Mapping[str, Any], label: str = "config: '{key}'") -> None:
        self._values = values
        self._label = label

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = LARGEST_INTEGER) -> int:
        """An integer of a range; missing without a default."""
        value = self._value(key, default)
        if not is_integer(value) or value < minimum:
            what = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            raise self.wrong(key, what, value)
        if value > maximum:
            raise self.wrong(key, f"an integer of at most {maximum}", value)
        return int(value)

    def optional_integer(self, key: str, *, minimum: int = 1, maximum: int = LARGEST_INTEGER) -> int | None:
        """As `integer`, None when absent."""
        return None if self._values.get(key) is None else self.integer(key, minimum=minimum, maximum=maximum)

    def number(
        self, key: str, default: float | None = None, *, above: float | None = None, minimum: float = -math.inf
    ) -> float:
        """A finite number, above a bound or of at least a minimum; missing without a default."""
        value = self._value(key, default)
        if not is_finite(value) or value < minimum or (above is not None and value <= above):
            bound = f"of at least {minimum:g}" if above is None else f"above {above:g}"
            raise self.wrong(key, f"a finite number {bound}", value)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        return value

    def strings(self, key: str) -> list[str] | None:
        """A list of strings, None when absent."""
        value = self._values.get(key)
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(i, str) for i in value)):
            raise self.wrong(key, "a list of strings", value)
        return None if value is None else list(value)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, None when absent."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object", value)
        return value

    def wrong(self, key: str, what: str, value: object) -> CheckpointError:
        """The error of a key whose value is not what it must be."""
        return CheckpointError(f"{self._label.format(key=key)} must be {what}, got {shown(value)}")

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._label.format(key=key)} is missing")
        return value
