"""The measure of quality, against what it must be."""

import json
from pathlib import Path

import pytest
import torch

from sparkgap import LLM
from sparkgap.bench.quality import Reference, held_text, measure_quality, text_windows
from sparkgap.errors import PromptError
from tests.cli.conftest import Program
from tests.tiny_model import CONTEXT, VOCAB_SIZE, write_tiny_model

TEXT = "Pack my box with five dozen liquor jugs, and quickly."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def load(model: Path, **settings: str) -> LLM:
    return LLM(str(model), threads=1, graphs="off", max_num_seqs=1, **settings)


def test_figures_are_those_of_their_definitions(model: Path) -> None:
    reference, other = load(model, dtype="float32"), load(model)
    windows = text_windows(reference, TEXT, 20)
    done: list[int] = []
    read = Reference(reference, windows, done.append)
    found = measure_quality(other, read, done.append)
    losses, divergences, agreements = [], [], []
    for window in windows:
        p = reference.logits(reference.hidden_states(window)).double().softmax(-1)[:-1]
        q = other.logits(other.hidden_states(window)).double().softmax(-1)[:-1]
        losses.append(-q[torch.arange(len(window) - 1), window[1:]].log())
        divergences.append((p * (p / q).log()).sum(-1))
        agreements.append(p.argmax(-1) == q.argmax(-1))
    assert found.tokens == sum(map(len, losses)) == len(reference.tokenizer.encode(TEXT)) - len(windows)
    assert found.perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-5)
    assert found.mean_kl == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-3, abs=1e-7)
    assert found.kl_99 == pytest.approx(float(torch.cat(divergences).quantile(0.99)), rel=1e-3, abs=1e-6)
    assert found.top1_agreement == pytest.approx(float(torch.cat(agreements).double().mean()))
    assert 0 < found.mean_kl < found.kl_99
    assert len(done) == 2 * len(windows)


def test_the_reference_is_at_no_distance_from_itself(model: Path) -> None:
    reference = load(model, dtype="float32")
    windows = text_windows(reference, TEXT, 64)
    found = measure_quality(reference, Reference(reference, windows, lambda number: None))
    assert found.mean_kl == found.kl_99 == 0
    assert found.top1_agreement == 1


def test_pieces_of_a_text(model: Path) -> None:
    llm = load(model)
    token_ids = llm.tokenizer.encode(TEXT)
    assert text_windows(llm, TEXT, 25, limit=51) == [token_ids[:25], token_ids[25:50]]
    for text, limit in (("", None), ("a", None), (TEXT, 1)):
        with pytest.raises(PromptError, match="fewer than two tokens"):
            text_windows(llm, text, 25, limit)
    for wrong in ([], [0] * (CONTEXT + 1), [VOCAB_SIZE], [-1]):
        with pytest.raises(PromptError):
            llm.hidden_states(wrong)


def test_the_held_text_is_long_enough() -> None:
    assert 1500 < len(held_text().split()) < 4000


@pytest.fixture
def sparkgap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(monkeypatch, capsys)


def test_the_commands(sparkgap: Program, model: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text(TEXT)
    common = ("--model", str(model), "--threads", "1")
    made = sparkgap("quantize", *common, "--out", str(out), "--calibration", str(text), "--json")
    assert made.status == 0, made.err
    report = json.loads(made.out)
    assert (report["scheme"], report["products"], report["out"]) == ("w8a8-static", 14, str(out))
    measured = sparkgap(
        "bench", "quality", *common, "--text", str(text), "--also", str(out), "--context", "24", "--json"
    )
    assert measured.status == 0, measured.err
    schemes = json.loads(measured.out)["schemes"]
    assert list(schemes) == ["float32", "bfloat16", "w8a8 (dynamic)", str(out)]
    assert schemes["float32"]["mean_kl"] == 0
    assert all(0 < schemes[name]["mean_kl"] < 0.5 for name in list(schemes)[1:])
    table = sparkgap("bench", "quality", *common, "--text", str(text), "--max-tokens", "20").out
    assert "perplexity" in table
    assert "19 tokens predicted" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "--out", "{new}", "--scheme", "w4a16"), "scheme must be one of w8a8-static, w8a8-dynamic"),
        (("quantize", "--out", "{new}", "--smoothing", "2"), "smoothing must be from 0 to 1"),
        (("quantize", "--out", "{new}", "--calibration", "{new}"), "cannot read calibration file"),
        (("quantize", "--out", "{new}", "--calibration-tokens", "0"), "calibration-tokens must be at least 1"),
        (("quantize", "--out", "{new}", "--context", "1"), "context must be at least 2"),
        (("quantize", "--out", "{model}"), "choose another --out"),
        (("bench", "quality", "--text", "{new}"), "no text file"),
        (("bench", "quality", "--context", "1"), "context must be at least 2"),
        (("bench", "quality", "--max-tokens", "0"), "max-tokens must be at least 1"),
        (("bench", "quality", "--also", "{new}"), "no model directory"),
        (("generate", "a", "--quantization", "w8a8-static"), "needs calibrated activation scales"),
    ],
)
def test_bad_input(sparkgap: Program, model: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    places = {"new": str(tmp_path / "new"), "model": str(model)}
    result = sparkgap(*(argument.format(**places) for argument in arguments), "--model", str(model), "--threads", "1")
    assert result.status == 2
    assert message in result.err
    assert result.err.count("\n") == 1
