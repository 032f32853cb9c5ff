"""Durable, verified files: checksums, flushing, free space."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sparkgap.errors import DownloadError

_CHUNK_BYTES = 1 << 20
_FULL_ERRNOS = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def directory_bytes(directory: Path) -> int:
    """Bytes of all files below a directory, some of which may vanish while they are counted."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def flush_to_disk(path: Path) -> None:
    """fsync a file or a directory's entries (where the platform lets directories be opened)."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_free_space(directory: Path, needed_bytes: int, what: str) -> None:
    """Check the file system of a directory before a download.

    Raises:
        DownloadError: less is free; the message gives both numbers.
    """
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise no_space(directory, what, f"{needed_bytes:,} bytes are needed and {free:,} are free")


def no_space(directory: Path, what: str, detail: str) -> DownloadError:
    """The error of a full disk."""
    return DownloadError(
        f"no space for {what} in {directory}: {detail}; free some space or set SPARKGAP_CACHE to another disk"
    )


@contextlib.contextmanager
def storage_errors(directory: Path, what: str) -> Iterator[None]:
    """Turn the operating system's storage errors into DownloadError: disk full, not writable, and others."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL_ERRNOS:
            raise no_space(directory, what, "the disk became full") from error
        raise DownloadError(
            f"cannot store {what} in {directory}: {error.strerror or error}; "
            "check its permissions or set SPARKGAP_CACHE to another directory"
        ) from error


def copy_verified(source: IO[bytes], target: Path, *, size_bytes: int, sha256: str, what: str) -> None:
    """Copy a binary stream to a new file, flush it, and check its size and SHA-256.

    Raises:
        DownloadError: the content is not the expected one; the file is removed.
    """
    digest, copied = hashlib.sha256(), 0
    with target.open("wb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            copied += len(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if copied != size_bytes or digest.hexdigest() != sha256:
        target.unlink()
        raise DownloadError(
            f"{what} is damaged: {copied:,} bytes with sha256 {digest.hexdigest()}, expected {size_bytes:,} bytes "
            f"with sha256 {sha256}; the file was removed, try again"
        )
