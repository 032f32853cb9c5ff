"""A trained network as a draft checkpoint in the speculators format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkgap.catalog.drafter_settings import DrafterSettings
from sparkgap.catalog.drafters import vocabulary_tensors, write_speculators
from sparkgap.catalog.identity import TargetIdentity
from sparkgap.models.config import ModelConfig
from sparkgap.train.batches import DraftVocabulary
from sparkgap.train.config import Method
from sparkgap.train.mtp_network import MtpNetwork
from sparkgap.train.network import DraftNetwork, TrainableNetwork


def drafter_settings(
    network: DraftNetwork | MtpNetwork,
    method: Method,
    target: ModelConfig,
    layer_ids: tuple[int, ...],
    tokens: int,
    made_for: TargetIdentity | None = None,
) -> DrafterSettings:
    """The configuration of a trained network.

    Args:
        network: what was trained.
        method: what it was trained as.
        target: what it drafts for.
        layer_ids: captured layers.
        tokens: tokens drafted in a round (N).
        made_for: identity of the target's weights.
    """
    shape = network.shape
    common: dict[str, Any] = {
        "method": method,
        "transformer": {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        "layer_windows": (None,) * shape.num_layers,
        "target_hidden_size": shape.target_hidden_size,
        "target_layer_ids": layer_ids,
        "draft_vocab_size": shape.draft_vocab_size,
        "num_target_layers": target.num_layers,
        "made_for": made_for,
    }
    if isinstance(network, MtpNetwork):
        return DrafterSettings(**common, layer_causal=(True,), default_speculative_tokens=tokens)
    return DrafterSettings(
        **common,
        layer_causal=(False,) * shape.num_layers,
        block_size=tokens + shape.lead_rows,
        mask_token_id=network.mask_token_id,
        sample_from_anchor=shape.lead_rows == 0,
        markov_rank=shape.markov_rank,
        markov_head_type=shape.markov_head_type if shape.markov_rank else "vanilla",
        confidence_head=bool(shape.markov_rank),
        confidence_head_with_markov=bool(shape.markov_rank),
    )


def _block_tensors(network: DraftNetwork) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {
        name: parameter
        for name, parameter in network.named_parameters()
        if name.startswith(("layers.", "hidden_norm.", "norm."))
    }
    tensors["fc.weight"] = network.folded_fc()
    if network.shape.markov_rank:
        tensors["markov_head.markov_w1.weight"] = network.markov_w1[network.markov_rows]
        tensors["markov_head.markov_w2.weight"] = network.markov_w2
        tensors["confidence_head.proj.weight"] = network.confidence.weight
        if network.shape.markov_head_type == "gated":
            tensors["markov_head.gate_proj.weight"] = network.markov_gate.weight
        elif network.shape.markov_head_type == "rnn":
            tensors["markov_head.joint_proj.weight"] = network.markov_joint.weight
    return tensors


@torch.no_grad()
def drafter_tensors(network: DraftNetwork | MtpNetwork, vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """The network's tensors in bfloat16 under the checkpoint's names, with the LM head rows of its vocabulary."""
    if isinstance(network, MtpNetwork):
        tensors = dict(network.named_parameters()) | {"hnorm.weight": network.hnorm.folded()}
    else:
        tensors = _block_tensors(network)
    reduced = network.shape.draft_vocab_size < network.shape.vocab_size
    if reduced:
        tensors["lm_head.weight"] = network.head
    converted = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in tensors.items()}
    return converted | (vocabulary_tensors(vocabulary.ids, network.shape.vocab_size) if reduced else {})


def export(
    directory: Path,
    network: TrainableNetwork,
    vocabulary: DraftVocabulary,
    settings: DrafterSettings,
    verifier: str,
    architectures: Sequence[str],
) -> int:
    """Write `config.json` and `model.safetensors`; returns the bytes of the latter.

    Args:
        directory: where they go.
        network: what was trained.
        vocabulary: its draft vocabulary.
        settings: as `drafter_settings`.
        verifier: the target's name.
        architectures: the target's Hugging Face architectures.
    """
    assert isinstance(network, DraftNetwork | MtpNetwork)
    tensors = drafter_tensors(network, vocabulary)
    write_speculators(directory, settings, tensors, verifier=verifier, verifier_architectures=architectures)
    return (directory / "model.safetensors").stat().st_size
