"""Draft checkpoints on disk: reads DeepSpec and speculators, writes speculators.

Both formats are a directory with `config.json` and safetensors files, and name the tensors alike: `layers.*`,
`norm`, `fc`, `hidden_norm`, `markov_head.*`, `confidence_head.*`, and optionally `embed_tokens`, `lm_head`, `d2t`,
`t2d`. An MTP drafter, which only the speculators format has, has `enorm`, `hnorm` and `eh_proj` in place of `fc` and
`hidden_norm`, under DeepSeek-V3's names.
They differ in `config.json` (see `drafter_settings`). Sources: deepseek-ai/DeepSpec (`Qwen3DSparkModel`), z-lab
(`DFlashDraftModel`), vllm-project/speculators (`DSparkDraftModel`, `DFlashDraftModel`).
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkgap.catalog.drafter_settings import OWN_KEY, DrafterSettings, layer_ids_to_speculators, read_settings
from sparkgap.catalog.json_files import read_json, readable
from sparkgap.catalog.keys import Keys
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.catalog.resolve import resolve_drafter
from sparkgap.catalog.safetensors_files import SafetensorsSource
from sparkgap.catalog.weights import WeightSource
from sparkgap.errors import CheckpointError

_TRAINING_ONLY = frozenset({"verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq"})
_DSPARK_PLACEHOLDERS = ("mask_embedding", "mask_embedding.weight")
"""A DSpark block's mask rows are the embedding's row of the mask token, whatever stands here."""

_QWEN3_HEAD_DIM = 128
_QWEN3_KV_HEADS = 32
"""What transformers takes where a Qwen3 configuration does not say."""

_ARCHITECTURES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel", "mtp": "MTPDraftModel"}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A draft model on disk.

    Attributes:
        name: what messages call it.
        format: `deepspec` (z-lab's DFlash included) or `speculators`.
        settings: its configuration.
        weights: its tensors, under the names both formats share.
    """

    name: str
    format: Literal["deepspec", "speculators"]
    settings: DrafterSettings
    weights: WeightSource


def open_drafter(
    model: str, *, allow_download: bool = True, progress: ProgressReporter | None = None
) -> DrafterCheckpoint:
    """Resolve and open a draft model. Reads headers, no tensor.

    Args:
        model: a directory or `hf:owner/name`.
        allow_download: fetch a model that is not cached.
        progress: told of downloads.

    Raises:
        ModelNotFoundError: no such model.
        DownloadError: it could not be fetched.
        CheckpointError, UnsupportedModelError: as `read_drafter`.
    """
    path = resolve_drafter(model, allow_download=allow_download, progress=progress)
    with readable(path):
        return read_drafter(read_json(path / "config.json"), SafetensorsSource(path), model)


def read_drafter(config: Mapping[str, Any], weights: WeightSource, name: str) -> DrafterCheckpoint:
    """The draft model that a checkpoint's `config.json` and tensors make.

    Raises:
        CheckpointError: the configuration or the tensors are incomplete, or do not fit each other.
        UnsupportedModelError: a method, head type or feature that this engine does not run.
    """
    settings = read_settings(config, name)
    shapes = {key: weights.shape(key) for key in weights.names()}
    if settings.method == "dspark":
        for key in _DSPARK_PLACEHOLDERS:
            shapes.pop(key, None)
    if settings.confidence_head and not any(key.startswith("confidence_head.") for key in shapes):
        # Exports for serving may leave out a head that vLLM does not need; the draft tokens are the same.
        settings = replace(settings, confidence_head=False, confidence_head_with_markov=False, confidence_scaling=())
    _check_tensors(settings, shapes, name)
    format_: Literal["deepspec", "speculators"] = "speculators" if "speculators_model_type" in config else "deepspec"
    return DrafterCheckpoint(name, format_, settings, weights)


def tensor_shapes(settings: DrafterSettings) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Names and shapes of a draft checkpoint's tensors: those it must have, and those it may.

    Raises:
        CheckpointError: a size is missing or is none.
    """
    config = Keys(settings.transformer, "draft layers: {key}")
    hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
    heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads", _QWEN3_KV_HEADS)
    head_dim = config.integer("head_dim", _QWEN3_HEAD_DIM)
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    required: dict[str, Shape] = {"norm.weight": (hidden,)}
    if settings.method == "mtp":
        required["enorm.weight"] = required["hnorm.weight"] = (hidden,)
        required["eh_proj.weight"] = (hidden, 2 * hidden)
    else:
        required["fc.weight"] = (hidden, len(settings.target_layer_ids) * settings.target_hidden_size)
        required["hidden_norm.weight"] = (hidden,)
    for i in range(config.integer("num_hidden_layers")):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        projections = {
            "q": (q_size, hidden),
            "k": (kv_size, hidden),
            "v": (kv_size, hidden),
            "o": (hidden, q_size),
        }
        for key, shape in projections.items():
            required[f"{attention}.{key}_proj.weight"] = shape
            if config.flag("attention_bias"):
                required[f"{attention}.{key}_proj.bias"] = shape[:1]
        required[f"{attention}.q_norm.weight"] = required[f"{attention}.k_norm.weight"] = (head_dim,)
        required[f"{mlp}.gate_proj.weight"] = required[f"{mlp}.up_proj.weight"] = (inner, hidden)
        required[f"{mlp}.down_proj.weight"] = (hidden, inner)
        required[f"layers.{i}.input_layernorm.weight"] = (hidden,)
        required[f"layers.{i}.post_attention_layernorm.weight"] = (hidden,)
    vocab, draft_vocab = config.integer("vocab_size"), settings.draft_vocab_size
    optional: dict[str, Shape] = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (draft_vocab, hidden),
        "d2t": (draft_vocab,),
        "t2d": (vocab,),
    }
    if rank := settings.markov_rank:
        required["markov_head.markov_w1.weight"] = (vocab, rank)
        required["markov_head.markov_w2.weight"] = (draft_vocab, rank)
        if settings.markov_head_type == "gated":
            required["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            optional["markov_head.gate_proj.bias"] = (rank,)
        elif settings.markov_head_type == "rnn":
            required["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            optional["markov_head.joint_proj.bias"] = (3 * rank,)
    if settings.confidence_head:
        features = hidden + (settings.markov_rank if settings.confidence_head_with_markov else 0)
        required["confidence_head.proj.weight"] = (1, features)
        optional["confidence_head.proj.bias"] = (1,)
    return required, optional


def _check_tensors(settings: DrafterSettings, shapes: Mapping[str, Shape], name: str) -> None:
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if settings.transformer.get(key) is None:
            raise CheckpointError(f"drafter {name}: config.json has no {key}")
    required, optional = tensor_shapes(settings)
    for key, shape in required.items():
        if key not in shapes:
            raise CheckpointError(f"drafter {name}: the checkpoint has no tensor {key}")
        if shapes[key] != shape:
            raise CheckpointError(
                f"drafter {name}: {key} has shape {list(shapes[key])}, and config.json asks for {list(shape)}"
            )
    for key, found in shapes.items():
        if key in optional and found != optional[key]:
            raise CheckpointError(
                f"drafter {name}: {key} has shape {list(found)}, and config.json asks for {list(optional[key])}"
            )
        if key not in required and key not in optional and key not in _TRAINING_ONLY:
            raise CheckpointError(
                f"drafter {name}: tensor {key} belongs to no part of a {settings.method} draft model that this "
                "engine knows, so running without it would draft something else"
            )


def target_ids(checkpoint: DrafterCheckpoint) -> Tensor | None:
    """The target token id of each draft token id, int64 `[draft_vocab_size]`; None when they are the same.

    `d2t[i]` is the offset from draft id `i` to its target id, and `t2d[t]` says whether target id `t` is in the
    draft vocabulary.

    Raises:
        CheckpointError: the draft vocabulary is smaller and neither tensor is there, or they contradict each other
            or the vocabulary sizes.
    """
    settings, weights, name = checkpoint.settings, checkpoint.weights, checkpoint.name
    vocab, draft_vocab = settings.transformer["vocab_size"], settings.draft_vocab_size
    if draft_vocab > vocab:
        raise CheckpointError(
            f"drafter {name}: its draft vocabulary of {draft_vocab} tokens is larger than its target's of {vocab}"
        )
    names = set(weights.names())
    if "d2t" not in names and "t2d" not in names:
        if draft_vocab < vocab:
            raise CheckpointError(
                f"drafter {name}: it drafts {draft_vocab} of {vocab} tokens, and has neither d2t nor t2d"
            )
        return None
    members = weights.get("t2d").bool() if "t2d" in names else None
    if "d2t" in names:
        ids = torch.arange(draft_vocab) + weights.get("d2t").to(torch.int64)
        if bool((ids < 0).any()) or bool((ids >= vocab).any()):
            raise CheckpointError(f"drafter {name}: d2t leads outside the target's {vocab} tokens")
        if len(set(ids.tolist())) != draft_vocab:
            raise CheckpointError(f"drafter {name}: d2t maps two draft tokens to one target token")
    else:
        assert members is not None
        ids = members.nonzero().flatten()
    if members is not None and (int(members.sum()) != draft_vocab or not bool(members[ids].all())):
        raise CheckpointError(
            f"drafter {name}: t2d and d2t disagree: t2d marks {int(members.sum())} target tokens, d2t leads to "
            f"{int(members[ids].sum())} of them, and the draft vocabulary has {draft_vocab}"
        )
    return None if torch.equal(ids, torch.arange(vocab)) else ids.contiguous()


def vocabulary_tensors(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a draft vocabulary whose tokens have the distinct target ids `ids` `[draft_vocab]`."""
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[ids] = True
    return {"d2t": ids.to(torch.int64) - torch.arange(ids.numel()), "t2d": members}


def write_speculators(
    directory: Path,
    settings: DrafterSettings,
    tensors: Mapping[str, Tensor],
    *,
    verifier: str,
    verifier_architectures: Sequence[str] = (),
) -> None:
    """Write a draft checkpoint in the speculators format, as vLLM and speculators read it.

    Args:
        directory: where `config.json` and `model.safetensors` go; made if missing.
        settings: the drafter's configuration.
        tensors: by the formats' names; a reduced vocabulary needs `d2t`, `t2d` and `lm_head.weight`, which
            vLLM cannot take from the target.
        verifier: the target's name.
        verifier_architectures: the target's Hugging Face architectures.

    Raises:
        CheckpointError: tensors do not fit the settings, or the format cannot express them.
    """
    name = directory.name
    if settings.method != "dspark" and (settings.markov_rank or settings.confidence_head):
        raise CheckpointError(f"drafter {name}: a {settings.method} drafter has no Markov or confidence head")
    _check_tensors(settings, {key: tuple(tensor.shape) for key, tensor in tensors.items()}, name)
    if settings.draft_vocab_size < settings.transformer["vocab_size"]:
        for key in ("d2t", "t2d", "lm_head.weight"):
            if key not in tensors:
                raise CheckpointError(
                    f"drafter {name}: a reduced draft vocabulary is written with {key}, which is missing"
                )
    config = _speculators_config(settings, name, verifier, verifier_architectures)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / "model.safetensors.partial"
    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, partial, {"format": "pt"})
    partial.chmod(0o644)  # safetensors lets nobody else read
    os.replace(partial, directory / "model.safetensors")
    _replace_config(directory, config)


def write_speculators_config(
    directory: Path, settings: DrafterSettings, *, verifier: str, verifier_architectures: Sequence[str] = ()
) -> None:
    """Write only the `config.json` of `write_speculators`.

    Raises:
        CheckpointError: the format cannot express the settings.
    """
    _replace_config(directory, _speculators_config(settings, directory.name, verifier, verifier_architectures))


def _replace_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write `config.json` at once: the file is complete or as it was."""
    partial = directory / "config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(partial, directory / "config.json")


def _speculators_config(
    settings: DrafterSettings, name: str, verifier: str, verifier_architectures: Sequence[str]
) -> dict[str, Any]:
    windows = {window for window in settings.layer_windows if window is not None}
    transformer = {
        "model_type": "qwen3",
        **settings.transformer,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in settings.layer_windows],
        "use_sliding_window": bool(windows),
        "sliding_window": next(iter(windows), None),
    }
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[settings.method]],
        "speculators_model_type": settings.method,
        "speculators_config": {
            "algorithm": settings.method,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": settings.usual_speculative_tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": list(verifier_architectures)},
        },
        "transformer_layer_config": transformer,
        "draft_vocab_size": settings.draft_vocab_size,
        "target_hidden_size": settings.target_hidden_size,
        "aux_hidden_state_layer_ids": layer_ids_to_speculators(settings.target_layer_ids),
        "tie_word_embeddings": False,
    }
    if settings.method != "mtp":
        config |= _block_keys(settings, name)
    if settings.num_target_layers is not None:
        config["num_target_layers"] = settings.num_target_layers
    if settings.method == "dspark":
        config |= {
            "markov_rank": settings.markov_rank,
            "markov_head_type": settings.markov_head_type,
            "enable_confidence_head": settings.confidence_head,
            "confidence_head_with_markov": settings.confidence_head_with_markov,
        }
    own: dict[str, Any] = {}
    if settings.made_for is not None:
        own["target"] = settings.made_for.to_json()
    if settings.confidence_scaling:
        temperatures, offsets = zip(*settings.confidence_scaling, strict=True)
        own["confidence_calibration"] = {"temperatures": list(temperatures), "offsets": list(offsets)}
    return config | ({OWN_KEY: own} if own else {})


def _block_keys(settings: DrafterSettings, name: str) -> dict[str, Any]:
    """Keys that say what a block is and who sees whom in it."""
    pairs = list(zip(settings.layer_windows, settings.layer_causal, strict=True))
    windows = {window for window, _ in pairs if window is not None}
    causal = {is_causal for window, is_causal in pairs if window is not None}
    full_causal = any(is_causal and window is None for window, is_causal in pairs)
    if len(windows) > 1 or len(causal) > 1 or full_causal:
        raise CheckpointError(
            f"drafter {name}: the speculators format has one window and one causality for all sliding layers, and "
            "full layers that see their whole block"
        )
    return {
        "block_size": settings.block_size,
        "mask_token_id": settings.mask_token_id,
        "sample_from_anchor": settings.sample_from_anchor,
        "sliding_window_non_causal": True not in causal,
    }
