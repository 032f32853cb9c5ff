"""What loading a model does to the search for garbage."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from sparkgap.cli.loading import _collection_paused


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_nothing_is_collected_while_a_model_is_loaded() -> None:
    with _collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count()
    with pytest.raises(ValueError, match="no"), _collection_paused():
        raise ValueError("no")
    assert gc.isenabled()


def test_a_model_that_was_dropped_is_freed_before_the_next() -> None:
    with _collection_paused():
        model = Cycle()
    dropped = weakref.ref(model)
    del model
    gc.collect()
    assert dropped() is not None
    with _collection_paused():
        assert dropped() is None
