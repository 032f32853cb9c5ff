"""Fixtures that several parts share."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes tells of the machine's load, not of the code.
settings.register_profile("sparkgap", deadline=None)
settings.load_profile("sparkgap")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, from the cache or downloaded once."""
    from sparkgap.catalog.resolve import resolve
    from sparkgap.config import DEFAULT_MODEL

    return resolve(DEFAULT_MODEL)


@pytest.fixture
def plain_logging() -> Iterator[None]:
    """Leaves logging as it was, whatever a test configures."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("sparkgap", "uvicorn"):
        logging.getLogger(name).setLevel(logging.NOTSET)
