"""Reading a model directory's JSON files."""

import json
import os
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


def is_there(path: Path) -> bool:
    """Whether a directory has an entry of that name.

    Unlike `Path.exists` it is true of a link whose target is gone: reading it then says so, and the file is not passed
    over as if it had never been there.
    """
    return path.is_symlink() or path.exists()


def missing_file(path: Path) -> CheckpointError:
    """The error of a file that a model directory lacks, or that is a link to nothing."""
    if path.is_symlink():
        return CheckpointError(f"{path} is a link to {os.readlink(path)}, which is missing; copy the model again")
    return CheckpointError(f"{path} is missing; the model directory is incomplete, copy it again")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: missing, unreadable, not UTF-8, not JSON, or not an object; the message names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise missing_file(path) from error
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
    return read_json(path) if is_there(path) else {}
