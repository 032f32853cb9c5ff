"""Weights of a target network from a checkpoint's tensors."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkgap.catalog.weights import WeightSource, read_int8, read_weight
from sparkgap.errors import CheckpointError, UnsupportedModelError
from sparkgap.models.config import ModelConfig
from sparkgap.models.decoder import Decoder, DecoderLayer
from sparkgap.models.prepared import PreparedWeights
from sparkgap.models.rope import rotary_table
from sparkgap.ops.kernels import Kernels
from sparkgap.ops.operands import LinearWeight, QuantizedWeight

_EMBEDDING = "model.embed_tokens"
_LM_HEAD = "lm_head"


def load_target(
    checkpoint_config: Mapping[str, Any],
    weights: WeightSource,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    on_tensor: Callable[[str], None] | None = None,
    static_activations: bool = True,
    prepared: PreparedWeights | None = None,
) -> Decoder:
    """Build the network that `checkpoint_config` describes.

    Names and shapes of all tensors are checked before the first is read. Tensors are read one at a time and cast
    at once; fused projections are filled part by part, so that beside the model only one stored tensor is held.

    Args:
        checkpoint_config: keys of a Hugging Face `config.json`.
        weights: the checkpoint's tensors.
        kernels: prepares the weights and computes the network.
        dtype: bfloat16, float16 or float32.
        device: where the network lives.
        max_model_len: most positions of a sequence; the model's own limit when None.
        on_tensor: called with each tensor's name after it was read, for progress.
        static_activations: quantize activations by the scales of a checkpoint that has them.
        prepared: weights that need not be prepared again; those that are missing are added.

    Raises:
        UnsupportedModelError: the engine does not run this kind of network.
        CheckpointError: a tensor is missing, is not used by the network or has the wrong shape.
    """
    config = ModelConfig.from_hf(checkpoint_config)
    check_tensors(config, weights)
    return build_target(
        config,
        weights,
        kernels=kernels,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        on_tensor=on_tensor,
        static_activations=static_activations,
        prepared=prepared,
    )


def build_target(
    config: ModelConfig,
    weights: WeightSource,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    on_tensor: Callable[[str], None] | None = None,
    static_activations: bool = False,
    prepared: PreparedWeights | None = None,
) -> Decoder:
    """As `load_target`, of tensors that `check_tensors` has found right."""
    prepared = PreparedWeights() if prepared is None else prepared
    loader = _Loader(config, weights, kernels, dtype, device, on_tensor, static_activations, prepared)
    return loader.decoder(max_model_len)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that the network reads, by its Hugging Face name."""
    shapes = _unquantized_shapes(config)
    quantization = config.quantization
    if quantization is None:
        return shapes
    for module in linear_modules(config):
        if quantization.covers(module):
            shapes[f"{module}.weight_scale"] = (shapes[f"{module}.weight"][0], 1)
            if quantization.is_static:
                shapes[f"{module}.input_scale"] = (1,)
    return shapes


def linear_modules(config: ModelConfig) -> list[str]:
    """Names of the modules that are matrix products, the LM head among them unless it is tied."""
    names = [name.removesuffix(".weight") for name, shape in _unquantized_shapes(config).items() if len(shape) == 2]
    return [name for name in names if name != _EMBEDDING]


def _unquantized_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{_EMBEDDING}.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, size, bias in (("q_proj", queries, True), ("k_proj", keys, True), ("v_proj", keys, True)):
            _add_linear(shapes, f"{prefix}.self_attn.{name}", (size, hidden), bias and config.attention_bias)
        _add_linear(shapes, f"{prefix}.self_attn.o_proj", (hidden, queries), config.attention_output_bias)
        for name in ("gate_proj", "up_proj"):
            _add_linear(shapes, f"{prefix}.mlp.{name}", (inner, hidden), config.mlp_bias)
        _add_linear(shapes, f"{prefix}.mlp.down_proj", (hidden, inner), config.mlp_bias)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{prefix}.self_attn.{name}.weight"] = (config.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[f"{_LM_HEAD}.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, weights: WeightSource) -> None:
    """Compare a checkpoint's tensors with those the network reads.

    Tensors outside the layers that are not needed (a tied LM head, say) and stored rotary frequencies are ignored.
    A surplus tensor inside a layer means that the network would compute something else: it is refused.

    Raises:
        CheckpointError: naming the tensor, with the shape found and the shape expected.
    """
    names = set(weights.names())
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        if name not in names:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint; expected shape {list(shape)}")
        found = tuple(weights.shape(name))
        if found != shape:
            raise CheckpointError(f"tensor {name} has shape {list(found)}, expected {list(shape)}")
    in_layer = re.compile(r"model\.layers\.\d+\.")
    for name in sorted(names - shapes.keys()):
        if in_layer.match(name) and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(f"tensor {name} is in the checkpoint, but {config.architecture} does not use it")


def _add_linear(shapes: dict[str, tuple[int, ...]], name: str, shape: tuple[int, int], bias: bool) -> None:
    shapes[f"{name}.weight"] = shape
    if bias:
        shapes[f"{name}.bias"] = shape[:1]


class _Loader:
    """Reads the tensors of one network."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        on_tensor: Callable[[str], None] | None,
        static_activations: bool,
        prepared: PreparedWeights,
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.on_tensor = on_tensor
        self.static_activations = static_activations
        self.prepared = prepared

    def decoder(self, max_model_len: int | None) -> Decoder:
        config = self.config
        embedding = self.tensor(f"{_EMBEDDING}.weight")
        if config.tie_word_embeddings:
            lm_head = self.prepared.product(_LM_HEAD, lambda: self.kernels.prepare_linear(embedding))
        else:
            lm_head = self.linear(_LM_HEAD, bias=False)
        positions = max_model_len or config.max_position_embeddings
        return Decoder(
            config,
            self.kernels,
            embedding=embedding,
            layers=[self.layer(index) for index in range(config.num_layers)],
            final_norm=self.tensor("model.norm.weight"),
            lm_head=lm_head,
            rotary=rotary_table(config.rope, config.head_dim, positions, self.device),
        )

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [f"{attention}.{name}_proj" for name in "qkv"]
        return DecoderLayer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            qkv=self.linear(*qkv, bias=config.attention_bias),
            query_norm=self.tensor(f"{attention}.q_norm.weight") if config.qk_norm else None,
            key_norm=self.tensor(f"{attention}.k_norm.weight") if config.qk_norm else None,
            output=self.linear(f"{attention}.o_proj", bias=config.attention_output_bias),
            post_attention_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias),
            down=self.linear(f"{mlp}.down_proj", bias=config.mlp_bias),
            sliding_window=config.layer_windows[index],
        )

    def linear(self, *modules: str, bias: bool) -> LinearWeight:
        """One product of `modules`, one above the other."""
        return self.prepared.product("+".join(modules), lambda: self.new_linear(modules, bias))

    def new_linear(self, modules: Sequence[str], bias: bool) -> LinearWeight:
        biases = self.stacked([f"{module}.bias" for module in modules]) if bias else None
        quantization = self.config.quantization
        covered = [quantization is not None and quantization.covers(module) for module in modules]
        if any(covered) and not all(covered):
            raise UnsupportedModelError(f"only some of {', '.join(modules)} are quantized, and they are one product")
        if any(covered):
            return self.kernels.prepare_quantized(self.quantized(modules), biases)
        weight = self.stacked([f"{module}.weight" for module in modules])
        # What a quantized checkpoint leaves as it is, it does for its quality; an LM head is left because of engines
        # that read it as the embedding.
        return self.kernels.prepare_linear(weight, biases, quantize=quantization is None or modules[0] == _LM_HEAD)

    def quantized(self, modules: Sequence[str]) -> QuantizedWeight:
        """int8 weights one above the other; the largest of their input scales holds for all, as in vLLM."""
        values = self.stacked([f"{module}.weight" for module in modules], torch.int8)
        scales = self.stacked([f"{module}.weight_scale" for module in modules], torch.float32).flatten()
        input_scale = None
        quantization = self.config.quantization
        if self.static_activations and quantization is not None and quantization.is_static:
            names = [f"{module}.input_scale" for module in modules]
            input_scale = float(self.stacked(names, torch.float32).max())
            if not 0 < input_scale < math.inf:
                raise CheckpointError(f"{', '.join(names)} must be positive and finite; quantize the model again")
        if not scales.isfinite().all():
            raise CheckpointError(f"the weight_scale of {', '.join(modules)} is not finite; quantize the model again")
        return QuantizedWeight(values.clamp_(min=-127), scales, input_scale)

    def tensor(self, name: str) -> Tensor:
        return self.prepared.tensor(name, lambda: self.stacked([name]))

    def stacked(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Tensor:
        """The named tensors along their first dimension, in memory of the model's own."""
        dtype = dtype or self.dtype
        shapes = [self.weights.shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        result = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            read = read_int8 if dtype == torch.int8 else read_weight
            result[start : start + shape[0]].copy_(read(self.weights, name))
            start += shape[0]
            if self.on_tensor is not None:
                self.on_tensor(name)
        return result
