"""A tiny model with a drafter that is often right, served and in this process."""

import pytest

from sparkgap.api import LLM

from ..speculating_model import write_looping_pair
from .running import ENGINE, running


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Directories of a target and its drafter."""
    return write_looping_pair(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def server(pair):
    """A server that many tests share; none of them changes it."""
    model, drafter = pair
    with running(model, speculative_config={"model": str(drafter)}) as found:
        yield found


@pytest.fixture(scope="session")
def llm(pair):
    """The same model in this process, without the drafter."""
    return LLM(str(pair[0]), **ENGINE)
