"""Writing a model directory whose weights are quantized, so that it stands alone."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.catalog.json_files import is_there
from sparkgap.catalog.quantization import CheckpointQuantization
from sparkgap.errors import ConfigError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def check_output_directory(directory: Path) -> None:
    """Raises ConfigError unless a model can be written there: it must be new or empty."""
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} is there already and not an empty directory; choose another --out")
    except OSError as error:
        raise ConfigError(f"cannot look at {directory}: {error.strerror}; choose another --out") from error


def write_quantized(
    directory: Path, original: Checkpoint, quantization: CheckpointQuantization, tensors: Mapping[str, Tensor]
) -> int:
    """Write a model directory: config.json, safetensors, tokenizer, chat template. It appears whole or not at all.

    Args:
        directory: new or empty.
        original: whose configuration and tokenizer are kept.
        quantization: of the tensors.
        tensors: by the format's names.

    Returns:
        Bytes of the weights.

    Raises:
        ConfigError: it cannot be written.
    """
    check_output_directory(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            weights = staging / "model.safetensors"
            save_file(dict(tensors), weights, {"format": "pt"})
            weights.chmod(0o644)  # safetensors lets nobody else read
            _write_json(staging / "config.json", _config(original, quantization))
            _write_tokenizer(staging, original)
            size_bytes = weights.stat().st_size
            staging.chmod(0o755)
            if directory.exists():
                directory.rmdir()
            staging.rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror or error}; choose another --out") from error
    return size_bytes


def _config(original: Checkpoint, quantization: CheckpointQuantization) -> dict[str, Any]:
    config = {key: value for key, value in original.config.items() if value is not None}
    config.pop("dtype", None)
    return config | {"torch_dtype": "bfloat16", "quantization_config": quantization.config()}


def _write_tokenizer(directory: Path, original: Checkpoint) -> None:
    generation: dict[str, Any] = {}
    if original.path.is_dir():
        for name in (*_TOKENIZER_FILES, "generation_config.json"):
            if is_there(original.path / name):
                shutil.copyfile(original.path / name, directory / name)
    else:
        original.tokenizer.save(directory)
        generation = {"bos_token_id": original.bos_token_id}
    if not (directory / "generation_config.json").exists():
        generation["eos_token_id"] = list(original.eos_token_ids)
        _write_json(directory / "generation_config.json", {k: v for k, v in generation.items() if v is not None})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
