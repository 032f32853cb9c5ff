"""The verbs models are written in. One interface; a device brings its implementation."""

from sparkgap.ops.draft_kernels import DraftKernels
from sparkgap.ops.round_kernels import RoundKernels


class Kernels(DraftKernels, RoundKernels):
    """The operations of one device. Every one returns new tensors, except `kv_write`, which writes the cache.

    Row operations never mix rows: what row `r` gives does not depend on which rows stand beside it (exactly on
    devices with fixed-order kernels; within the reduction order of the library's matrix product in the torch
    reference).

    Inputs of `rotary`, `rms_norm`, `kv_write`, `paged_attention` and `block_attention` may be views of wider rows
    (queries, keys and values side by side, as one product gives them): a head's features are contiguous, heads
    follow each other, only the row stride is larger. Everything returned is contiguous.
    """
