"""The operations models are written in, and their implementations."""

import torch

from sparkgap.errors import ConfigError
from sparkgap.ops.draft import DraftChain, DraftHeads, DraftStep
from sparkgap.ops.kernels import AttentionRows, Kernels, KVCache, LinearWeight, RotaryTable
from sparkgap.ops.native_kernels import NativeKernels, Quantization
from sparkgap.ops.torch_kernels import TorchKernels

__all__ = [
    "AttentionRows",
    "DraftChain",
    "DraftHeads",
    "DraftStep",
    "KVCache",
    "Kernels",
    "LinearWeight",
    "NativeKernels",
    "Quantization",
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
        quantization: of weights and activations.
        threads: of the CPU; None takes the cores available to the process.

    Raises:
        ConfigError: these kernels do not have that quantization, or not for that dtype.
    """
    if device.type == "cpu" and dtype != torch.float16:
        return NativeKernels(threads, quantization)
    if quantization is not None:
        where = "float16 on the CPU" if device.type == "cpu" else f"device {device}"
        raise ConfigError(f"quantization {quantization} is not there for {where}; use quantization none")
    return TorchKernels()
