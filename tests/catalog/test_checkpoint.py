import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from sparkgap.catalog.checkpoint import open_checkpoint
from sparkgap.catalog.safetensors_files import SafetensorsSource
from sparkgap.errors import CheckpointError, SparkgapError, UnsupportedModelError

from .builders import random_weights, write_gguf, write_safetensors


def write_model(directory: Path, *, shards: int = 1) -> dict[str, torch.Tensor]:
    """A model directory with everything but sense in its weights."""
    weights = random_weights(tied=True)
    write_safetensors(directory, weights, shards)
    (directory / "config.json").write_text('{"model_type": "llama", "eos_token_id": 7}')
    Backend(models.BPE(vocab={"a": 0, "<e>": 1}, merges=[])).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": {"content": "<e>"}, "bos_token": "a"}')
    return weights


@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_are_read_as_written(tmp_path: Path, shards: int) -> None:
    weights = write_model(tmp_path, shards=shards)
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.format, checkpoint.path, checkpoint.name) == ("safetensors", tmp_path, str(tmp_path))
    assert set(checkpoint.weights.names()) == set(weights)
    for name, tensor in weights.items():
        assert checkpoint.weights.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.weights.get(name), tensor)
    assert checkpoint.size_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    for read in (checkpoint.weights.get, checkpoint.weights.shape):
        with pytest.raises(CheckpointError, match="no tensor nothing"):
            read("nothing")


def test_tensors_keep_their_dtype(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.int8)}
    write_safetensors(tmp_path, weights)
    source = SafetensorsSource(tmp_path)
    assert [source.get(name).dtype for name in "ab"] == [torch.bfloat16, torch.int8]


def test_end_tokens_come_from_generation_config_then_config_then_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path)
    generation, config = tmp_path / "generation_config.json", tmp_path / "config.json"
    generation.write_text('{"eos_token_id": [5, 6, 5]}')
    assert open_checkpoint(str(tmp_path)).eos_token_ids == (5, 6)
    generation.write_text("{}")
    assert open_checkpoint(str(tmp_path)).eos_token_ids == (7,)
    config.write_text("{}")
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((1,), 0)
    config.write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match=r"config\.json has eos_token_id 'x'"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": ' + b"[" * 100_000])
def test_bad_json_names_its_file(tmp_path: Path, name: str, content: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as caught:
        open_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing|no \.safetensors"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_a_link_to_nothing_is_not_a_file_that_is_absent(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("blobs/gone")
    with pytest.raises(CheckpointError, match=rf"{name} is a link to blobs/gone, which is missing"):
        open_checkpoint(str(tmp_path))


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    write_model(tmp_path, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    content, mapping = shard.read_bytes(), json.loads(index.read_text())
    for damaged in (b"", content[:4], content[:-1], b"\xff" * 64):
        shard.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated or damaged"):
            open_checkpoint(str(tmp_path))
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(str(tmp_path))
    shard.write_bytes(content)
    mapping["weight_map"]["extra"] = shard.name
    index.write_text(json.dumps(mapping))
    with pytest.raises(CheckpointError, match="lacks tensor extra"):
        open_checkpoint(str(tmp_path))
    for weight_map in ({}, {"a": "../x"}, {"a": 3}, {"a": ""}, None, []):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=r"index\.json"):
            open_checkpoint(str(tmp_path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_safetensors_never_escape(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(tmp_path, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)})
    content = bytearray(path.read_bytes())
    path.unlink()
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
        whole = False
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        whole = True
    path.write_bytes(content)
    try:
        source = SafetensorsSource(tmp_path)
        for name in source.names():
            source.get(name)
    except SparkgapError:
        return
    assert whole


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_never_loaded(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(UnsupportedModelError, match=f"pickled weights.*{name}"):
        open_checkpoint(str(tmp_path))


def test_a_gguf_file_and_a_directory_that_holds_one(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, random_weights(tied=True), metadata={"tokenizer.ggml.bos_token_id": 3})
    for model in (path, tmp_path):
        checkpoint = open_checkpoint(str(model))
        assert (checkpoint.format, checkpoint.path) == ("gguf", path)
        assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((299,), 3)
        assert checkpoint.size_bytes == path.stat().st_size
        assert checkpoint.tokenizer.vocab_size == 300


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, random_weights(tied=True))
    path.chmod(0)
    with pytest.raises(CheckpointError, match="cannot read"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_models_saved_by_transformers(tmp_path: Path, architecture: str) -> None:
    """A tiny model saved by transformers has the tensors that its own state_dict names."""
    config = transformers.AutoConfig.for_model(
        architecture,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    Backend(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config["model_type"] == architecture
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert set(checkpoint.weights.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.weights.get(name), tensor)


@pytest.mark.model
def test_default_model_opens(default_model_path: Path) -> None:
    checkpoint = open_checkpoint(str(default_model_path))
    config = checkpoint.config
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100000.0, 1e-5, True)
    assert checkpoint.bos_token_id == 1
    assert checkpoint.eos_token_ids[0] == 2
    assert sum(torch.Size(checkpoint.weights.shape(n)).numel() for n in checkpoint.weights.names()) == 134_515_008
