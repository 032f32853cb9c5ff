"""Prepared weights kept from one start to the next, in the cache directory."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.catalog.packed_files import packed_files, packed_key, packed_path
from sparkgap.errors import DownloadError
from sparkgap.models.config import ModelConfig
from sparkgap.models.prepared import PreparedWeights
from sparkgap.ops import Kernels, NativeKernels

_logger = logging.getLogger(__name__)

PACKING_VERSION = 2
"""To be raised with every change of how weights are quantized or laid out; the same on all instruction sets."""

SMALLEST_BYTES = 16 << 20
"""Preparing less takes no time worth a file."""


@contextlib.contextmanager
def kept_weights(
    checkpoint: Checkpoint, model: ModelConfig, dtype: torch.dtype, quantization: str | None, kernels: Kernels
) -> Iterator[PreparedWeights]:
    """Weights of an earlier start, for a network to be built from; those that it adds are kept afterwards.

    Whatever is wrong with the cache directory costs time only, and is told to the log.

    Args:
        checkpoint: the model's files.
        model: its network.
        dtype: of the network.
        quantization: of the network.
        kernels: whose form the weights have.
    """
    place = _place(checkpoint, model, dtype, quantization) if isinstance(kernels, NativeKernels) else None
    prepared = PreparedWeights() if place is None else _load(*place, kernels)
    yield prepared
    if place is not None and not prepared.is_complete and prepared.nbytes >= SMALLEST_BYTES:
        _save(prepared, *place, kernels)


def _place(
    checkpoint: Checkpoint, model: ModelConfig, dtype: torch.dtype, quantization: str | None
) -> tuple[Path, dict[str, Any]] | None:
    """The file, and what must be true of the weights in it."""
    try:
        key = {
            "packing_version": PACKING_VERSION,
            "byte_order": sys.byteorder,
            "model": str(checkpoint.path.resolve()),
            "files": _facts_of(checkpoint.files),
            "network": repr(model),
            "dtype": str(dtype),
            "quantization": quantization,
        }
        return packed_path(checkpoint.name, key), key
    except (DownloadError, OSError) as error:
        _logger.info("packed weights are not kept: %s", error)
        return None


def _facts_of(files: tuple[Path, ...]) -> list[list[Any]]:
    return [[path.name, (status := path.stat()).st_size, status.st_mtime_ns] for path in files]


def _load(path: Path, key: dict[str, Any], kernels: Kernels) -> PreparedWeights:
    try:
        return PreparedWeights.load(path, key, kernels)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _logger.info("packed weights in %s are made again: %s", path, error)
    return PreparedWeights()


def _save(prepared: PreparedWeights, path: Path, key: dict[str, Any], kernels: Kernels) -> None:
    try:
        prepared.save(path, key, kernels)
        _remove_outdated(path, key)
        _logger.info("packed weights kept in %s", path)
    except OSError as error:
        _logger.info("packed weights are not kept in %s: %s", path, error)


def _remove_outdated(path: Path, key: dict[str, Any]) -> None:
    """Files of this model as it was before it changed, or of an older form, and of models that are gone."""
    for other in packed_files():
        found = None if other == path else packed_key(other)
        if found is None:
            continue
        same_model = found.get("model") == key["model"]
        current = all(found.get(name) == key[name] for name in ("packing_version", "files", "network"))
        gone = isinstance(found.get("model"), str) and not Path(found["model"]).exists()
        if (same_model and not current) or gone:
            with contextlib.suppress(OSError):
                other.unlink()
