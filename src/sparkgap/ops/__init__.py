"""The operations models are written in, and their implementations."""

import torch

from sparkgap.ops.draft import DraftChain, DraftHeads, DraftStep
from sparkgap.ops.kernels import AttentionRows, Kernels, KVCache, LinearWeight, RotaryTable
from sparkgap.ops.torch_kernels import TorchKernels

__all__ = [
    "AttentionRows",
    "DraftChain",
    "DraftHeads",
    "DraftStep",
    "KVCache",
    "Kernels",
    "LinearWeight",
    "RotaryTable",
    "TorchKernels",
    "make_kernels",
]


def make_kernels(device: torch.device) -> Kernels:
    """The kernels of `device`: the torch reference, which runs on every device that torch knows."""
    del device
    return TorchKernels()
