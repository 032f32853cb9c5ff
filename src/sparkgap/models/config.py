"""What a target network looks like, read from its Hugging Face configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkgap.catalog.keys import Keys, shown
from sparkgap.catalog.quantization import CheckpointQuantization, read_quantization
from sparkgap.errors import CheckpointError, UnsupportedModelError
from sparkgap.models.rope import RopeConfig


@dataclass(frozen=True)
class _Family:
    """Where an architecture departs from Llama, and the defaults of keys that its configuration may leave out."""

    num_kv_heads: int | None
    max_position_embeddings: int
    head_dim: int | None = None
    qkv_bias: bool | None = None
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    windows: str = "none"


_FAMILIES = {
    "LlamaForCausalLM": _Family(None, 2048, reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Family(8, 131072, windows="all"),
    "Qwen2ForCausalLM": _Family(32, 32768, qkv_bias=True, windows="by_layer"),
    "Qwen3ForCausalLM": _Family(32, 32768, head_dim=128, reads_attention_bias=True, qk_norm=True, windows="by_layer"),
}

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_MOST_LAYERS = 10_000
"""Far above any network; a damaged number of layers must not cost memory for each."""

SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)
"""Values of `architectures` that `ModelConfig.from_hf` accepts."""


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: RMSNorm, rotary grouped-query attention, gated SiLU feed-forward.

    Attributes:
        architecture: Hugging Face class name.
        vocab_size: rows of the embedding and of the LM head.
        hidden_size: features of the residual stream.
        intermediate_size: features between the feed-forward's products.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: features of a head; `num_heads * head_dim` need not be `hidden_size`.
        rms_norm_eps: added to the mean square in every norm.
        rope: rotary embedding.
        tie_word_embeddings: the LM head is the embedding.
        attention_bias: query, key and value projections have a bias.
        qk_norm: queries and keys are normed per head before the rotation.
        layer_windows: sliding window of each layer in positions, the row's own included; None sees everything.
        max_position_embeddings: longest context the model declares, in tokens.
        attention_output_bias: the attention's output projection has a bias.
        mlp_bias: the feed-forward's projections have a bias.
        quantization: of the weights in the checkpoint; None where they are in floating point.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    max_position_embeddings: int
    attention_output_bias: bool = False
    mlp_bias: bool = False
    quantization: CheckpointQuantization | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a `config.json`; keys it leaves out have the values that transformers gives them.

        Raises:
            UnsupportedModelError: an architecture, activation, RoPE variant or weight quantization that this
                engine does not run; the message names it.
            CheckpointError: a key is missing or out of its range; the message names it.
        """
        architecture = _architecture(config)
        family = _FAMILIES[architecture]
        _refuse_unsupported(config)
        keys = Keys(config)
        hidden_size = keys.integer("hidden_size")
        num_heads = keys.integer("num_attention_heads")
        num_layers = keys.integer("num_hidden_layers", maximum=_MOST_LAYERS)
        num_kv_heads = keys.integer("num_key_value_heads", family.num_kv_heads or num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config: {num_heads} attention heads cannot be shared among {num_kv_heads} key/value heads"
            )
        head_dim = _head_dim(keys, family.head_dim or hidden_size // num_heads)
        reads_bias = family.reads_attention_bias and keys.flag("attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6, minimum=0.0),
            rope=RopeConfig.from_hf(config),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            attention_bias=reads_bias if family.qkv_bias is None else family.qkv_bias,
            qk_norm=family.qk_norm,
            layer_windows=_layer_windows(config, family.windows, num_layers),
            max_position_embeddings=keys.integer("max_position_embeddings", family.max_position_embeddings),
            attention_output_bias=reads_bias,
            mlp_bias=family.reads_mlp_bias and keys.flag("mlp_bias"),
            quantization=read_quantization(config),
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = Keys(config).strings("architectures")
    model_type = config.get("model_type")
    name = names[0] if names else _MODEL_TYPES.get(str(model_type), f"model type {shown(model_type)}")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"architecture {name} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation hidden_act={shown(activation)} is not supported; supported is silu")


def _head_dim(keys: Keys, default: int) -> int:
    head_dim = keys.integer("head_dim", default)
    if head_dim % 2:
        raise CheckpointError(f"config: 'head_dim' must be even for rotary embedding, got {head_dim}")
    return head_dim


def _layer_windows(config: Mapping[str, Any], windows: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window, as transformers decides it for the family."""
    if windows == "none":
        return (None,) * num_layers
    keys = Keys(config)
    if windows == "by_layer" and not keys.flag("use_sliding_window"):
        window = None
    else:
        # Null means no window, where a key that is left out has the family's default.
        is_null = "sliding_window" in config and config["sliding_window"] is None
        window = None if is_null else keys.integer("sliding_window", 4096)
    if windows == "all":
        return (window,) * num_layers
    return tuple(window if sliding else None for sliding in _sliding_layers(config, window, num_layers))


def _sliding_layers(config: Mapping[str, Any], window: int | None, num_layers: int) -> list[bool]:
    keys = Keys(config)
    layer_types = keys.strings("layer_types")
    if layer_types is None:
        first = keys.integer("max_window_layers", 28, minimum=0)
        return [window is not None and layer >= first for layer in range(num_layers)]
    if len(layer_types) != num_layers:
        raise CheckpointError(f"config: 'layer_types' has {len(layer_types)} entries for {num_layers} layers")
    for name in layer_types:
        if name not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"layer type '{name}' is not supported")
    sliding = [name == "sliding_attention" for name in layer_types]
    if any(sliding) and window is None:
        raise CheckpointError("config: 'layer_types' has sliding_attention, but no sliding window is in use")
    return sliding
