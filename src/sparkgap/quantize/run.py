"""From a model in floating point to a directory of int8 weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.catalog.quantization import CheckpointQuantization
from sparkgap.catalog.quantized_checkpoint import check_output_directory, write_quantized
from sparkgap.catalog.weights import WeightSource, read_weight
from sparkgap.errors import ConfigError
from sparkgap.models.config import ModelConfig
from sparkgap.models.loading import check_tensors, expected_shapes, linear_modules
from sparkgap.ops.w8a8 import quantize_weight
from sparkgap.quantize.calibration import InputStatistics, observe
from sparkgap.quantize.smoothing import smoothed

Scheme = Literal["w8a8-static", "w8a8-dynamic"]

DEFAULT_SMOOTHING: Mapping[Scheme, float] = {"w8a8-static": 0.75, "w8a8-dynamic": 0.5}
"""Strength of the smoothing where nothing is said: what measured best on the default model."""


@dataclass(frozen=True)
class QuantizeReport:
    """What was written.

    Attributes:
        scheme: how activations are quantized.
        products: modules whose weights are int8 now.
        calibration_tokens: tokens whose activations were looked at.
        smoothing: strength of the smoothing; 0 without.
        clipped: modules whose scale is below that of the largest input seen.
        size_bytes: of the weights.
    """

    scheme: Scheme
    products: int
    calibration_tokens: int
    smoothing: float
    clipped: int
    size_bytes: int


def quantize(
    checkpoint: Checkpoint,
    out: Path,
    scheme: Scheme,
    windows: Sequence[list[int]],
    *,
    smoothing: float,
    clip: bool,
    threads: int | None = None,
    advance: Callable[[int], None] = lambda number: None,
) -> QuantizeReport:
    """Quantize a model and write it.

    Embedding, norms and LM head keep their values, in bfloat16. (Other engines read the LM head so; this one
    quantizes it when the directory is loaded, as it does with every model.)

    Args:
        checkpoint: the model, in floating point.
        out: a new or empty directory.
        scheme: how activations are quantized.
        windows: token ids of texts to calibrate on; not needed for `w8a8-dynamic` without smoothing.
        smoothing: strength, from 0 (none) to 1; see `smoothing`.
        clip: static scales are those of the least squared error, not of the largest input.
        threads: of the kernels that calibrate.
        advance: told how many of `calibration_passes` windows are done.

    Raises:
        ConfigError: the model is quantized already, there is nothing to calibrate on, or `out` cannot be written.
        CheckpointError: the model is damaged, or computes infinities or NaN.
    """
    check_output_directory(out)
    model = ModelConfig.from_hf(checkpoint.config)
    if model.quantization is not None:
        raise ConfigError(f"model {checkpoint.name} is quantized already; quantize its original")
    check_tensors(model, checkpoint.weights)
    if calibration_passes(scheme, smoothing) and not windows:
        raise ConfigError("there is no text to calibrate on")
    weights: WeightSource = checkpoint.weights
    statistics: dict[str, InputStatistics] = {}

    def look() -> dict[str, InputStatistics]:
        return observe(checkpoint.config, weights, windows, threads=threads, advance=advance)

    if smoothing:
        weights = smoothed(model, weights, look(), smoothing)
    if scheme == "w8a8-static":
        statistics = look()
    quantization = CheckpointQuantization(is_static=scheme == "w8a8-static")
    tensors = quantized_tensors(model, weights, quantization, statistics, clip)
    scaled = [name for name, found in statistics.items() if found.scale(clip) < found.scale(clip=False)]
    size_bytes = write_quantized(out, checkpoint, quantization, tensors)
    num_tokens = sum(map(len, windows)) if calibration_passes(scheme, smoothing) else 0
    products = sum(name.endswith(".weight_scale") for name in tensors)
    return QuantizeReport(scheme, products, num_tokens, smoothing, len(scaled), size_bytes)


def calibration_passes(scheme: Scheme, smoothing: float) -> int:
    """How often the calibration text is read."""
    return int(smoothing > 0) + int(scheme == "w8a8-static")


def quantized_tensors(
    model: ModelConfig,
    weights: WeightSource,
    quantization: CheckpointQuantization,
    statistics: dict[str, InputStatistics],
    clip: bool,
) -> dict[str, Tensor]:
    """The tensors of a quantized checkpoint, by the format's names."""
    tensors: dict[str, Tensor] = {}
    covered = {module for module in linear_modules(model) if quantization.covers(module)}
    for name in expected_shapes(model):
        module = name.removesuffix(".weight")
        if module not in covered:
            tensors[name] = read_weight(weights, name).to(torch.bfloat16).contiguous().clone()
            continue
        weight = quantize_weight(read_weight(weights, name))
        tensors[name] = weight.values
        tensors[f"{module}.weight_scale"] = weight.scales[:, None].clone()
        if quantization.is_static:
            tensors[f"{module}.input_scale"] = torch.tensor([statistics[module].scale(clip)])
    return tensors
