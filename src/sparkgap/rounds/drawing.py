"""Drawing tokens by the device's own operation, the same in rounds that the host carries and in the task pipeline."""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from sparkgap.config import SamplingParams
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.rounds.random import MASK_64
from sparkgap.rounds.sampling import Drawn

_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
_LARGEST_TEMPERATURE = torch.finfo(torch.float32).max


class SamplingNumbers(NamedTuple):
    """What the device must know to draw a token.

    Attributes:
        temperature: 0 takes the most probable token.
        log_min_p: least logit that stays, after temperature and relative to the largest; -inf keeps all.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
    """

    temperature: float
    log_min_p: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, params: SamplingParams) -> "SamplingNumbers":
        """The numbers of a request."""
        if params.greedy:
            return cls(0.0, -math.inf, 0, 1.0)
        return cls(
            min(max(params.temperature, _SMALLEST_TEMPERATURE), _LARGEST_TEMPERATURE),
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            max(params.top_k, 0),
            params.top_p,
        )


def as_int64(seed: int) -> int:
    """A 64-bit seed as two's complement."""
    seed &= MASK_64
    return seed - (1 << 64) if seed >> 63 else seed


class DeviceDraw:
    """Draws tokens with the native kernels.

    Args:
        kernels: of the device that the logits are on.
    """

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: Tensor, params: Seq[SamplingParams], keys: Seq[tuple[int, int]]) -> Drawn:
        """A token of each row and its largest logit. A row whose logits are not numbers gets any token.

        Args:
            logits: float32 `[rows, vocab]` after masks, bias and penalties.
            params: one for each row.
            keys: seed, and position that the token will occupy, of each row.
        """
        numbers = [SamplingNumbers.of(p) for p in params]
        drawn = Drawn(torch.empty(len(numbers), dtype=torch.int64), torch.empty(len(numbers)))
        self._kernels.draw_tokens(
            logits,
            torch.tensor([n.temperature for n in numbers], dtype=torch.float32),
            torch.tensor([n.log_min_p for n in numbers], dtype=torch.float32),
            torch.tensor([n.top_k for n in numbers], dtype=torch.int64),
            torch.tensor([n.top_p for n in numbers], dtype=torch.float64),
            torch.tensor([as_int64(seed) for seed, _ in keys], dtype=torch.int64),
            torch.tensor([position - 1 for _, position in keys], dtype=torch.int64),
            *drawn,
        )
        return drawn
