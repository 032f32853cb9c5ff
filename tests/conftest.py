"""Fixtures that several parts share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, from the cache or downloaded once."""
    from sparkgap.catalog.resolve import resolve
    from sparkgap.config import DEFAULT_MODEL

    return resolve(DEFAULT_MODEL)
