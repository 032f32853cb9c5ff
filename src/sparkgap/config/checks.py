"""What settings' validation is written in."""

import sys

from sparkgap.errors import ConfigError


def check(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def is_integer(value: object) -> bool:
    """Whether a value is an integer; `True` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether a value is a number that a float holds; `True` and NaN are none."""
    # An integer is compared with a float exactly, where converting a huge one would raise.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_unicode(text: str) -> bool:
    """Whether a text is Unicode: false with lone surrogates, which no model can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
