"""From GGUF metadata to the keys of a Hugging Face config.json."""

import math
from collections.abc import Mapping
from typing import Any

from sparkgap.catalog.gguf_container import GgufContainer
from sparkgap.errors import CheckpointError, UnsupportedModelError

ROPE_FACTORS_TENSOR = "rope_freqs.weight"
"""Tensor of per-frequency divisors of the rotary embedding (Llama 3's scaling, already computed)."""

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MISTRAL = ("mistral", "MistralForCausalLM")


class Metadata:
    """Typed access to a file's metadata. Each reader raises CheckpointError that names the file and the key."""

    def __init__(self, container: GgufContainer) -> None:
        self.path = container.path
        self._values: Mapping[str, Any] = container.metadata

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return str(self._read(key, str, "a string", default))

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative integer; an array of equal ones counts as one (per-layer keys of uniform models)."""
        value = self._values.get(key)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise UnsupportedModelError(f"{self.path}: {key} differs between layers, which is not supported")
            value = value[0]
        elif key not in self._values:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, "a non-negative integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """As `integer`, None when the key is absent."""
        return self.integer(key) if key in self._values else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._read(key, (int, float), "a finite number", default)
        if isinstance(value, bool) or not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        return bool(self._read(key, bool, "a boolean", default))

    def array(self, key: str, kind: type) -> list[Any]:
        """An array whose elements are of one Python type."""
        values = self._read(key, list, "an array", None)
        # One kind of element an array: the container's reader sees to it.
        if values and not isinstance(values[0], kind):
            raise self._wrong(key, f"an array of {kind.__name__}")
        return list(values)

    def _read(self, key: str, kind: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if not isinstance(value, kind):
            raise self._wrong(key, what)
        return value

    def _wrong(self, key: str, what: str) -> CheckpointError:
        found = repr(self._values[key])[:40] if key in self._values else "nothing"
        return CheckpointError(f"{self.path}: metadata {key} must be {what}, found {found}; convert the model again")


def architecture_of(container: GgufContainer) -> str:
    """The file's architecture, if it is one of `llama`, `qwen2`, `qwen3` and its file is whole.

    Raises:
        UnsupportedModelError: another architecture, a part of a split file, or a mixture of experts.
    """
    metadata = Metadata(container)
    if metadata.integer("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{container.path} is one part of a split GGUF; join the parts with `llama-gguf-split --merge`"
        )
    architecture = metadata.text("general.architecture")
    if architecture not in _CLASSES:
        raise UnsupportedModelError(
            f"{container.path} has architecture {architecture!r}; supported in GGUF: {', '.join(_CLASSES)}"
        )
    if metadata.integer(f"{architecture}.expert_count", 0) > 0:
        raise UnsupportedModelError(f"{container.path} is a mixture of experts, which is not supported in GGUF")
    return architecture


def config_from_gguf(container: GgufContainer, rope_factors: list[float] | None) -> dict[str, Any]:
    """A Hugging Face config.json's keys, from metadata and tensor shapes.

    Args:
        container: the opened file.
        rope_factors: values of `rope_freqs.weight`, if the file has it; written as `rope_freq_factors`:
            frequency i of the rotary embedding is divided by factor i.

    Raises:
        CheckpointError: a key is missing or of a wrong kind.
        UnsupportedModelError: the model needs something that is not supported.
    """
    metadata = Metadata(container)
    architecture = architecture_of(container)
    prefix = f"{architecture}."
    heads = _positive(metadata, prefix + "attention.head_count")
    hidden_size = _positive(metadata, prefix + "embedding_length")
    head_dim = metadata.integer(prefix + "attention.key_length", hidden_size // heads)
    _check_shapes(metadata, prefix, head_dim)
    window = metadata.optional_integer(prefix + "attention.sliding_window") or None
    model_type, class_name = architecture, _CLASSES[architecture]
    if architecture == "llama" and window is not None:
        model_type, class_name = _MISTRAL
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": _vocab_size(container),
        "hidden_size": hidden_size,
        "intermediate_size": _positive(metadata, prefix + "feed_forward_length"),
        "num_hidden_layers": _positive(metadata, prefix + "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(prefix + "attention.head_count_kv", heads) or heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _positive(metadata, prefix + "context_length"),
        "rms_norm_eps": _rounded(metadata.number(prefix + "attention.layer_norm_rms_epsilon")),
        "rope_theta": _rounded(metadata.number(prefix + "rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, prefix),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": "output.weight" not in container.tensors,
        "attention_bias": "blk.0.attn_q.bias" in container.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in container.tensors,
    }
    if window is not None and architecture.startswith("qwen"):
        config["max_window_layers"] = 0
    if rope_factors is not None:
        if len(rope_factors) != head_dim // 2 or not all(math.isfinite(f) and f > 0 for f in rope_factors):
            raise CheckpointError(
                f"{container.path}: {ROPE_FACTORS_TENSOR} must be {head_dim // 2} positive factors; convert again"
            )
        config["rope_freq_factors"] = rope_factors
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token_id = metadata.optional_integer(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[key] = token_id
    return config


def _positive(metadata: Metadata, key: str) -> int:
    value = metadata.integer(key)
    if value == 0:
        raise CheckpointError(f"{metadata.path}: metadata {key} must be positive; convert the model again")
    return value


def _check_shapes(metadata: Metadata, prefix: str, head_dim: int) -> None:
    if head_dim == 0 or head_dim % 2:
        raise CheckpointError(f"{metadata.path}: a head dimension of {head_dim} is not usable; convert the model again")
    value_length = metadata.integer(prefix + "attention.value_length", head_dim)
    if value_length != head_dim:
        raise UnsupportedModelError(
            f"{metadata.path} has values of {value_length} and keys of {head_dim} per head, which is not supported"
        )
    rotated = metadata.integer(prefix + "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{metadata.path} rotates {rotated} of {head_dim} head dimensions, which is not supported"
        )
    for key in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        if metadata.number(prefix + key, 0.0) not in (0.0, 1.0 if key != "attention.scale" else head_dim**-0.5):
            raise UnsupportedModelError(f"{metadata.path} sets {prefix}{key}, which is not supported")


def _vocab_size(container: GgufContainer) -> int:
    embedding = container.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{container.path} has no tensor token_embd.weight; convert the model again")
    return embedding.shape[0]


def _rope_scaling(metadata: Metadata, prefix: str) -> dict[str, Any] | None:
    """Linear and YaRN scaling in Hugging Face's terms.

    The older key `rope.scale_linear` means linear scaling. A type of `none`, or a factor of 1, is no scaling.
    """
    kind = metadata.text(prefix + "rope.scaling.type", "none")
    factor = metadata.number(prefix + "rope.scaling.factor", 1.0)
    if kind == "none" and prefix + "rope.scale_linear" in metadata:
        kind, factor = "linear", metadata.number(prefix + "rope.scale_linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"{metadata.path} has rotary scaling {kind!r}; supported: linear, yarn")
    if kind == "none" or factor in (0.0, 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _rounded(factor)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _positive(
            metadata, prefix + "rope.scaling.original_context_length"
        )
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if prefix + f"rope.scaling.{key}" in metadata:
                scaling[name] = _rounded(metadata.number(prefix + f"rope.scaling.{key}"))
        if metadata.number(prefix + "rope.scaling.attn_factor", 1.0) != 1.0:
            raise UnsupportedModelError(
                f"{metadata.path} sets {prefix}rope.scaling.attn_factor, which is not supported"
            )
    return scaling


def _rounded(value: float) -> float:
    """A number that was stored as float32, in the digits that float32 holds: 1e-05, not 9.99999974e-06."""
    return float(f"{value:.7g}")
