"""What a target network looks like, read from its Hugging Face configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        hidden_size = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads")
        num_layers = _size(config, "num_hidden_layers")
        num_kv_heads = _size(config, "num_key_value_heads", family.num_kv_heads or num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config: {num_heads} attention heads cannot be shared among {num_kv_heads} key/value heads"
            )
        reads_bias = family.reads_attention_bias and bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, family.head_dim or hidden_size // num_heads),
            rms_norm_eps=_eps(config),
            rope=RopeConfig.from_hf(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=reads_bias if family.qkv_bias is None else family.qkv_bias,
            qk_norm=family.qk_norm,
            layer_windows=_layer_windows(config, family.windows, num_layers),
            max_position_embeddings=_size(config, "max_position_embeddings", family.max_position_embeddings),
            attention_output_bias=reads_bias,
            mlp_bias=family.reads_mlp_bias and bool(config.get("mlp_bias", False)),
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    name = str(names[0]) if names else _MODEL_TYPES.get(str(model_type), f"model type {model_type!r}")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"architecture {name} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation hidden_act='{activation}' is not supported; supported is silu")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"weights quantized by '{method}' are not supported; use the unquantized checkpoint or a GGUF file"
        )


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config: '{key}' is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config: '{key}' must be a positive integer, got {value!r}")
    return value


def _head_dim(config: Mapping[str, Any], default: int) -> int:
    head_dim = _size(config, "head_dim", default)
    if head_dim % 2:
        raise CheckpointError(f"config: 'head_dim' must be even for rotary embedding, got {head_dim}")
    return head_dim


def _eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise CheckpointError(f"config: 'rms_norm_eps' must be a number of at least 0, got {value!r}")
    return float(value)


def _layer_windows(config: Mapping[str, Any], windows: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window, as transformers decides it for the family."""
    if windows == "none":
        return (None,) * num_layers
    if windows == "by_layer" and not config.get("use_sliding_window", False):
        window = None
    else:
        window = None if _is_null(config, "sliding_window") else _size(config, "sliding_window", 4096)
    if windows == "all":
        return (window,) * num_layers
    return tuple(window if sliding else None for sliding in _sliding_layers(config, window, num_layers))


def _sliding_layers(config: Mapping[str, Any], window: int | None, num_layers: int) -> list[bool]:
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
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


def _is_null(config: Mapping[str, Any], key: str) -> bool:
    return key in config and config[key] is None
