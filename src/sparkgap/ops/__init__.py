"""The operations models are written in, and their implementations."""

import torch

from sparkgap.ops.draft import DraftChain, DraftHeads, DraftStep
from sparkgap.ops.kernels import Kernels
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.ops.operands import AttentionRows, KVCache, LinearWeight, PackedForm, QuantizedWeight, RotaryTable
from sparkgap.ops.torch_kernels import TorchKernels
from sparkgap.ops.w8a8 import Quantization

__all__ = [
    "AttentionRows",
    "DraftChain",
    "DraftHeads",
    "DraftStep",
    "KVCache",
    "Kernels",
    "LinearWeight",
    "NativeKernels",
    "PackedForm",
    "Quantization",
    "QuantizedWeight",
    "RotaryTable",
    "TorchKernels",
    "make_kernels",
]


def make_kernels(
    device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None, threads: int | None = None
) -> Kernels:
    """The kernels of `device`: native ones on the CPU, else the torch reference, which runs on every device.

    Args:
        device: where the kernels compute.
        dtype: of weights and KV cache.
        quantization: of weights and activations. Only the native kernels are faster for it.
        threads: of the CPU; None takes the cores available to the process.

    Raises:
        ConfigError: the native kernels' variant that the environment names cannot be had.
    """
    if device.type == "cpu" and dtype != torch.float16:
        return NativeKernels(threads, quantization)
    return TorchKernels(quantization=quantization)
