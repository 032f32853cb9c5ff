import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkgap.catalog.gguf_container import open_container
from sparkgap.catalog.gguf_file import GgufSource
from sparkgap.catalog.gguf_tokenizer import end_token_ids, tokenizer_from_gguf
from sparkgap.errors import CheckpointError, UnsupportedModelError

from .builders import HEAD_DIM, LAYERS, VOCAB, random_weights, write_gguf

Q = GGMLQuantizationType


def quantizable() -> list[GGMLQuantizationType]:
    kinds = []
    for kind in Q:
        try:
            quants.quantize(np.zeros((1, 256), np.float32), kind)
        except NotImplementedError:
            continue
        kinds.append(kind)
    return kinds


def dequantizable() -> list[GGMLQuantizationType]:
    return [kind for kind in Q if hasattr(getattr(quants, kind.name, None), "dequantize_blocks")]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("kind", quantizable(), ids=lambda kind: kind.name)
def test_every_type_gives_the_values_of_its_safetensors_twin(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    weights = random_weights(tied=False)
    expected = write_gguf(tmp_path / "m.gguf", weights, kind=kind)
    source = GgufSource(tmp_path / "m.gguf")
    assert set(source.names()) == set(weights)
    for name in weights:
        assert source.shape(name) == tuple(weights[name].shape)
        same(source.get(name), expected[name])
    if kind in (Q.F16, Q.BF16):
        stored = torch.float16 if kind == Q.F16 else torch.bfloat16
        assert source.get("model.embed_tokens.weight").dtype == stored
    if kind == Q.F32:
        for name, tensor in weights.items():
            assert torch.equal(source.get(name), tensor)


@pytest.mark.parametrize("kind", dequantizable(), ids=lambda kind: kind.name)
def test_chunked_expansion_equals_the_packages(kind: GGMLQuantizationType) -> None:
    from sparkgap.catalog import gguf_file

    block_size, type_size = quants.GGML_QUANT_SIZES[kind]
    rows, blocks = 37, 3
    # Small bytes: no scale is infinite or not a number.
    raw = np.random.default_rng(3).integers(0, 0x3C, (rows, blocks * type_size), dtype=np.uint8)
    expected = quants.dequantize(raw, kind).reshape(-1, block_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_file, "_BLOCKS_AT_ONCE", 7)
        found = gguf_file._dequantize(raw.reshape(-1), kind)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(("architecture", "qk_norm"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_biases_norms_and_row_order_by_architecture(tmp_path: Path, architecture: str, qk_norm: bool) -> None:
    weights = random_weights(tied=True, biases=not qk_norm, qk_norm=qk_norm)
    expected = write_gguf(tmp_path / "m.gguf", weights, architecture=architecture)
    source = GgufSource(tmp_path / "m.gguf")
    assert set(source.names()) == set(weights)
    for name, values in expected.items():
        same(source.get(name), values)
    assert source.config["model_type"] == architecture
    assert source.config["tie_word_embeddings"] is True
    assert source.config["attention_bias"] is not qk_norm
    assert source.config["num_hidden_layers"] == LAYERS
    assert source.config["vocab_size"] == VOCAB


def test_configuration_of_rotary_scaling_window_and_head_dim(tmp_path: Path) -> None:
    weights = random_weights(tied=True)
    path = tmp_path / "m.gguf"
    write_gguf(path, weights, metadata={"llama.attention.sliding_window": 128, "llama.attention.key_length": 64})
    config = GgufSource(path).config
    assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert (config["sliding_window"], config["head_dim"], config["rope_scaling"]) == (128, 64, None)
    assert config["rms_norm_eps"] == 1e-5

    write_gguf(path, weights, metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert GgufSource(path).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}

    yarn = {"type": "yarn", "factor": 2.5, "original_context_length": 256}
    write_gguf(path, weights, metadata={f"llama.rope.scaling.{key}": value for key, value in yarn.items()})
    assert GgufSource(path).config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 256,
    }


def test_rope_factors_are_carried(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    path = tmp_path / "m.gguf"
    write_gguf(path, random_weights(tied=True), extra_tensors={"rope_freqs.weight": factors})
    source = GgufSource(path)
    assert source.config["rope_freq_factors"] == pytest.approx(factors.tolist())
    assert not any("rope" in name for name in source.names())
    write_gguf(path, random_weights(tied=True), extra_tensors={"rope_freqs.weight": factors[:5]})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        GgufSource(path)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"split.count": 3}, "split"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.value_length": 32}, "keys of 64"),
        ({"llama.rope.dimension_count": 32}, "rotates 32"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.logit_scale": 2.0}, "logit_scale"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, metadata: dict[str, object], word: str) -> None:
    write_gguf(tmp_path / "m.gguf", random_weights(tied=True), metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=word):
        GgufSource(tmp_path / "m.gguf")


def test_unsupported_architecture_and_tensor_are_named(tmp_path: Path) -> None:
    weights = random_weights(tied=True)
    write_gguf(tmp_path / "m.gguf", weights, architecture="gemma")
    with pytest.raises(UnsupportedModelError, match="gemma"):
        GgufSource(tmp_path / "m.gguf")
    extra = {"blk.0.ffn_gate_exps.weight": np.zeros((2, 32), np.float32)}
    write_gguf(tmp_path / "m.gguf", weights, extra_tensors=extra)
    with pytest.raises(UnsupportedModelError, match="ffn_gate_exps"):
        GgufSource(tmp_path / "m.gguf")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_weights(tied=True))
    source = GgufSource(tmp_path / "m.gguf")
    for read in (source.get, source.shape):
        with pytest.raises(CheckpointError, match=r"model\.layers\.9"):
            read("model.layers.9.mlp.up_proj.weight")


@pytest.mark.parametrize("content", [b"", b"GGU", b"not a model", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_what_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        GgufSource(path)
    with pytest.raises(CheckpointError, match="missing"):
        GgufSource(tmp_path / "none.gguf")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A whole file's bytes, and the length of its header."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, random_weights(tied=True), kind=Q.Q8_0)
    assert load_everything(path)
    return path.read_bytes(), GGUFReader(path).data_offset


def load_everything(path: Path) -> bool:
    """True if a file loads; any error but the two documented ones fails the test."""
    try:
        source = GgufSource(path)
        tokenizer = tokenizer_from_gguf(source.metadata)
        end_token_ids(source.metadata)
        tokenizer.decode(tokenizer.encode("some text 123"))
        for name in source.names():
            source.get(name)
    except (CheckpointError, UnsupportedModelError):
        return False
    return True


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_file_is_refused(small_file: tuple[bytes, int], tmp_path: Path, data: st.DataObject) -> None:
    content, header_bytes = small_file
    length = data.draw(st.integers(0, header_bytes) | st.integers(0, len(content) - 1))
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:length])
    # The last bytes of a file may be padding that no tensor needs.
    assert not load_everything(path) or len(content) - length < 32


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_header_bytes_never_escape(small_file: tuple[bytes, int], tmp_path: Path, data: st.DataObject) -> None:
    content, header_bytes = small_file
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_bytes - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(damaged)
    load_everything(path)


def test_damaged_names_are_cut_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = b"k" * 5000
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 999)
    path.write_bytes(header + bytes(100))
    with pytest.raises(CheckpointError, match="unknown type 999") as caught:
        open_container(path)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_reading_never_changes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, random_weights(tied=True))
    shutil.copy(path, tmp_path / "before")
    GgufSource(path).get("model.norm.weight").zero_()
    assert path.read_bytes() == (tmp_path / "before").read_bytes()


@pytest.mark.model
def test_default_model_reads_as_the_packages_own_reader(default_model_path: Path) -> None:
    container = open_container(default_model_path)
    reader = GGUFReader(default_model_path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert container.metadata[key] == field.contents(), key
    assert {tensor.name for tensor in reader.tensors} == set(container.tensors)
    for tensor in reader.tensors:
        ours = container.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type
        assert ours.shape == tuple(tensor.shape.tolist()[::-1])
        assert (ours.offset, ours.size_bytes) == (tensor.data_offset, tensor.n_bytes)
    source = GgufSource(default_model_path)
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    expected = quants.dequantize(embedding.data[:64], embedding.tensor_type)
    assert np.array_equal(source.get("model.embed_tokens.weight")[:64].numpy(), expected)
