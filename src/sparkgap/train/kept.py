"""The files that a training run keeps in `work/`, any of which may be damaged when it is read again."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparkgap.errors import ConfigError


def damaged(path: Path, what: str, remedy: str) -> ConfigError:
    """The error of a kept file that cannot be used, in one line.

    Args:
        path: the file.
        what: what is wrong with it.
        remedy: what to do.
    """
    return ConfigError(f"{path} is damaged: {' '.join(what.split())}; {remedy}")


def read_kept_json(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a kept file.

    Raises:
        ConfigError: it cannot be read, or is no JSON object; the message names it and the remedy.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error), remedy) from error
    if not isinstance(value, dict):
        raise damaged(path, "no JSON object", remedy)
    return value


def write_kept_json(path: Path, content: Any) -> None:
    """Write JSON to a file, which is there as a whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


def read_kept_tensors(path: Path, names: Collection[str], remedy: str) -> dict[str, Tensor]:
    """The tensors in a kept safetensors file.

    Args:
        path: the file.
        names: tensors that it must have.
        remedy: what to do about a damaged one.

    Raises:
        ConfigError: it cannot be read, or lacks a tensor; the message names it and the remedy.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from error
    except SafetensorError as error:
        raise damaged(path, str(error), remedy) from error
    for name in names:
        if name not in tensors:
            raise damaged(path, f"no tensor {name}", remedy)
    return tensors
