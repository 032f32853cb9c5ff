"""Files of packed weights: what was written comes back, and nothing else does."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from sparkgap.catalog import packed_files
from sparkgap.catalog.packed_files import PackedFile, packed_key, packed_path, write_packed

KEY = {"model": "a", "version": 1, "files": [["x", 3]]}
FACTS = {"p": {"rows": 3}}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(700, 600, generator=g),
        "half": torch.randn(33, 7, generator=g).bfloat16(),
        "bytes": torch.randint(-128, 128, (5, 3), generator=g, dtype=torch.int8),
        "sums": torch.randint(-(2**31), 2**31 - 1, (17,), generator=g, dtype=torch.int32),
        "none": torch.empty(0, 4),
    }


def read(path: Path, key: dict[str, Any] = KEY) -> dict[str, Tensor]:
    file = PackedFile(path, key)
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors().items()}
    file.read(targets)
    return targets


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "file.safetensors"
    write_packed(path, KEY, FACTS, tensors())
    return path


def same(found: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


def test_what_is_written_comes_back(path: Path) -> None:
    assert same(read(path))
    file = PackedFile(path, KEY)
    assert file.facts == FACTS
    mapped = file.mapped(["half", "wide", "bytes"])
    assert same({**tensors(), **mapped})
    mapped["half"].zero_()  # private: the file keeps its values
    assert same(read(path))
    assert packed_key(path) == KEY
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_other_tools_can_read_it(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        assert same({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


@pytest.mark.parametrize("key", [{}, KEY | {"version": 2}, KEY | {"files": [["x", 4]]}])
def test_another_key_is_refused(path: Path, key: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="something else"):
        PackedFile(path, key)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**9), change=st.integers(1, 255), cut=st.booleans())
def test_damage_is_found(path: Path, place: int, change: int, cut: bool) -> None:
    """Whatever byte is changed, or wherever the file ends: the right values or an error."""
    whole = path.read_bytes()
    place %= 2000 if place % 2 else len(whole)
    damaged = whole[:place] if cut else whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :]
    path.write_bytes(damaged)
    try:
        assert same(read(path))
        PackedFile(path, KEY).mapped(["half", "sums"])
    except ValueError:
        pass
    finally:
        path.write_bytes(whole)


def test_wrong_requests(path: Path) -> None:
    file = PackedFile(path, KEY)
    with pytest.raises(ValueError, match="another kind"):
        file.read({"wide": torch.empty(600, 700)})
    with pytest.raises(ValueError, match="no tensor other"):
        file.mapped(["other"])
    with pytest.raises(FileNotFoundError):
        PackedFile(path.with_name("missing"), KEY)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="damaged"):
        PackedFile(path, KEY)
    assert packed_key(path) is None


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    start = threading.Barrier(6)

    def write() -> None:
        start.wait()
        for _ in range(5):
            write_packed(path, KEY, FACTS, tensors())
            assert same(read(path))

    failures: list[BaseException] = []

    def run() -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.safetensors"
    write_packed(path, KEY, FACTS, tensors())

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_files.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write_packed(path, KEY, FACTS, tensors(1))
    monkeypatch.undo()
    assert same(read(path))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "old.part", tmp_path / "new.part"
    for file in (old, new):
        file.write_bytes(b"x")
    os.utime(old, (0, 0))
    write_packed(tmp_path / "file.safetensors", KEY, FACTS, tensors())
    assert not old.exists()
    assert new.exists()


def test_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARKGAP_CACHE", str(tmp_path))
    names = {packed_path(name, key) for name in ("hf:a/b", "../../x", "") for key in (KEY, {})}
    assert len(names) == 6
    assert all(path.parent == tmp_path / "packed" for path in names)
    assert packed_files.packed_files() == []
