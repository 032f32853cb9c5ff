"""Reading a model directory's JSON files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparkgap.errors import CheckpointError


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals below a model's path into CheckpointError."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        raise CheckpointError(f"cannot read {place}: {error.strerror or error}; check its permissions") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: missing, unreadable, not UTF-8, not JSON, or not an object; the message names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the model directory is incomplete, copy it again") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text; the file is damaged, copy it again") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON (line {error.lineno}: {error.msg}); copy it again") from error
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} is not usable JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`, empty when there is no such file."""
    return read_json(path) if path.exists() else {}
