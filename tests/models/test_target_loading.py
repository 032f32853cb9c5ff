"""Reading tensors into a network: sharing, casts, memory and refusals."""

import pytest
import torch
from tiny_models import CPU, Tensors, load_saved, tiny_model

from sparkgap.errors import CheckpointError, UnsupportedModelError
from sparkgap.models.cache import allocate_caches, cache_block_bytes
from sparkgap.models.config import ModelConfig
from sparkgap.models.loading import expected_shapes, load_target
from sparkgap.ops import TorchKernels

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 64,
}


def tensors_of(config: dict) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in expected_shapes(ModelConfig.from_hf(config)).items()}


def load(config: dict, tensors: dict[str, torch.Tensor], **options):
    options = {"kernels": TorchKernels(), "dtype": torch.float32, "device": CPU} | options
    return load_target(config, Tensors(tensors), **options)


def test_expected_tensors_are_those_transformers_saves():
    for family, changes in [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
    ]:
        model = tiny_model(family, **changes)
        config = ModelConfig.from_hf(model.config.to_dict() | {"architectures": [type(model).__name__]})
        saved = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert expected_shapes(config) == saved


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embedding_is_stored_once(tmp_path, tied):
    decoder = load_saved(tiny_model("llama", tie_word_embeddings=tied), tmp_path)
    shared = decoder.embedding.data_ptr() == decoder.lm_head.weight.data_ptr()
    assert shared == tied


def test_weights_are_cast_and_copied():
    tensors = tensors_of(CONFIG)
    decoder = load(CONFIG, tensors, dtype=torch.bfloat16)
    assert decoder.dtype == torch.bfloat16
    assert decoder.device == CPU
    layer = decoder.layers[1]
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(layer.qkv.weight, torch.cat([tensors[name] for name in names]).bfloat16())
    same_type = load(CONFIG, tensors)
    assert same_type.embedding.data_ptr() != tensors["model.embed_tokens.weight"].data_ptr()


def test_tensors_are_read_one_at_a_time_each_once():
    tensors = tensors_of(CONFIG)
    alive: list[str] = []
    reads: list[str] = []
    reported: list[str] = []

    class Source(Tensors):
        def get(self, name: str) -> torch.Tensor:
            import weakref

            assert not alive, f"{alive} still held while reading {name}"
            reads.append(name)
            alive.append(name)
            tensor = tensors[name].clone()
            weakref.finalize(tensor, alive.remove, name)
            return tensor

        def shape(self, name: str) -> tuple[int, ...]:
            return tuple(tensors[name].shape)

    load_target(
        CONFIG,
        Source(tensors),
        kernels=TorchKernels(),
        dtype=torch.float32,
        device=CPU,
        on_tensor=reported.append,
    )
    assert sorted(reads) == sorted(tensors)
    assert reported == reads


def test_missing_tensor_is_named_with_its_shape():
    tensors = tensors_of(CONFIG)
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_norm\.weight is missing.*\[6\]"):
        load(CONFIG, tensors)


def test_wrong_shape_is_named_with_both_shapes():
    tensors = tensors_of(CONFIG) | {"model.layers.0.self_attn.k_proj.weight": torch.zeros(12, 8)}
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj\.weight has shape \[12, 8\].*\[6, 8\]"):
        load(CONFIG, tensors)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight"])
def test_surplus_tensor_in_a_layer_is_refused(name):
    with pytest.raises(CheckpointError, match=f"{name}.*does not use"):
        load(CONFIG, tensors_of(CONFIG) | {name: torch.zeros(12)})


def test_harmless_surplus_is_ignored():
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3), "lm_head.weight": torch.zeros(20, 8)}
    config = CONFIG | {"tie_word_embeddings": True}
    decoder = load(config, tensors_of(config) | extra)
    assert decoder.lm_head.weight.data_ptr() == decoder.embedding.data_ptr()


def test_rotary_table_has_the_asked_length():
    assert load(CONFIG, tensors_of(CONFIG)).rotary.cos.shape == (64, 3)
    assert load(CONFIG, tensors_of(CONFIG), max_model_len=17).rotary.sin.shape == (17, 3)


def test_unknown_architecture_is_refused_before_any_read():
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        load({"architectures": ["GPT2LMHeadModel"]}, {})


def test_caches_take_the_bytes_they_are_said_to():
    caches = allocate_caches(3, 2, 16, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=CPU)
    assert len(caches) == 3
    assert caches[0].keys.shape == (5, 4, 2, 16)
    assert (caches[0].num_blocks, caches[0].block_size) == (5, 4)
    assert all((cache.keys == 0).all() and (cache.values == 0).all() for cache in caches)
    size = sum(tensor.nbytes for cache in caches for tensor in (cache.keys, cache.values))
    assert size == 5 * cache_block_bytes(3, 2, 16, 4, torch.bfloat16)
