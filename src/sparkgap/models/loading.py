"""Weights of a target network from a checkpoint's tensors."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkgap.catalog.weights import WeightSource, read_weight
from sparkgap.errors import CheckpointError
from sparkgap.models.config import ModelConfig
from sparkgap.models.decoder import Decoder, DecoderLayer
from sparkgap.models.rope import rotary_table
from sparkgap.ops.kernels import Kernels, LinearWeight


def load_target(
    checkpoint_config: Mapping[str, Any],
    weights: WeightSource,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    on_tensor: Callable[[str], None] | None = None,
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
) -> Decoder:
    """As `load_target`, of tensors that `check_tensors` has found right."""
    return _Loader(config, weights, kernels, dtype, device, on_tensor).decoder(max_model_len)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that the network reads, by its Hugging Face name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
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
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
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
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.on_tensor = on_tensor

    def decoder(self, max_model_len: int | None) -> Decoder:
        config = self.config
        embedding = self.tensor("model.embed_tokens.weight")
        if config.tie_word_embeddings:
            lm_head = self.kernels.prepare_linear(embedding)
        else:
            lm_head = self.linear("lm_head", bias=False)
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
        weight = self.stacked([f"{module}.weight" for module in modules])
        return self.kernels.prepare_linear(
            weight, self.stacked([f"{module}.bias" for module in modules]) if bias else None
        )

    def tensor(self, name: str) -> Tensor:
        return self.stacked([name])

    def stacked(self, names: Sequence[str]) -> Tensor:
        """The named tensors along their first dimension, in memory of the model's own."""
        shapes = [self.weights.shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        result = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            result[start : start + shape[0]].copy_(read_weight(self.weights, name))
            start += shape[0]
            if self.on_tensor is not None:
                self.on_tensor(name)
        return result
