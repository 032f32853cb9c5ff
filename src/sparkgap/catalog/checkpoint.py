"""A model ready to be built: its configuration, weights, tokenizer and end-of-sequence tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparkgap.catalog.gguf_file import GgufSource
from sparkgap.catalog.gguf_tokenizer import end_token_ids, tokenizer_from_gguf
from sparkgap.catalog.json_files import read_json, read_optional_json, readable
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.catalog.resolve import model_file, resolve
from sparkgap.catalog.safetensors_files import SafetensorsSource
from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.catalog.weights import WeightSource
from sparkgap.errors import CheckpointError

__all__ = ["Checkpoint", "open_checkpoint", "open_path", "resolve"]


@dataclass(frozen=True)
class Checkpoint:
    """An opened model.

    Attributes:
        name: what the user wrote.
        path: its directory or `.gguf` file.
        format: of the weights.
        config: keys of a Hugging Face config.json (written from metadata for GGUF).
        weights: its tensors.
        eos_token_ids: tokens that end a sequence.
        bos_token_id: the beginning-of-sequence token.
        tokenizer: its tokenizer and chat template.
        size_bytes: bytes of its weight files.
        files: its weight files.
    """

    name: str
    path: Path
    format: Literal["safetensors", "gguf"]
    config: dict[str, Any]
    weights: WeightSource
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer: Tokenizer
    size_bytes: int
    files: tuple[Path, ...]


def open_checkpoint(model: str, *, allow_download: bool = True, progress: ProgressReporter | None = None) -> Checkpoint:
    """Resolve and open a model. Reads headers and the tokenizer, no tensor.

    Args:
        model: a catalog name, a directory, a `.gguf` file, or `hf:owner/name`.
        allow_download: fetch a model that is not cached.
        progress: told of downloads.

    Raises:
        ModelNotFoundError: no such model.
        DownloadError: it could not be fetched.
        CheckpointError: its files are damaged or incomplete.
        UnsupportedModelError: it is of a kind that is not supported.
    """
    return open_path(model, resolve(model, allow_download=allow_download, progress=progress))


def open_path(name: str, path: Path) -> Checkpoint:
    """Open a model's directory or `.gguf` file under a name. Raises as `open_checkpoint`."""
    with readable(path):
        path = model_file(path) if path.is_dir() else path
        return _open_directory(name, path) if path.is_dir() else _open_gguf(name, path)


def _open_gguf(name: str, path: Path) -> Checkpoint:
    source = GgufSource(path)
    tokenizer = tokenizer_from_gguf(source.metadata)
    return Checkpoint(
        name=name,
        path=path,
        format="gguf",
        config=source.config,
        weights=source,
        eos_token_ids=end_token_ids(source.metadata),
        bos_token_id=tokenizer.bos_token_id,
        tokenizer=tokenizer,
        size_bytes=source.size_bytes,
        files=(path,),
    )


def _open_directory(name: str, path: Path) -> Checkpoint:
    config = read_json(path / "config.json")
    generation = read_optional_json(path / "generation_config.json")
    source = SafetensorsSource(path)
    tokenizer = Tokenizer.from_directory(path)
    return Checkpoint(
        name=name,
        path=path,
        format="safetensors",
        config=config,
        weights=source,
        eos_token_ids=_eos_token_ids(generation, config, tokenizer, path),
        bos_token_id=_bos_token_id(config, tokenizer),
        tokenizer=tokenizer,
        size_bytes=source.size_bytes,
        files=tuple(source.files),
    )


def _eos_token_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer, path: Path
) -> tuple[int, ...]:
    for file, keys in (("generation_config.json", generation), ("config.json", config)):
        value = keys.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(f"{path / file} has eos_token_id {value!r}; it must be a token id or a list of them")
        return tuple(dict.fromkeys(ids))
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _bos_token_id(config: Mapping[str, Any], tokenizer: Tokenizer) -> int | None:
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    value = config.get("bos_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) else None
