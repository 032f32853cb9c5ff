"""What all native operations stand on: the threads they run on, and memory for their results."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkgap import _native


class NativeOperations:
    """Operations of one executor.

    Attributes:
        executor: runs the native kernels, or records them during a capture.
        activation_dtype: of embeddings, and so of everything computed from them.
    """

    executor: _native.Executor
    activation_dtype: torch.dtype

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Kernels.empty`."""
        del device
        return self._empty(shape, dtype)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result; during a capture from the graph's arena."""
        if self.executor.capturing:
            return self.executor.empty(list(shape), _DTYPE_NAMES[dtype])
        return torch.empty(tuple(shape), dtype=dtype)


_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int64: "int64"}
"""What the native module calls the dtypes of results."""
