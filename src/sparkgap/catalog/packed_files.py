"""Files of weights as a device's kernels hold them, so that a second start need not prepare them again.

Layout: safetensors, so that any tool can look inside. Its metadata has the key of what the file was made from, facts
that the writer adds, and a checksum of each tensor. A file appears under its name whole, by one rename; what is
damaged afterwards is found by the checksums. Nothing here is needed for a correct answer: whoever cannot read a file
prepares the weights, and whoever cannot write one goes without.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkgap.catalog.store import cache_root

SUFFIX = ".safetensors"
_PARTIAL = ".part"
_HEADER_LENGTH_BYTES = 8
_LARGEST_HEADER_BYTES = 64 << 20
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 20
_READERS = 4
_ABANDONED_AFTER_S = 3600.0

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int8: "I8",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class _Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: int


class PackedFile:
    """A file of packed weights whose header was read.

    Args:
        path: the file.
        key: what it must have been made from.

    Attributes:
        facts: what the writer said about the tensors.

    Raises:
        ValueError: it was made from something else, or is damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        self.path = path
        header, data_start = _read_header(path)
        metadata = header.get("__metadata__")
        if not isinstance(metadata, dict) or _parsed(metadata.get("key")) != _plain(key):
            raise ValueError("it was made from something else")
        facts, checksums = _parsed(metadata.get("facts")), _parsed(metadata.get("crc32"))
        if not isinstance(facts, dict) or not isinstance(checksums, dict):
            raise ValueError("its metadata is damaged")
        self.facts: dict[str, Any] = facts
        size = path.stat().st_size
        self._places = {
            name: _place(name, entry, data_start, size, checksums)
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def names(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._places)

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill contiguous tensors with the values of the tensors of these names.

        Raises:
            ValueError: one is not there in that shape and dtype, or its checksum is wrong.
            OSError: the file cannot be read.
        """
        self._each(self._fill, targets.items())

    def mapped(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors over a private map of the file: only what is looked at takes memory.

        Raises:
            ValueError: one is not there, or its checksum is wrong.
            OSError: the file cannot be read.
        """
        self._each(self._check, ((name,) for name in names))
        with self.path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensors = {}
        for name in names:
            place = self._place_of(name)
            flat = torch.frombuffer(data, dtype=place.dtype, count=math.prod(place.shape), offset=place.start)
            tensors[name] = flat.view(place.shape)
        return tensors

    def _each(self, task: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            # Reading and checksums leave the interpreter's lock.
            with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
                for done in [pool.submit(task, descriptor, *given) for given in arguments]:
                    done.result()
        finally:
            os.close(descriptor)

    def _place_of(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise ValueError(f"it has no tensor {name}")
        return place

    def _fill(self, descriptor: int, name: str, tensor: Tensor) -> None:
        place = self._place_of(name)
        if tensor.dtype != place.dtype or tuple(tensor.shape) != place.shape:
            raise ValueError(f"its tensor {name} is of another kind")
        view, checksum = _bytes_of(tensor), 0
        for start in range(0, len(view), _CHUNK_BYTES):
            part = view[start : start + _CHUNK_BYTES]
            self._read_part(descriptor, part, place.start + start, name)
            checksum = zlib.crc32(part, checksum)
        self._compare(name, checksum)

    def _check(self, descriptor: int, name: str) -> None:
        place = self._place_of(name)
        buffer, checksum = memoryview(bytearray(_CHUNK_BYTES)), 0
        for start in range(place.start, place.end, _CHUNK_BYTES):
            part = buffer[: min(place.end - start, _CHUNK_BYTES)]
            self._read_part(descriptor, part, start, name)
            checksum = zlib.crc32(part, checksum)
        self._compare(name, checksum)

    @staticmethod
    def _read_part(descriptor: int, part: memoryview, offset: int, name: str) -> None:
        if os.preadv(descriptor, [part], offset) != len(part):
            raise ValueError(f"its tensor {name} is cut off")

    def _compare(self, name: str, checksum: int) -> None:
        if checksum != self._place_of(name).checksum:
            raise ValueError(f"its tensor {name} has a wrong checksum")


def packed_directory() -> Path:
    """Where files of packed weights lie. Raises DownloadError as `cache_root`."""
    return cache_root() / "packed"


def packed_path(name: str, key: Mapping[str, Any]) -> Path:
    """The file for what `key` describes, of a model called `name`."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-60:] or "model"
    digest = hashlib.sha256(json.dumps(_plain(key), sort_keys=True).encode()).hexdigest()[:16]
    return packed_directory() / f"{readable}-{digest}{SUFFIX}"


def write_packed(path: Path, key: Mapping[str, Any], facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file of contiguous CPU tensors, whole or not at all. Processes may write the same file at once.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    offset, entries, checksums = 0, {}, {}
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        checksums[name] = zlib.crc32(_bytes_of(tensor))
        offset = end
    metadata = {"key": json.dumps(_plain(key)), "facts": json.dumps(facts), "crc32": json.dumps(checksums)}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-(len(header) + _HEADER_LENGTH_BYTES) % _ALIGNMENT)
    partial = path.with_name(f"{path.stem}-{secrets.token_hex(8)}{_PARTIAL}")
    try:
        with partial.open("xb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(len(header).to_bytes(_HEADER_LENGTH_BYTES, "little") + header))
            for tensor in tensors.values():
                _write_all(file.fileno(), _bytes_of(tensor))
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def packed_files() -> list[Path]:
    """Files of packed weights, in order of their names; none where the directory cannot be read."""
    try:
        return sorted(path for path in packed_directory().iterdir() if path.suffix in (SUFFIX, _PARTIAL))
    except OSError:
        return []


def packed_key(path: Path) -> dict[str, Any] | None:
    """What a file was made from; None when it cannot be told."""
    try:
        metadata = _read_header(path)[0].get("__metadata__")
        key = _parsed(metadata.get("key")) if isinstance(metadata, dict) else None
    except (OSError, ValueError):
        return None
    return key if isinstance(key, dict) else None


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[: 1 << 30]) :]


def _remove_abandoned(directory: Path) -> None:
    """What writers left that were killed."""
    for path in directory.glob(f"*{_PARTIAL}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                path.unlink()


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's bytes."""
    view: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return view


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if length > _LARGEST_HEADER_BYTES:
            raise ValueError("its header is damaged")
        text = file.read(length)
    header = _parsed(text) if len(text) == length else None
    if not isinstance(header, dict):
        raise ValueError("its header is damaged")
    return header, _HEADER_LENGTH_BYTES + length


def _parsed(text: Any) -> Any:
    """JSON's value; None for what is none."""
    try:
        return json.loads(text) if isinstance(text, str | bytes) else None
    except (ValueError, RecursionError):
        return None


def _plain(key: Mapping[str, Any]) -> Any:
    """A key as it comes back from JSON."""
    return json.loads(json.dumps(key))


def _place(name: str, entry: Any, data_start: int, file_size: int, checksums: Mapping[str, Any]) -> _Place:
    try:
        dtype = _BY_NAME[entry["dtype"]]
        shape = tuple(int(size) for size in entry["shape"])
        start, end = (data_start + int(offset) for offset in entry["data_offsets"])
        checksum = int(checksums[name])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its entry of {name} is damaged") from error
    fits = min(shape, default=0) >= 0 and data_start <= start and end <= file_size
    if not fits or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"its entry of {name} is damaged, or it is cut off")
    return _Place(dtype, shape, start, end, checksum)
