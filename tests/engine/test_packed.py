"""Prepared weights from start to start."""

import logging
import os
from pathlib import Path

import pytest
import torch

from sparkgap import LLM, SamplingParams, _native
from sparkgap.catalog.packed_files import packed_files
from sparkgap.engine import packed
from sparkgap.models.loading import _Loader
from tests.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in which even a tiny model is worth keeping."""
    monkeypatch.setenv("SPARKGAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed, "SMALLEST_BYTES", 0)
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def answer(model: Path, **settings: object) -> list[object]:
    output = LLM(str(model), threads=1, max_num_seqs=2, **settings).generate("abc", GREEDY)[0].outputs[0]
    assert output.logprobs is not None
    return [output.token_ids, [{i: entry.logprob for i, entry in table.items()} for table in output.logprobs]]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tensors that are read from the checkpoint."""
    names: list[str] = []
    original = _Loader.stacked

    def stacked(self: _Loader, wanted: list[str], dtype: torch.dtype | None = None) -> torch.Tensor:
        names.extend(wanted)
        return original(self, wanted, dtype)

    monkeypatch.setattr(_Loader, "stacked", stacked)
    return names


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "w8a8"}])
def test_the_second_start_prepares_nothing(model: Path, prepared: list[str], settings: dict[str, str]) -> None:
    first = answer(model, **settings)
    assert prepared
    assert len(packed_files()) == 1
    prepared.clear()
    assert answer(model, **settings) == first
    assert prepared == []


def test_all_instruction_sets_share_a_file(model: Path, prepared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for variant in _native.supported_variants():
        monkeypatch.setenv("SPARKGAP_ISA", variant)
        answers.append(answer(model))
    assert answers.count(answers[0]) == len(answers)
    assert prepared.count("model.norm.weight") == 1


def test_settings_and_changes_have_files_of_their_own(model: Path, prepared: list[str]) -> None:
    answer(model)
    answer(model, dtype="bfloat16")
    assert len(packed_files()) == 2
    os.utime(model / "model.safetensors", ns=(1, 1))
    prepared.clear()
    answer(model)
    assert prepared
    assert len(packed_files()) == 1, "those of the model as it was are removed"


def test_files_of_models_that_are_gone_are_removed(model: Path, tmp_path: Path) -> None:
    answer(model)
    model.rename(tmp_path / "renamed")
    answer(tmp_path / "renamed")
    assert len(packed_files()) == 1


@pytest.mark.parametrize("where", ["start", "middle", "end", "empty"])
def test_a_damaged_file_is_made_again(
    model: Path, prepared: list[str], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = answer(model)
    (file,) = packed_files()
    whole = file.read_bytes()
    data = bytearray(whole)
    data[{"start": 3, "middle": len(data) // 2, "end": len(data) - 1, "empty": 0}[where]] ^= 64
    file.write_bytes(b"" if where == "empty" else bytes(data))
    prepared.clear()
    with caplog.at_level(logging.INFO, "sparkgap"):
        assert answer(model) == first
    assert prepared
    assert "made again" in caplog.text
    prepared.clear()
    assert answer(model) == first
    assert prepared == []
    assert packed_files()[0].read_bytes() == whole


def test_a_cache_that_cannot_be_written(
    model: Path, cache: Path, prepared: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the directory should be")
    with caplog.at_level(logging.INFO, "sparkgap"):
        assert answer(model) == answer(model)
    assert "not kept" in caplog.text
    assert prepared.count("model.norm.weight") == 2


def test_small_models_are_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SMALLEST_BYTES", 16 << 20)
    answer(model)
    assert packed_files() == []


def test_the_torch_reference_keeps_nothing(model: Path) -> None:
    answer(model, dtype="float16")
    assert packed_files() == []
