"""The GGUF container: metadata and tensor table, read from a memory map with every bound checked.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian. The gguf package's own reader
makes an array for each element of a token list, which takes seconds; this one reads the same header in a
fraction of one, and refuses damage by name. Value types, block sizes and dequantization are the gguf package's.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from sparkgap.catalog.keys import shown
from sparkgap.errors import CheckpointError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place in the file.

    Attributes:
        shape: outermost dimension first, as in torch (the file stores the reverse).
        kind: how its elements are stored.
        offset: first byte, from the start of the file.
        size_bytes: bytes it takes.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufContainer:
    """A GGUF file's header, over its memory map.

    Attributes:
        path: the file.
        metadata: values by key; arrays are lists (of str, int, float or bool).
        tensors: places by the file's tensor names.
        data: the whole file, a private copy-on-write map: views of it are writable and never change the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: mmap.mmap

    def raw(self, tensor: GgufTensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """A tensor's bytes, a view of the map."""
        return np.frombuffer(self.data, np.uint8, tensor.size_bytes, tensor.offset)


def open_container(path: Path) -> GgufContainer:
    """Read a GGUF file's header.

    Raises:
        CheckpointError: not a GGUF file, truncated or damaged; the message names the file and the place.
        UnsupportedModelError: big-endian, or a tensor type that is not known.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is empty; download or copy it again") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return _HeaderReader(path, data).read()


class _HeaderReader:
    """Walks the header once; `position` is the next unread byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def read(self) -> GgufContainer:
        self._read_magic()
        tensor_count = self._u64()
        metadata_count = self._u64()
        # The smallest entries: an empty key with a one-byte value; a nameless scalar tensor.
        self._check_count(metadata_count, 8 + 4 + 1, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._string()
            if key in metadata:
                self._damaged(f"metadata key {shown(key)} appears twice")
            metadata[key] = self._value(self._u32(), key)
        self._check_count(tensor_count, 8 + 4 + 4 + 8, "tensors")
        table = [self._tensor_entry() for _ in range(tensor_count)]
        return GgufContainer(self.path, metadata, self._place(table, self._alignment(metadata)), self.data)

    def _read_magic(self) -> None:
        if self.data[:4] != _MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file (it does not begin with GGUF)")
        self.position = 4
        version = self._u32()
        if version & 0xFFFF == 0 and version != 0:
            raise UnsupportedModelError(f"{self.path} is a big-endian GGUF file; convert it to little-endian")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self.path} has GGUF version {version}, and versions 2 and 3 are read")

    def _place(
        self, table: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in table:
            if name in tensors:
                self._damaged(f"tensor {shown(name)} appears twice")
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block_elements:
                self._damaged(f"tensor {shown(name)} has rows of {shape[-1]}, not a multiple of {kind.name} blocks")
            size_bytes = math.prod(shape) // block_elements * block_bytes
            if start + offset + size_bytes > self.size:
                self._damaged(
                    f"tensor {shown(name)} ends at byte {start + offset + size_bytes:,}, and the file has {self.size:,}"
                )
            tensors[name] = GgufTensor(shape, kind, start + offset, size_bytes)
        return tensors

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self._damaged(f"general.alignment is {alignment!r}")
        return alignment

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        dimensions = self._u32()
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._damaged(f"tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        if 0 in shape:
            self._damaged(f"tensor {shown(name)} has an empty dimension")
        kind = self._u32()
        try:
            return name, shape, GGMLQuantizationType(kind), self._u64()
        except ValueError as error:
            raise UnsupportedModelError(f"{self.path}: tensor {shown(name)} has the unknown type {kind}") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            return self._array(key)
        return self._scalars(kind, 1, key)[0]

    def _array(self, key: str) -> list[Any]:
        kind, count = self._u32(), self._u64()
        if kind == GGUFValueType.STRING:
            return self._strings(count, key)
        return list(self._scalars(kind, count, key))

    def _scalars(self, kind: int, count: int, key: str) -> tuple[Any, ...]:
        code = _SCALARS.get(kind)  # type: ignore[call-overload]
        if code is None:
            self._damaged(f"metadata key {shown(key)} has the unknown type {kind}")
        item_bytes = struct.calcsize(f"<{code}")
        self._check_count(count, item_bytes, f"values of {shown(key)}")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += count * item_bytes
        return values

    def _strings(self, count: int, key: str) -> list[str]:
        """The hot loop: a vocabulary and its merges are a hundred thousand short strings."""
        self._check_count(count, 8, f"values of {shown(key)}")
        data, position, size, length_at = self.data, self.position, self.size, _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                end = position + 8 + length_at(data, position)[0]
                if end > size:
                    self._damaged(f"the file ends inside {shown(key)}")
                append(data[position + 8 : end].decode())
                position = end
        except struct.error:
            self._damaged(f"the file ends inside {shown(key)}")
        except UnicodeDecodeError:
            self._damaged(f"{shown(key)} holds text that is not UTF-8")
        self.position = position
        return strings

    def _string(self) -> str:
        length = self._u64()
        end = self.position + length
        if end > self.size:
            self._damaged("the file ends inside a string")
        raw = self.data[self.position : end]
        self.position = end
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._damaged("a string is not UTF-8")

    def _u32(self) -> int:
        return self._integer(_U32)

    def _u64(self) -> int:
        return self._integer(_U64)

    def _integer(self, layout: struct.Struct) -> int:
        try:
            value: int = layout.unpack_from(self.data, self.position)[0]
        except struct.error:
            self._damaged("the file ends inside its header")
        self.position += layout.size
        return value

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.size - self.position:
            self._damaged(f"{count:,} {what} do not fit in the file")

    def _damaged(self, detail: str) -> NoReturn:
        raise CheckpointError(
            f"{self.path} is truncated or damaged at byte {self.position:,} ({detail}); download or copy it again"
        )
