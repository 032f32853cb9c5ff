"""Rotary position embedding: from a configuration to a table of angles.

Variants and key names are those of Hugging Face configurations. Sources: RoFormer (arXiv 2104.09864), position
interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), and the frequency scaling published with Llama 3.1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sparkgap.catalog.keys import Keys, shown
from sparkgap.config import is_finite
from sparkgap.errors import CheckpointError, UnsupportedModelError
from sparkgap.ops.operands import RotaryTable

RopeType = Literal["default", "linear", "llama3", "yarn"]
"""Variants that the engine computes."""

_SUPPORTED: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
_PARAMETER = "RoPE parameter '{key}'"


@dataclass(frozen=True)
class RopeConfig:
    """One RoPE variant with its parameters.

    Attributes:
        rope_type: which variant.
        theta: base of the wavelengths.
        partial_rotary_factor: share of a head's features that is rotated, in (0, 1].
        factor: how much longer than the trained context the model's context is (linear, llama3, yarn).
        original_max_position_embeddings: trained context (llama3, yarn).
        low_freq_factor, high_freq_factor: bounds of the interpolated band (llama3).
        beta_fast, beta_slow: rotations over the trained context at the ramp's ends (yarn).
        attention_factor: multiplies cos and sin (yarn); 1 elsewhere.
        truncate: round the ramp's ends to whole features (yarn).
        freq_factors: divide the inverse frequencies, one for each pair of rotated features (GGUF
            `rope_freqs.weight`); None where there are none.
    """

    rope_type: RopeType = "default"
    theta: float = _DEFAULT_THETA
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Read `rope_parameters`, or `rope_scaling` with `rope_theta`, and `rope_freq_factors`.

        Raises:
            UnsupportedModelError: a variant that the engine does not compute.
            CheckpointError: a parameter that the variant needs is missing or out of its range.
        """
        outer = Keys(config)
        values = dict(outer.mapping("rope_scaling") or outer.mapping("rope_parameters") or {})
        if values and all(isinstance(value, Mapping) for value in values.values()):
            raise UnsupportedModelError(
                f"rope_parameters differ by layer type ({', '.join(values)}), which this engine does not run"
            )
        parameters = Keys(values, _PARAMETER)
        rope_type = _rope_type(values)
        rope = cls(
            rope_type=rope_type,
            theta=parameters.number("rope_theta", outer.number("rope_theta", _DEFAULT_THETA, above=0.0), above=0.0),
            partial_rotary_factor=_rotary_share(parameters, outer),
            freq_factors=_freq_factors(config),
        )
        if rope_type == "default":
            return rope
        trained = parameters.optional_integer("original_max_position_embeddings")
        longest = outer.optional_integer("max_position_embeddings")
        # Yarn's factor where it is not given: context length over trained length.
        implied = longest / trained if rope_type == "yarn" and longest and trained else None
        factor = parameters.number("factor", implied, above=0.0)
        rope = replace(rope, factor=factor)
        if rope_type == "linear":
            return rope
        trained = trained or outer.optional_integer("original_max_position_embeddings") or longest
        if trained is None:
            raise CheckpointError("RoPE parameter 'original_max_position_embeddings' is missing")
        rope = replace(rope, original_max_position_embeddings=trained)
        if rope_type == "llama3":
            low = parameters.number("low_freq_factor", above=0.0)
            return replace(rope, low_freq_factor=low, high_freq_factor=parameters.number("high_freq_factor", above=low))
        if rope.theta == 1.0:
            raise CheckpointError("RoPE parameter 'rope_theta' must not be 1 with yarn: all wavelengths are the same")
        return replace(
            rope,
            beta_fast=parameters.number("beta_fast", 32.0, above=0.0),
            beta_slow=parameters.number("beta_slow", 1.0, above=0.0),
            attention_factor=_yarn_attention_factor(parameters, factor),
            truncate=parameters.flag("truncate", True),
        )

    def rotary_dim(self, head_dim: int) -> int:
        """Features of a head that are rotated; even."""
        return int(head_dim * self.partial_rotary_factor) // 2 * 2


def rotary_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> RotaryTable:
    """Angles of positions `0 ... max_positions - 1`, float32 `[max_positions, rotary_dim / 2]`.

    Raises:
        CheckpointError: the number of frequency factors does not fit the head.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return RotaryTable(cos.to(device), sin.to(device))


def rotary_bytes(rope: RopeConfig, head_dim: int) -> int:
    """Bytes of one position in a table: a cosine and a sine of each pair."""
    return rope.rotary_dim(head_dim) * torch.float32.itemsize


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position of each pair of features, float32 `[rotary_dim / 2]`.

    Raises:
        CheckpointError: the number of frequency factors does not fit the head.
    """
    dim = rope.rotary_dim(head_dim)
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.rope_type == "yarn":
        frequencies = _yarn(frequencies, rope, dim)
    if rope.freq_factors is not None:
        if len(rope.freq_factors) != dim // 2:
            raise CheckpointError(
                f"rope_freq_factors has {len(rope.freq_factors)} values, the model's heads need {dim // 2}"
            )
        frequencies = frequencies / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    trained_rotations = rope.original_max_position_embeddings * frequencies / (2.0 * math.pi)
    kept = (trained_rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)


def _yarn(frequencies: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """Features that turn often in the trained context are kept, those that turn seldom stretched."""

    def feature_with(rotations: float) -> float:
        log_wavelength = math.log(rope.original_max_position_embeddings) - math.log(rotations) - math.log(2.0 * math.pi)
        return dim * log_wavelength / (2.0 * math.log(rope.theta))

    low, high = feature_with(rope.beta_fast), feature_with(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1.0 - stretched)


def _rope_type(values: Mapping[str, Any]) -> RopeType:
    named = values.get("rope_type") or values.get("type") or "default"
    for rope_type in _SUPPORTED:
        if named == rope_type:
            return rope_type
    raise UnsupportedModelError(f"RoPE type {shown(named)} is not supported; supported are {', '.join(_SUPPORTED)}")


def _yarn_attention_factor(parameters: Keys, factor: float) -> float:
    if "attention_factor" in parameters:
        return parameters.number("attention_factor", above=0.0)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = (parameters.number(key, 0.0, minimum=0.0) for key in ("mscale", "mscale_all_dim"))
    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)


def _rotary_share(parameters: Keys, outer: Keys) -> float:
    share = parameters.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0, above=0.0), above=0.0)
    if share > 1.0:
        raise CheckpointError(f"RoPE parameter 'partial_rotary_factor' must be at most 1, got {share}")
    return share


def _freq_factors(config: Mapping[str, Any]) -> tuple[float, ...] | None:
    factors = config.get("rope_freq_factors")
    if factors is None:
        return None
    if not isinstance(factors, list | tuple) or not all(is_finite(factor) and factor > 0 for factor in factors):
        raise Keys(config).wrong("rope_freq_factors", "a list of positive numbers", factors)
    return tuple(float(factor) for factor in factors)
