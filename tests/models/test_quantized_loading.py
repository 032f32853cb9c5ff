"""Networks of checkpoints that are quantized already."""

from typing import Any

import pytest
import torch
from tiny_models import CPU, Session, Tensors, random_tokens

from sparkgap import _native
from sparkgap.catalog.quantization import CheckpointQuantization, read_quantization
from sparkgap.errors import CheckpointError, UnsupportedModelError
from sparkgap.models.config import ModelConfig
from sparkgap.models.decoder import Decoder
from sparkgap.models.loading import expected_shapes, linear_modules, load_target
from sparkgap.ops import Kernels, NativeKernels, TorchKernels

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
GROUP = CheckpointQuantization(is_static=True).config()["config_groups"]["group_0"]


def config(*, is_static: bool, ignore: tuple[str, ...] = ("lm_head",), **changes: Any) -> dict[str, Any]:
    quantization = CheckpointQuantization(is_static, ignore)
    return BASE | {"quantization_config": quantization.config()} | changes


def checkpoint(settings: dict[str, Any], seed: int = 0) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    shapes = expected_shapes(ModelConfig.from_hf(settings))
    for name, shape in shapes.items():
        if name.endswith("weight_scale"):
            tensors[name] = (torch.rand(shape, generator=g) + 0.5) * 0.01
        elif name.endswith("input_scale"):
            tensors[name] = torch.full(shape, 0.02) + 0.01 * torch.rand(shape, generator=g)
        elif name.replace(".weight", ".weight_scale") in shapes and name.endswith(".weight"):
            tensors[name] = torch.randint(-127, 128, shape, generator=g, dtype=torch.int8)
        else:
            noise = torch.randn(shape, generator=g)
            tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    return Tensors(tensors)


def load(kernels: Kernels, settings: dict[str, Any], tensors: Tensors, **options: Any) -> Decoder:
    return load_target(settings, tensors, kernels=kernels, dtype=torch.float32, device=CPU, **options)


def logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    return Session(decoder, 1, 128).logits({0: tokens})


@pytest.mark.parametrize("is_static", [True, False])
def test_native_and_torch_kernels_agree(is_static: bool) -> None:
    """A rounding that falls the other way moves one activation by one step, which sets the tolerance."""
    settings = config(is_static=is_static, tie_word_embeddings=False)
    tensors = checkpoint(settings)
    tokens = random_tokens(40)
    native = logits(load(NativeKernels(2, "w8a8"), settings, tensors), tokens)
    reference = logits(load(TorchKernels(quantization="w8a8"), settings, tensors), tokens)
    error = (native - reference).abs()
    assert error.median() < 1e-4
    assert error.max() < 0.05 * reference.abs().max()
    if is_static:
        return  # scales that were not calibrated tell nothing of the values
    dequantized = {
        name: tensor.float() * tensors.get(name.replace(".weight", ".weight_scale"))
        if tensor.dtype == torch.int8
        else tensor
        for name, tensor in tensors.tensors.items()
        if not name.endswith("_scale")
    }
    plain = logits(load(TorchKernels(), BASE | {"tie_word_embeddings": False}, Tensors(dequantized)), tokens)
    assert 1e-4 < (plain - reference).abs().mean() < 0.1 * plain.abs().mean()


def test_static_rows_do_not_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(is_static=True)
    tensors = checkpoint(settings)
    tokens = [random_tokens(100, seed) for seed in range(3)]
    results = []
    for variant in _native.supported_variants():
        monkeypatch.setenv("SPARKGAP_ISA", variant)
        decoder = load(NativeKernels(2, "w8a8"), settings, tensors)
        whole = [Session(decoder, 3).logits({s: tokens[s]}) for s in range(3)]
        session, position = Session(decoder, 3), 0
        for width in (50, 1, 8, 3, 38):
            part = slice(position, position + width)
            together = session.logits({s: tokens[s][part] for s in range(3)}).view(3, width, -1)
            for s in range(3):
                assert torch.equal(together[s], whole[s][part])
            position += width
        results.append(torch.cat(whole))
    assert all(torch.equal(result, results[0]) for result in results)


def test_static_scales_can_be_left_aside() -> None:
    settings, dynamic = config(is_static=True), config(is_static=False)
    tensors = checkpoint(settings)
    without = Tensors({name: t for name, t in tensors.tensors.items() if not name.endswith("input_scale")})
    tokens = random_tokens(20)
    aside = logits(load(NativeKernels(1, "w8a8"), settings, tensors, static_activations=False), tokens)
    assert torch.equal(aside, logits(load(NativeKernels(1, "w8a8"), dynamic, without), tokens))
    assert not torch.equal(aside, logits(load(NativeKernels(1, "w8a8"), settings, tensors), tokens))


def test_modules_that_are_ignored_keep_their_weights() -> None:
    settings = config(is_static=True, ignore=("lm_head", r"re:.*\.1\..*proj"), tie_word_embeddings=False)
    model = ModelConfig.from_hf(settings)
    assert model.quantization is not None
    covered = [module for module in linear_modules(model) if model.quantization.covers(module)]
    assert len(covered) == 7
    decoder = load(NativeKernels(1, "w8a8"), settings, checkpoint(settings))
    forms = [layer.qkv.form for layer in decoder.layers]  # type: ignore[attr-defined]
    assert forms == ["int8", "float32"]
    assert decoder.lm_head.form == "int8"  # type: ignore[attr-defined]


def test_products_of_which_a_part_is_ignored_are_refused() -> None:
    settings = config(is_static=True, ignore=("model.layers.1.mlp.up_proj",))
    with pytest.raises(UnsupportedModelError, match=r"only some of .*gate_proj"):
        load(TorchKernels(), settings, checkpoint(settings))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.0.mlp.up_proj.input_scale", torch.tensor([torch.nan]), "must be positive"),
        ("model.layers.1.mlp.down_proj.input_scale", torch.tensor([0.0]), "must be positive"),
        ("model.layers.1.mlp.down_proj.input_scale", torch.zeros(2), "has shape"),
        ("model.layers.1.mlp.down_proj.weight_scale", torch.full((48, 1), torch.inf), "not finite"),
        ("model.layers.1.mlp.down_proj.weight", torch.zeros(48, 80), "float32, and config.json says"),
        ("model.layers.1.mlp.down_proj.weight_zero_point", torch.zeros(48, 1), "does not use it"),
    ],
)
def test_damaged_scales_are_named(name: str, value: torch.Tensor, message: str) -> None:
    settings = config(is_static=True)
    tensors = checkpoint(settings)
    tensors.tensors[name] = value
    with pytest.raises(CheckpointError, match=message) as error:
        load(TorchKernels(quantization="w8a8"), settings, tensors)
    assert name.rpartition(".")[0] in str(error.value)


def test_the_lowest_int8_value_counts_as_its_neighbour() -> None:
    settings = config(is_static=False)
    tensors = checkpoint(settings)
    name = "model.layers.0.mlp.up_proj.weight"
    tokens = random_tokens(10)
    found = []
    for lowest in (-127, -128):
        tensors.tensors[name][3, :5] = lowest
        found.append(logits(load(NativeKernels(1, "w8a8"), settings, tensors), tokens))
    assert torch.equal(*found)


def test_what_is_written_is_read() -> None:
    for is_static in (True, False):
        written = CheckpointQuantization(is_static, ("lm_head", "re:.*mlp.*"))
        assert read_quantization({"quantization_config": written.config()}) == written
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({"format": "pack-quantized"}, "pack-quantized"),
        ({"config_groups": {}}, "0 config_groups"),
        ({"config_groups": {"a": GROUP, "b": GROUP}}, "2 config_groups"),
        ({"config_groups": {"a": [1]}}, "config_groups"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"config_groups": {"a": GROUP | {"targets": ["re:.*"]}}}, "targets"),
        ({"config_groups": {"a": GROUP | {"input_activations": None}}}, "input_activations None"),
        ({"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"num_bits": 4}}}}, "weights.num_bits 4"),
        ({"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"strategy": "group"}}}}, "'group'"),
        ({"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"type": "float"}}}}, "'float'"),
        ({"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"symmetric": False}}}}, "symmetric False"),
    ],
)
def test_other_schemes_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    quantization = CheckpointQuantization(is_static=True).config() | changes
    with pytest.raises(UnsupportedModelError, match=named) as error:
        read_quantization({"quantization_config": quantization})
    assert "\n" not in str(error.value)


def test_a_pattern_that_is_none_is_refused() -> None:
    quantization = CheckpointQuantization(is_static=True, ignore=("re:(",)).config()
    with pytest.raises(CheckpointError, match="no regular expression"):
        read_quantization({"quantization_config": quantization})
