import json
from pathlib import Path

import pytest
import torch

from sparkgap.catalog.packed_files import packed_path, write_packed

from .conftest import Program


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKGAP_CACHE", str(tmp_path))
    path = packed_path("some/model", {})
    write_packed(path, {}, {}, {"a": torch.zeros(1000)})
    return path


def test_cache_lists_and_clears(sparkgap: Program, packed: Path) -> None:
    listed = sparkgap("cache")
    assert listed.status == 0
    assert str(packed) in listed.out
    (packed.parent / "other.txt").write_text("not ours")
    size = packed.stat().st_size
    assert json.loads(sparkgap("info", "--json").out)["packed_weights_bytes"] == size
    cleared = json.loads(sparkgap("cache", "--clear", "--json").out)
    assert cleared["removed_bytes"] == size
    assert cleared["packed"] == []
    assert not packed.exists()
    assert (packed.parent / "other.txt").exists()


def test_several_entries_are_summed(sparkgap: Program, packed: Path) -> None:
    assert "in all" not in sparkgap("cache").out
    write_packed(packed_path("another/model", {}), {}, {}, {"a": torch.zeros(500_000)})
    *entries, total = sparkgap("cache").out.splitlines()
    assert len(entries) == 2
    assert total == f"{packed.parents[1]}  1.9 MiB in all"


def test_an_empty_cache(sparkgap: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKGAP_CACHE", str(tmp_path / "none"))
    assert sparkgap("cache").out == f"nothing in {tmp_path / 'none'}\n"
    assert sparkgap("cache", "--clear").status == 0
