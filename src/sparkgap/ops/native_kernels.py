"""The CPU device's kernels: `Kernels` over the native module.

Activations are float32 whatever the model's dtype is: at the few rows of a decoding pass they are a few kilobytes
against megabytes of weights, so bfloat16 would save nothing, cost two conversions an operation and round the
residual stream at every layer. Weights and KV cache, which are what memory bandwidth goes to, keep the model's
dtype or are quantized. Operations also take bfloat16 activations and answer in kind.

A row's result has the same bits whatever rows stand beside it, however many threads run and whichever instruction
set the kernels were compiled for.
"""

import os

import torch

from sparkgap import _native
from sparkgap.errors import ConfigError
from sparkgap.ops.kernels import Kernels
from sparkgap.ops.native_draft import NativeDraftKernels
from sparkgap.ops.native_rounds import NativeRoundKernels
from sparkgap.ops.w8a8 import Quantization

ISA_VARIABLE = "SPARKGAP_ISA"
"""Environment variable that forces a kernel variant: `avx512`, `avx2` or `portable`."""


class NativeKernels(NativeDraftKernels, NativeRoundKernels, Kernels):
    """`Kernels` on CPU threads.

    Args:
        threads: compute threads; None takes the cores available to the process.
        quantization: `w8a8` packs weights as int8 with a scale for each output channel, and quantizes activations
            to int8 with a scale for each row; None keeps weights in their own dtype.
        activation_dtype: of embeddings, and so of everything computed from them.

    Raises:
        ConfigError: the variant that `SPARKGAP_ISA` names is not in this build, or not for this CPU.
    """

    def __init__(
        self,
        threads: int | None = None,
        quantization: Quantization | None = None,
        activation_dtype: torch.dtype = torch.float32,
    ) -> None:
        if quantization not in (None, "w8a8"):
            raise ConfigError(f"quantization must be w8a8 or none, got {quantization!r}")
        if activation_dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"activations must be float32 or bfloat16, got {activation_dtype}")
        self.quantization = quantization
        self.activation_dtype = activation_dtype
        variant = os.environ.get(ISA_VARIABLE, "")
        try:
            self.executor = _native.Executor(threads or _native.usable_cores(), variant)
        except RuntimeError as error:
            raise ConfigError(f"{ISA_VARIABLE}={variant}: {error}") from error
