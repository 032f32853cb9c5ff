"""From a model in floating point to a directory that is used like any other."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import CPU, Session, Tensors, random_tokens, read_safetensors, tiny_model

from sparkgap import LLM, SamplingParams
from sparkgap.catalog.checkpoint import Checkpoint, open_path
from sparkgap.errors import CheckpointError, ConfigError, PromptError
from sparkgap.models.config import ModelConfig
from sparkgap.models.loading import expected_shapes, load_target
from sparkgap.ops import TorchKernels
from sparkgap.quantize.calibration import InputStatistics, observe
from sparkgap.quantize.run import quantize
from sparkgap.quantize.smoothing import smoothed
from sparkgap.quantize.texts import own_answers, read_calibration
from tests.tiny_model import write_tiny_model

TEXT = "the quick brown fox jumps over the lazy dog and runs away."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tie_word_embeddings=True)
    return open_path("tiny", path)


@pytest.fixture(scope="module")
def windows(checkpoint: Checkpoint) -> list[list[int]]:
    token_ids = checkpoint.tokenizer.encode(TEXT)
    return [token_ids[:30], token_ids[30:]]


def logits(path: Path, token_ids: list[int], **settings: Any) -> torch.Tensor:
    llm = LLM(str(path), threads=1, graphs="off", max_num_seqs=1, **settings)
    return llm.logits(llm.hidden_states(token_ids))


@pytest.mark.parametrize("scheme", ["w8a8-static", "w8a8-dynamic"])
@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_a_directory_stands_alone(
    checkpoint: Checkpoint, windows: list[list[int]], tmp_path: Path, scheme: Any, smoothing: float
) -> None:
    out = tmp_path / "deep" / "out"
    report = quantize(checkpoint, out, scheme, windows, smoothing=smoothing, clip=False, threads=1)
    assert report.products == 14
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    plain = logits(checkpoint.path, windows[0], dtype="float32")
    quantized = logits(out, windows[0])
    agreement = torch.nn.functional.cosine_similarity(plain, quantized).min()
    assert agreement > 0.98
    llm = LLM(str(out), threads=1)
    assert llm.info()["quantization"] == ("w8a8-static" if scheme == "w8a8-static" else "w8a8")
    assert llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=3))[0].outputs[0].token_ids
    assert llm.tokenizer.chat_template == checkpoint.tokenizer.chat_template
    assert open_path("out", out).eos_token_ids == checkpoint.eos_token_ids
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644
    tensors = load_file(out / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected_shapes(
        ModelConfig.from_hf(llm.checkpoint.config)
    )
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.int8
    same = LLM(str(out), threads=1, dtype="float16", graphs="off", max_num_seqs=1)
    reference = same.logits(same.hidden_states(windows[0]))
    assert torch.nn.functional.cosine_similarity(reference, quantized).min() > 0.98


def test_settings_and_what_the_model_has(checkpoint: Checkpoint, windows: list[list[int]], tmp_path: Path) -> None:
    static, dynamic = tmp_path / "static", tmp_path / "dynamic"
    quantize(checkpoint, static, "w8a8-static", windows, smoothing=0, clip=False, threads=1)
    quantize(checkpoint, dynamic, "w8a8-dynamic", [], smoothing=0, clip=False, threads=1)
    token_ids = windows[0]
    by_default = logits(static, token_ids)
    assert torch.equal(by_default, logits(static, token_ids, quantization="w8a8-static"))
    aside = logits(static, token_ids, quantization="w8a8")
    assert not torch.equal(by_default, aside)
    assert torch.equal(aside, logits(dynamic, token_ids))
    assert torch.equal(aside, logits(dynamic, token_ids, quantization="w8a8"))
    for path in (dynamic, checkpoint.path):
        with pytest.raises(ConfigError, match="needs calibrated activation scales"):
            LLM(str(path), quantization="w8a8-static")
    for path in (static, dynamic):
        with pytest.raises(ConfigError, match="stored as int8"):
            LLM(str(path), quantization="none")
        with pytest.raises(ConfigError, match="quantized already"):
            quantize(open_path("q", path), tmp_path / "again", "w8a8-static", windows, smoothing=0, clip=False)
    assert not (tmp_path / "again").exists()


def test_speculation_and_graphs_on_a_static_model(
    checkpoint: Checkpoint, windows: list[list[int]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quantize(checkpoint, out, "w8a8-static", windows, smoothing=0.5, clip=True, threads=1)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = ["abc", "the quick"]
    answers = [
        [output.outputs[0].token_ids for output in LLM(str(out), threads=1, graphs=graphs).generate(prompts, params)]
        for graphs in ("on", "off")
    ]
    assert answers[0] == answers[1]


def test_smoothing_changes_no_result(checkpoint: Checkpoint, windows: list[list[int]]) -> None:
    model = ModelConfig.from_hf(checkpoint.config)
    before = observe(checkpoint.config, checkpoint.weights, windows, threads=1)
    weights = smoothed(model, checkpoint.weights, before, 0.7)
    after = observe(checkpoint.config, weights, windows, threads=1)
    for module, found in before.items():
        columns = weights.columns[f"{module}.weight"]
        torch.testing.assert_close(after[module].channels * columns, found.channels, rtol=1e-3, atol=1e-4)
    spread = [float((found.channels.max() / found.channels.median()).log()) for found in before.values()]
    smoother = [float((found.channels.max() / found.channels.median()).log()) for found in after.values()]
    assert sum(smoother) < sum(spread)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=200))
def test_scales_cover_what_was_seen(values: list[float]) -> None:
    found = InputStatistics(torch.zeros(1))
    x = torch.tensor(values)[:, None]
    found.add(x)
    largest = float(x.abs().max())
    assert found.scale(clip=False) == pytest.approx(largest / 127 if largest else 1 / 127)
    assert 0 < found.scale(clip=True) <= found.scale(clip=False) * (1 + 1e-6)


def test_clipping_leaves_out_a_rare_outlier() -> None:
    found = InputStatistics(torch.zeros(64))
    x = torch.randn(16000, 64, generator=torch.Generator().manual_seed(0))
    found.add(x)
    plain = found.scale(clip=True)
    # Little is to be gained on a normal distribution: its largest values are few and near.
    assert 0.6 * found.scale(clip=False) < plain
    x[0, 0] = 60.0
    found.add(x)

    def error(scale: float) -> float:
        return float(((x / scale).round().clamp(-127, 127) * scale - x).square().mean())

    assert error(found.scale(clip=True)) < 0.5 * error(found.scale(clip=False))


def test_wrong_input(checkpoint: Checkpoint, windows: list[list[int]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="choose another --out"):
            quantize(checkpoint, out, "w8a8-static", windows, smoothing=0, clip=False)
    with pytest.raises(ConfigError, match="no text"):
        quantize(checkpoint, tmp_path / "out", "w8a8-static", [], smoothing=0, clip=False)
    with pytest.raises(ConfigError, match="cannot write"):
        quantize(checkpoint, tmp_path / "file" / "out", "w8a8-dynamic", [], smoothing=0, clip=False)


def test_a_model_that_computes_nonsense_is_refused(tmp_path: Path, windows: list[list[int]]) -> None:
    path = write_tiny_model(tmp_path / "model")
    broken = open_path("broken", path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][:] = math.inf
    with pytest.raises(CheckpointError, match="not finite"):
        observe(broken.config, Tensors(tensors), windows, threads=1)


def test_texts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    llm = LLM(str(checkpoint.path), threads=1)
    told: list[int] = []
    answers = own_answers(llm, 300, seed=1, advance=told.append)
    assert sum(map(len, answers)) in (299, 300)
    assert sum(told) == 300
    assert answers == own_answers(llm, 300, seed=1)
    plain = tmp_path / "text.txt"
    plain.write_text(TEXT)
    assert read_calibration(plain, llm, 50, 20) == [
        llm.tokenizer.encode(TEXT)[start : start + 20][: 50 - start] for start in (0, 20, 40)
    ]
    lines = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    lines.write_text("\n".join(json.dumps(entry) for entry in ({"messages": chat}, {"text": "abc"}, {"prompt": "de"})))
    assert read_calibration(lines, llm, 1000, 64) == [
        llm.tokenizer.encode_chat(chat, add_generation_prompt=False),
        llm.tokenizer.encode("abc"),
        llm.tokenizer.encode("de"),
    ]
    for name, content in (("a.jsonl", "{"), ("b.jsonl", "[1]"), ("c.jsonl", '{"text": 3}'), ("d.txt", "x"), ("e", "")):
        (tmp_path / name).write_text(content)
        with pytest.raises(PromptError, match="calibration file"):
            read_calibration(tmp_path / name, llm, 10, 10)
    with pytest.raises(PromptError, match="cannot read"):
        read_calibration(tmp_path / "missing", llm, 10, 10)
    (tmp_path / "f.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="UTF-8"):
        read_calibration(tmp_path / "f.txt", llm, 10, 10)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 3}),
        ("mistral", {"sliding_window": 16}),
    ],
)
def test_smoothing_leaves_every_family_as_it_is(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    tiny_model(family, **changes).save_pretrained(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), read_safetensors(tmp_path)
    tokens = random_tokens(60)
    weights = smoothed(ModelConfig.from_hf(config), tensors, observe(config, tensors, [tokens], threads=1), 0.85)
    found = []
    for source in (tensors, weights):
        decoder = load_target(config, source, kernels=TorchKernels(), dtype=torch.float32, device=CPU)
        found.append(Session(decoder, 1).logits({0: tokens}))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
    assert not torch.equal(*found)
