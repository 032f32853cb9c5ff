"""What tells one target from another, so that a drafter is paired with the target it was made for."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparkgap.catalog.keys import Keys
from sparkgap.catalog.weights import WeightSource, read_weight

_DIGITS = 32
"""Hexadecimal digits of a fingerprint."""


@dataclass(frozen=True)
class TargetIdentity:
    """A target's architecture, its sizes and two fingerprints of its tensors.

    Attributes:
        architecture: Hugging Face class name.
        num_layers, hidden_size, vocab_size: sizes.
        model: fingerprint of all norm weights in bfloat16. Files of one model in other precisions agree in it, because
            norms are not quantized; further training changes it.
        weights: fingerprint of the middle layer's attention weights in bfloat16, which differs between precisions.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    model: str
    weights: str

    def to_json(self) -> dict[str, Any]:
        """The object that `read_identity` reads."""
        return asdict(self)

    @property
    def sizes(self) -> tuple[str, int, int, int]:
        """What is known without reading a tensor."""
        return self.architecture, self.num_layers, self.hidden_size, self.vocab_size


def target_sizes(config: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """`TargetIdentity.sizes` of a model's `config.json` keys.

    Raises:
        CheckpointError: a size is missing or is none.
    """
    keys = Keys(config)
    architecture = next(iter(keys.strings("architectures") or ()), "")
    return architecture, keys.integer("num_hidden_layers"), keys.integer("hidden_size"), keys.integer("vocab_size")


def identify_target(config: Mapping[str, Any], weights: WeightSource) -> TargetIdentity:
    """The identity of a model with these `config.json` keys and tensors; reads the tensors of two fingerprints.

    Raises:
        CheckpointError, UnsupportedModelError: a size or a tensor cannot be read.
    """
    sizes = target_sizes(config)
    middle = f"model.layers.{sizes[1] // 2}.self_attn."
    names = sorted(weights.names())
    norms = (name for name in names if "norm" in name and len(weights.shape(name)) == 1)
    attention = (name for name in names if name.startswith(middle) and len(weights.shape(name)) == 2)
    return TargetIdentity(*sizes, _fingerprint(weights, norms), _fingerprint(weights, attention))


def read_identity(value: Mapping[str, Any], label: str) -> TargetIdentity:
    """The identity that a JSON object describes.

    Args:
        value: the object.
        label: how messages name a key of it, with `{key}` for the key.

    Raises:
        CheckpointError: a key is missing or has a value of the wrong kind.
    """
    keys = Keys(value, label)
    return TargetIdentity(
        keys.text("architecture", ""),
        keys.integer("num_layers"),
        keys.integer("hidden_size"),
        keys.integer("vocab_size"),
        keys.text("model", ""),
        keys.text("weights", ""),
    )


def _fingerprint(weights: WeightSource, names: Iterable[str]) -> str:
    """A checksum of the named tensors, whatever dtype they are stored in."""
    checksum = hashlib.sha256()
    for name in names:
        tensor = read_weight(weights, name).to(torch.bfloat16).contiguous()
        checksum.update(f"{name}{list(tensor.shape)}".encode())
        checksum.update(tensor.view(torch.int16).numpy().tobytes())
    return checksum.hexdigest()[:_DIGITS]
