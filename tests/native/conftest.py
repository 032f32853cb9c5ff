import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sparkgap import _native
from sparkgap.ops.native_kernels import ISA_VARIABLE, NativeKernels

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

VARIANTS = _native.supported_variants()


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_kernels(variant: str, threads: int = 2, **options: object) -> NativeKernels:
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = variant
    try:
        return NativeKernels(threads=threads, **options)  # type: ignore[arg-type]
    finally:
        if before is None:
            del os.environ[ISA_VARIABLE]
        else:
            os.environ[ISA_VARIABLE] = before


@pytest.fixture
def make() -> Callable[..., NativeKernels]:
    return make_kernels
