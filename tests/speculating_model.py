"""Tiny targets with drafters on disk: one of random weights, and one that is often right."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sparkgap.catalog.drafter_settings import DrafterSettings
from sparkgap.catalog.drafters import tensor_shapes, vocabulary_tensors, write_speculators

from .tiny_model import VOCAB_SIZE, write_tiny_model

BLOCK_SIZE = 5
"""Most draft tokens of either drafter."""


def settings(**changes) -> DrafterSettings:
    transformer = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": changes.pop("max_position_embeddings", 512),
    }
    values = {
        "method": "dspark",
        "transformer": transformer,
        "layer_windows": (None, None),
        "layer_causal": (False, False),
        "target_hidden_size": 32,
        "target_layer_ids": (0,),
        "block_size": BLOCK_SIZE,
        "mask_token_id": 7,
        "sample_from_anchor": True,
        "draft_vocab_size": VOCAB_SIZE,
        "markov_rank": 16,
    }
    return DrafterSettings(**(values | changes))


def random_tensors(wanted: DrafterSettings, seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(wanted)[0].items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else noise * shape[-1] ** -0.5
    return tensors


def write_random_drafter(directory: Path, **changes) -> Path:
    wanted = settings(**changes)
    write_speculators(directory, wanted, random_tensors(wanted), verifier="tiny")
    return directory


def write_looping_pair(
    directory: Path, *, sharpness: float = 2.0, confidences: bool = False, **config_changes: Any
) -> tuple[Path, Path]:
    """A target whose next token mostly follows from the last one alone, and a drafter whose Markov head knows how.

    The target's attention and MLP are weak, so its logits are near those of `embedding -> final norm -> head`; the
    drafter's backbone says nothing and its head's rank is the hidden size, so it is that product exactly. Where the
    rest of the target matters more, the drafter is wrong. `confidences` gives it a confidence head, of random weights.
    `config_changes` replace keys of the target's config.json.
    """
    model = write_tiny_model(directory / "target", seed=1)
    weights = load_file(model / "model.safetensors")
    weights = {name: 0.008 * w if "down_proj" in name or "o_proj" in name else w for name, w in weights.items()}
    generator = torch.Generator().manual_seed(2)
    embedding = weights["model.embed_tokens.weight"]
    head = sharpness * torch.randn(embedding.shape, generator=generator)
    weights["lm_head.weight"] = head
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False} | config_changes))
    wanted = settings(markov_rank=32, confidence_head=confidences, confidence_head_with_markov=confidences)
    tensors = random_tensors(wanted)
    tensors["norm.weight"] = torch.zeros(32)
    normed = embedding * (embedding.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights["model.norm.weight"]
    tensors["markov_head.markov_w1.weight"] = normed
    tensors["markov_head.markov_w2.weight"] = head
    write_speculators(directory / "drafter", wanted, tensors, verifier="tiny")
    return model, directory / "drafter"


def mtp_settings(**changes) -> DrafterSettings:
    block = settings()
    values = {
        "method": "mtp",
        "transformer": {**block.transformer, "num_hidden_layers": 1},
        "layer_windows": (None,),
        "layer_causal": (True,),
        "target_hidden_size": 32,
        "target_layer_ids": (1,),
        "draft_vocab_size": VOCAB_SIZE,
    }
    return DrafterSettings(**(values | changes))


def write_mtp(directory: Path, model: Path, kind: str, **changes) -> Path:
    """An MTP drafter for the target of `write_looping_pair`.

    `right` computes `embedding -> final norm -> head`, which is mostly what the target does; `wrong` takes the least
    probable token of that; `random` has random weights and half the vocabulary.
    """
    wanted = mtp_settings(**({"draft_vocab_size": VOCAB_SIZE // 2} if kind == "random" else {}) | changes)
    tensors = random_tensors(wanted)
    if kind == "random":
        tensors |= vocabulary_tensors(torch.arange(1, VOCAB_SIZE, 2), VOCAB_SIZE)
        tensors["lm_head.weight"] = torch.randn(VOCAB_SIZE // 2, 32, generator=torch.Generator().manual_seed(8))
    else:
        weights = load_file(model / "model.safetensors")
        tensors["enorm.weight"] = torch.ones(32)
        tensors["eh_proj.weight"] = torch.cat([torch.eye(32), torch.zeros(32, 32)], dim=1)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"layers.0.{name}.weight"].zero_()
        tensors["norm.weight"] = weights["model.norm.weight"]
        tensors["lm_head.weight"] = weights["lm_head.weight"] * (1 if kind == "right" else -1)
    write_speculators(directory, wanted, tensors, verifier="tiny")
    return directory
