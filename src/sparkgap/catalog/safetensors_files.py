"""Weights in safetensors files: one file, or shards with an index. Memory-mapped, read one tensor at a time."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparkgap.catalog.json_files import is_there, missing_file, read_json
from sparkgap.errors import CheckpointError, UnsupportedModelError

INDEX_NAME = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsSource:
    """A WeightSource over the safetensors files of a directory.

    Opening maps each file and checks its header, its size and the index; it reads no tensor.

    Args:
        directory: the model directory.

    Raises:
        CheckpointError: a file is missing, truncated or damaged; the message names it.
        UnsupportedModelError: there are only pickled weights, which are never loaded.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = _weight_files(directory)
        opened = {path: _open(path) for path in self.files}
        self._owner: dict[str, Any] = {}
        self._file: dict[str, Path] = {}
        for path, file in opened.items():
            for name in file.keys():  # noqa: SIM118 (safe_open is not iterable)
                self._owner[name] = file
                self._file[name] = path
        self._check_index(opened)

    def _check_index(self, opened: Mapping[Path, Any]) -> None:
        index = self.directory / INDEX_NAME
        if not is_there(index):
            return
        contents = {path: frozenset(file.keys()) for path, file in opened.items()}
        for name, file_name in read_json(index)["weight_map"].items():
            if name not in contents[self.directory / file_name]:
                raise CheckpointError(
                    f"{self.directory / file_name} lacks tensor {name} that {INDEX_NAME} places there; copy both"
                )

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self._owner.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header.

        Raises:
            CheckpointError: no such tensor.
        """
        return tuple(self._require(name).get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        """A tensor in its stored dtype, backed by the mapped file.

        Raises:
            CheckpointError: no such tensor, or a damaged one.
        """
        file = self._require(name)
        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"tensor {name} of {self._file[name]} cannot be read ({error})") from error
        return tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(path.stat().st_size for path in self.files)

    def _require(self, name: str) -> Any:
        file = self._owner.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory} has no tensor {name}; its weights do not fit its config.json")
        return file


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if is_there(index):
        return _shards(index)
    single = directory / "model.safetensors"
    if is_there(single):
        return [single]
    files = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if files:
        return files
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickled:
        raise UnsupportedModelError(
            f"{directory} has only pickled weights ({pickled[0]}), which can run code when loaded; "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{directory} has no .safetensors files; the model directory is incomplete, copy it again")


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; copy it again")
    names = weight_map.values()
    if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        raise CheckpointError(f"{index} names a shard that is not a plain file name; copy it again")
    shards = [index.parent / name for name in sorted(set(names))]
    for shard in shards:
        if not shard.exists():
            raise CheckpointError(f"{shard} is missing: {index.name} lists it; copy the whole model directory again")
    return shards


def _open(path: Path) -> Any:
    try:
        path.open("rb").close()  # the library tells neither a directory nor a lack of permission from damage
    except FileNotFoundError as error:
        raise missing_file(path) from error
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}); download or copy it again") from error
