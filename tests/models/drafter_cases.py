"""Tiny random drafters and targets for tests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from dense_drafter import DenseDrafter
from torch import Tensor

from sparkgap.catalog.drafter_settings import DrafterSettings
from sparkgap.catalog.drafters import DrafterCheckpoint, read_drafter, tensor_shapes, vocabulary_tensors
from sparkgap.models.config import ModelConfig
from sparkgap.models.decoder import Decoder
from sparkgap.models.loading import expected_shapes, load_target
from sparkgap.ops import Kernels, TorchKernels

VOCAB = 61
HIDDEN = 32
TARGET_LAYERS = 5

TRANSFORMER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 96,
}

TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": TARGET_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
}

SETTINGS = DrafterSettings(
    method="dspark",
    transformer=TRANSFORMER,
    layer_windows=(None, None),
    layer_causal=(False, False),
    target_hidden_size=HIDDEN,
    target_layer_ids=(0, 2, 3),
    block_size=5,
    mask_token_id=7,
    sample_from_anchor=True,
    draft_vocab_size=VOCAB,
)


MTP_SETTINGS = DrafterSettings(
    method="mtp",
    transformer={**TRANSFORMER, "num_hidden_layers": 1},
    layer_windows=(None,),
    layer_causal=(True,),
    target_hidden_size=HIDDEN,
    target_layer_ids=(3,),
    draft_vocab_size=VOCAB,
)


@dataclass
class DictWeights:
    """A WeightSource over tensors in memory."""

    tensors: Mapping[str, Tensor]

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return 1.0 + 0.2 * torch.randn(shape, generator=generator)
    scale = 1.0 if "embed" in name or "_w1" in name else shape[-1] ** -0.5
    return torch.randn(shape, generator=generator) * scale


def random_target(seed: int = 0, kernels: Kernels | None = None, **changes: Any) -> Decoder:
    generator = torch.Generator().manual_seed(seed)
    config = {**TARGET_CONFIG, **changes}
    shapes = expected_shapes(ModelConfig.from_hf(config))
    tensors = {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}
    return load_target(
        config,
        DictWeights(tensors),
        kernels=kernels or TorchKernels(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def random_tensors(
    settings: DrafterSettings,
    seed: int = 0,
    *,
    own_embedding: bool = False,
    own_head: bool = False,
    biases: bool = True,
) -> dict[str, Tensor]:
    """Random weights, with `d2t` and `t2d` when the vocabulary is reduced."""
    generator = torch.Generator().manual_seed(seed)
    required, optional = tensor_shapes(settings)
    wanted = dict(required)
    for name, shape in optional.items():
        own = {"embed_tokens.weight": own_embedding, "lm_head.weight": own_head, "d2t": False, "t2d": False}
        if own.get(name, biases):
            wanted[name] = shape
    tensors = {name: random_tensor(name, shape, generator) for name, shape in wanted.items()}
    vocab = settings.transformer["vocab_size"]
    if settings.draft_vocab_size < vocab:
        ids = torch.randperm(vocab, generator=generator)[: settings.draft_vocab_size].sort().values
        tensors |= vocabulary_tensors(ids, vocab)
    return tensors


def deepspec_config(settings: DrafterSettings) -> dict[str, Any]:
    """`config.json` as DeepSpec (and z-lab, for DFlash) writes it."""
    config: dict[str, Any] = {
        "model_type": "qwen3",
        **settings.transformer,
        "num_target_layers": TARGET_LAYERS,
        "block_size": settings.block_size,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in settings.layer_windows],
        "sliding_window": next((w for w in settings.layer_windows if w), None),
    }
    if settings.method == "dflash":
        return config | {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {
                "mask_token_id": settings.mask_token_id,
                "target_layer_ids": list(settings.target_layer_ids),
            },
        }
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": settings.mask_token_id,
        "target_layer_ids": list(settings.target_layer_ids),
        "num_anchors": 512,
        "draft_vocab_size": settings.draft_vocab_size,
        "markov_rank": settings.markov_rank,
        "markov_head_type": settings.markov_head_type,
        "enable_confidence_head": settings.confidence_head,
        "confidence_head_with_markov": settings.confidence_head_with_markov,
    }
    if not settings.sample_from_anchor:
        config["sample_from_anchor"] = False
    return config


def checkpoint(settings: DrafterSettings, tensors: Mapping[str, Tensor]) -> DrafterCheckpoint:
    return DrafterCheckpoint("tiny", "speculators", settings, DictWeights(tensors))


def deepspec_checkpoint(settings: DrafterSettings, tensors: Mapping[str, Tensor]) -> DrafterCheckpoint:
    return read_drafter(deepspec_config(settings), DictWeights(tensors), "tiny")


def dense(settings: DrafterSettings, tensors: Mapping[str, Tensor], target: Decoder) -> DenseDrafter:
    """The independent implementation over the same weights."""
    weights = dict(tensors)
    ids = None
    if "d2t" in weights:
        ids = torch.tensor([i + int(offset) for i, offset in enumerate(weights["d2t"])])
    weights.setdefault("embed_tokens.weight", target.embedding)
    head = target.lm_head.weight
    weights.setdefault("lm_head.weight", head if ids is None else head[ids])
    return DenseDrafter(
        config=settings.transformer,
        weights=weights,
        mask_token_id=settings.mask_token_id,
        sample_from_anchor=settings.sample_from_anchor,
        windows=settings.layer_windows,
        causal=settings.layer_causal,
        head_type=settings.markov_head_type if settings.markov_rank else "none",
        confidence=settings.confidence_head,
        confidence_with_markov=settings.confidence_head_with_markov,
        target_ids=ids,
    )


def with_heads(rank: int, head_type: Any, confidence: bool, with_markov: bool, **changes: Any) -> DrafterSettings:
    return replace(
        SETTINGS,
        markov_rank=rank,
        markov_head_type=head_type,
        confidence_head=confidence,
        confidence_head_with_markov=with_markov,
        **changes,
    )
