"""Counter-based random numbers: Philox 4x32-10, keyed by a sequence's seed, a position and a purpose.

The generator is stateless, so a token's random number is the same whether its sequence runs alone or in a batch,
is recomputed after a preemption, or is drafted and verified in another mode. Source: Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from collections.abc import Sequence as Seq
from enum import IntEnum

import torch
from torch import Tensor

MASK_32 = 0xFFFFFFFF
MASK_64 = 0xFFFFFFFFFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


class Purpose(IntEnum):
    """What a random number is used for; numbers of different purposes are independent."""

    TARGET = 0
    """Sampling a token from the target's distribution."""
    DRAFT = 1
    """Sampling a draft token from the drafter's distribution."""
    ACCEPT = 2
    """Accepting or rejecting a draft token."""
    RESIDUAL = 3
    """Sampling the correction after a rejection."""
    SEED = 4
    """Deriving seeds: of requests that have none, and of a request's further completions."""


def philox_words(counter: Seq[int], key: Seq[int]) -> tuple[int, int, int, int]:
    """One Philox 4x32-10 block from 4 counter words and 2 key words, each an unsigned 32-bit integer."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & MASK_32,
            (first >> 32) ^ c3 ^ k1,
            first & MASK_32,
        )
        k0 = (k0 + _KEY_STEPS[0]) & MASK_32
        k1 = (k1 + _KEY_STEPS[1]) & MASK_32
    return c0, c1, c2, c3


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox 4x32-10 blocks on any device.

    Args:
        counter: int64 `[..., 4]`, unsigned 32-bit words.
        key: int64 `[..., 2]`, unsigned 32-bit words.

    Returns:
        int64 `[..., 4]`, unsigned 32-bit words.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIERS[0])
        high_1, low_1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = (k0 + _KEY_STEPS[0]) & MASK_32
        k1 = (k1 + _KEY_STEPS[1]) & MASK_32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of `x * factor`, through 16-bit halves so that no int64 product overflows."""
    upper = x * (factor >> 16)
    lower = x * (factor & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (lower + ((upper & 0xFFFF) << 16)) & MASK_32
    return high, low


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose, dtype: torch.dtype = torch.float64) -> Tensor:
    """Uniform numbers in [0, 1), one for each seed and position, on the device of `seeds`.

    Args:
        seeds: int64 `[...]`, 64-bit keys (as two's complement).
        positions: int64 `[...]`, positions that the tokens will occupy.
        purpose: what the numbers are for.
        dtype: float64 gives multiples of 2^-53, float32 multiples of 2^-24 (the float64 number rounded down).
    """
    key = torch.stack((seeds & MASK_32, (seeds >> 32) & MASK_32), dim=-1)
    zero = torch.zeros_like(positions)
    counter = torch.stack((positions & MASK_32, (positions >> 32) & MASK_32, zero + int(purpose), zero), dim=-1)
    words = philox(counter, key)
    if dtype == torch.float32:
        return (words[..., 0] >> 8).to(torch.float32) * 2.0**-24
    return ((words[..., 0] << 21) | (words[..., 1] >> 11)).to(torch.float64) * 2.0**-53


def uniform_number(seed: int, position: int, purpose: Purpose) -> float:
    """The number that `uniform` gives in float64, computed on the host: quicker for a handful of rows."""
    words = _block(seed, position, purpose)
    return ((words[0] << 21) | (words[1] >> 11)) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """A 64-bit seed that depends on `seed` and `index`, independent of every other number drawn with `seed`."""
    words = _block(seed, index, Purpose.SEED)
    return (words[1] << 32) | words[0]


def _block(seed: int, position: int, purpose: Purpose) -> tuple[int, int, int, int]:
    counter = (position & MASK_32, (position >> 32) & MASK_32, int(purpose), 0)
    return philox_words(counter, (seed & MASK_32, (seed >> 32) & MASK_32))
