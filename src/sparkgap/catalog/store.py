"""The cache of downloaded models: one directory a model, published whole or not at all.

Layout below the cache root:

    models/<name>/            a model's files, and `sparkgap.json`: their source, sizes and checksums
    staging/<name>/<random>/  a download in progress, in the same file system
    locks/<name>.lock         held while a model is looked up or fetched

A directory appears under `models/` by one rename, after its files are complete, verified and flushed.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sparkgap.catalog.files import flush_to_disk, sha256_of, storage_errors
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.errors import DownloadError

STAMP_NAME = "sparkgap.json"
"""File beside a cached model's files that records what they are."""


def cache_root() -> Path:
    """`$SPARKGAP_CACHE`, else `$XDG_CACHE_HOME/sparkgap`, else `~/.cache/sparkgap`.

    Raises:
        DownloadError: there is no home directory to put it in.
    """
    own, shared = os.environ.get("SPARKGAP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser().absolute()
        if shared:
            return Path(shared).expanduser().absolute() / "sparkgap"
        return Path.home() / ".cache" / "sparkgap"
    except (RuntimeError, OSError) as error:
        named = own or shared or "~/.cache"
        raise DownloadError(
            f"no directory for the cache: {named} cannot be resolved ({error}); set SPARKGAP_CACHE to a directory"
        ) from error


def folder_name(name: str) -> str:
    """A model's name as the name of a folder: `hf:owner/name` is `hf--owner--name`."""
    return name.replace(":", "--").replace("/", "--")


@dataclass(frozen=True)
class FetchedModel:
    """What a source put into a staging directory.

    Attributes:
        source: where the files came from, in words.
        directory: the directory that holds the model's files and nothing else.
        sha256: checksum of each file by its name.
    """

    source: str
    directory: Path
    sha256: Mapping[str, str]


class ModelStore:
    """Cached models below one root. Safe with several processes at once.

    Args:
        root: cache root; None takes `cache_root()`.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_root()

    def directory(self, name: str) -> Path:
        """Where a model's files are once it is cached."""
        return self.root / "models" / folder_name(name)

    def folders(self) -> list[str]:
        """Names of the folders in which models are, sorted.

        Raises:
            DownloadError: the cache cannot be read.
        """
        models = self.root / "models"
        try:
            return sorted(path.name for path in models.iterdir()) if models.is_dir() else []
        except OSError as error:
            raise _unreadable(models, error) from error

    def find(self, name: str) -> Path | None:
        """A cached model's directory if all its files are there in their recorded sizes, else None."""
        directory = self.directory(name)
        stamp = _read_stamp(directory)
        return directory if stamp is not None and _problem(directory, stamp) is None else None

    @contextmanager
    def locked(self, name: str, progress: ProgressReporter) -> Iterator[None]:
        """Hold a model's lock; a second process waits here until the first has it cached or gives up."""
        locks = self.root / "locks"
        with storage_errors(self.root, f"model {name}"):
            locks.mkdir(parents=True, exist_ok=True)
            lock = FileLock(locks / f"{folder_name(name)}.lock")
            waits = not _acquire_now(lock)
        if waits:
            progress.log(f"waiting for another process that fetches {name}")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def check(self, name: str, progress: ProgressReporter, *, verify: bool) -> Path | None:
        """A cached model's directory, or None; a damaged one is removed, and said so. Needs the lock.

        Args:
            name: the model.
            progress: told what was removed.
            verify: compare checksums, not only sizes.
        """
        directory = self.directory(name)
        stamp = _read_stamp(directory)
        if stamp is None:
            return None
        problem = _problem(directory, stamp) or (_checksum_problem(directory, stamp) if verify else None)
        if problem is None:
            return directory
        with storage_errors(self.root, f"model {name}"):
            shutil.rmtree(directory)
        progress.log(f"removed the damaged copy of {name}: {problem}")
        return None

    def adopt(self, name: str, file_name: str, sha256: str, progress: ProgressReporter) -> Path | None:
        """Take over a file placed in a model's directory by hand, if its checksum is right. Needs the lock."""
        directory = self.directory(name)
        file = directory / file_name
        if not file.is_file():
            return None
        if sha256_of(file) != sha256:
            with storage_errors(self.root, f"model {name}"):
                file.unlink()
            progress.log(f"removed {file}: its checksum is wrong")
            return None
        with storage_errors(self.root, f"model {name}"):
            _write_stamp(directory, name, f"placed by hand: {file_name}", {file_name: sha256})
        return directory

    def publish(self, name: str, fetch: Callable[[Path], FetchedModel]) -> Path:
        """Fetch a model into a staging directory and rename it into place. Needs the lock.

        What an earlier process left when it was killed is removed first.
        """
        staging_root = self.root / "staging" / folder_name(name)
        with storage_errors(self.root, f"model {name}"):
            staging_root.mkdir(parents=True, exist_ok=True)
            for leftover in staging_root.iterdir():
                shutil.rmtree(leftover)
            staging = Path(tempfile.mkdtemp(dir=staging_root))
        try:
            fetched = fetch(staging)
            with storage_errors(self.root, f"model {name}"):
                _write_stamp(fetched.directory, name, fetched.source, fetched.sha256)
                self._rename_into_place(fetched.directory, self.directory(name))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return self.directory(name)

    @staticmethod
    def _rename_into_place(source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        for file in source.rglob("*"):
            flush_to_disk(file)
        flush_to_disk(source)
        source.rename(target)
        flush_to_disk(target.parent)


def _acquire_now(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def _write_stamp(directory: Path, name: str, source: str, sha256: Mapping[str, str]) -> None:
    files = {
        file: {"size_bytes": (directory / file).stat().st_size, "sha256": digest} for file, digest in sha256.items()
    }
    text = json.dumps({"model": name, "source": source, "files": files}, indent=2)
    unfinished = directory / f"{STAMP_NAME}.part"
    unfinished.write_text(text + "\n", encoding="utf-8")
    flush_to_disk(unfinished)
    unfinished.replace(directory / STAMP_NAME)


def _read_stamp(directory: Path) -> Mapping[str, Any] | None:
    """The stamp of a cached model; None when there is none or it is not one of ours."""
    try:
        stamp = json.loads((directory / STAMP_NAME).read_text(encoding="utf-8"))
        files = stamp["files"]
        if files and all(isinstance(f["size_bytes"], int) and isinstance(f["sha256"], str) for f in files.values()):
            return dict(stamp)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(directory / STAMP_NAME, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return None


def _unreadable(path: Path, error: OSError) -> DownloadError:
    return DownloadError(
        f"cannot read {path}: {error.strerror}; check its permissions, or set SPARKGAP_CACHE to another directory"
    )


def _problem(directory: Path, stamp: Mapping[str, Any]) -> str | None:
    for name, file in stamp["files"].items():
        try:
            size = (directory / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        except OSError as error:
            raise _unreadable(directory / name, error) from error
        if size != file["size_bytes"]:
            return f"{name} has {size:,} bytes, expected {file['size_bytes']:,}"
    return None


def _checksum_problem(directory: Path, stamp: Mapping[str, Any]) -> str | None:
    for name, file in stamp["files"].items():
        if sha256_of(directory / name) != file["sha256"]:
            return f"{name} has a wrong checksum"
    return None
