"""Weights of a drafter from its checkpoint and its target."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.catalog.drafters import DrafterCheckpoint, target_ids
from sparkgap.catalog.weights import read_weight
from sparkgap.errors import CheckpointError, UnsupportedModelError
from sparkgap.models.decoder import Decoder, DecoderLayer
from sparkgap.models.drafter_config import DrafterConfig
from sparkgap.models.heads import load_heads
from sparkgap.models.rope import rotary_table
from sparkgap.ops.draft import DraftHeads
from sparkgap.ops.kernels import Kernels
from sparkgap.ops.operands import LinearWeight, RotaryTable

_EMBEDDING = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_COUNTED = (
    "layers.", "markov_head.", "confidence_head.", "fc.", "hidden_norm.", "norm.", "enorm.", "hnorm.", "eh_proj.",
    _EMBEDDING, _LM_HEAD,
)  # fmt: skip
"""What names of used tensors begin with; others map vocabularies, or serve training."""


@dataclass(frozen=True)
class DrafterWeights:
    """What a drafter computes with.

    Attributes:
        embedding: `[vocab, hidden]`, the target's own tensor where the checkpoint has none.
        layers: the draft layers.
        final_norm: `[hidden]`.
        lm_head: `[draft_vocab, hidden]`, the target's own where the checkpoint has none and drafts all tokens.
        context_fc: `[hidden, m * target_hidden]`, of the captured hidden states.
        context_norm: `[hidden]`.
        context_kv: `[layers * 2 * kv_heads * head_dim, hidden]`, key and value projections of all layers, so that
            a context update is one product: layer 0's keys, its values, layer 1's keys, ...
        heads: the sequential heads.
        num_parameters: weights in the checkpoint's tensors that are used.
    """

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    lm_head: LinearWeight
    context_fc: LinearWeight
    context_norm: Tensor
    context_kv: LinearWeight
    heads: DraftHeads
    num_parameters: int


def load_drafter_weights(
    config: DrafterConfig,
    checkpoint: DrafterCheckpoint,
    target: Decoder,
    kernels: Kernels,
    dtype: torch.dtype,
    max_model_len: int | None,
) -> tuple[DrafterWeights, RotaryTable]:
    """Weights on the target's device, and angles of each position a block row can have.

    Raises:
        CheckpointError, UnsupportedModelError: as `Drafter.from_checkpoint`.
    """
    weights = _block_weights(DraftLoader(config, checkpoint, target, kernels, dtype))
    return weights, draft_rotary(config, target.device, max_model_len)


def draft_rotary(config: DrafterConfig, device: torch.device, max_model_len: int | None) -> RotaryTable:
    """Angles of each position that a draft after the longest context can have."""
    backbone = config.backbone
    longest = min(max_model_len or backbone.max_position_embeddings, backbone.max_position_embeddings)
    return rotary_table(backbone.rope, backbone.head_dim, longest + config.longest_draft, device)


def _block_weights(loader: "DraftLoader") -> DrafterWeights:
    layers = range(loader.config.backbone.num_layers)
    projections = [f"layers.{layer}.self_attn.{name}_proj" for layer in layers for name in "kv"]
    return DrafterWeights(
        embedding=loader.embedding(),
        layers=tuple(loader.layer(layer) for layer in layers),
        final_norm=loader.stacked("norm.weight"),
        lm_head=loader.lm_head(),
        context_fc=loader.kernels.prepare_equalized(loader.stacked("fc.weight")),
        context_norm=loader.stacked("hidden_norm.weight"),
        context_kv=loader.linear(*projections, bias=loader.config.backbone.attention_bias),
        heads=load_heads(
            loader.config.settings, loader.source, loader.kernels, loader.dtype, loader.target.device, loader.ids
        ),
        num_parameters=loader.num_parameters(),
    )


class DraftLoader:
    """Reads the tensors of one drafter, of either kind.

    Attributes:
        config: what its networks look like.
        source: its tensors.
        target: what it drafts for, which lends what the checkpoint lacks.
        kernels: what computes it.
        dtype: of its weights.
        ids: int64 `[draft_vocab]`, target id of each draft id; None when they are the same.
    """

    def __init__(
        self,
        config: DrafterConfig,
        checkpoint: DrafterCheckpoint,
        target: Decoder,
        kernels: Kernels,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.source = checkpoint.weights
        self.names = frozenset(checkpoint.weights.names())
        self.target = target
        self.kernels = kernels
        self.dtype = dtype
        self.ids = target_ids(checkpoint)

    def num_parameters(self) -> int:
        """Weights in the tensors that are used."""
        counted = [name for name in self.names if name.startswith(_COUNTED)]
        return sum(torch.Size(self.source.shape(name)).numel() for name in counted)

    def layer(self, index: int) -> DecoderLayer:
        """One draft layer."""
        backbone, prefix = self.config.backbone, f"layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return DecoderLayer(
            input_norm=self.stacked(f"{prefix}.input_layernorm.weight"),
            qkv=self.linear(*(f"{attention}.{name}_proj" for name in "qkv"), bias=backbone.attention_bias),
            query_norm=self.stacked(f"{attention}.q_norm.weight"),
            key_norm=self.stacked(f"{attention}.k_norm.weight"),
            output=self.linear(f"{attention}.o_proj", bias=backbone.attention_output_bias),
            post_attention_norm=self.stacked(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=False),
            down=self.linear(f"{mlp}.down_proj", bias=False),
            sliding_window=self.config.settings.layer_windows[index],
        )

    def embedding(self) -> Tensor:
        """The checkpoint's, else the target's."""
        if _EMBEDDING in self.names:
            return self.stacked(_EMBEDDING)
        self._check_target_width("embedding")
        return self.target.embedding.to(self.dtype)

    def lm_head(self) -> LinearWeight:
        """The checkpoint's, else the target's rows of the draft vocabulary."""
        if _LM_HEAD in self.names:
            return self.linear("lm_head", bias=False)
        self._check_target_width("LM head")
        target = self.target
        if self.ids is None:
            if self.dtype != target.dtype or self.kernels is not target.kernels:
                return self.kernels.prepare_linear(self._target_head_weight().to(self.dtype))
            return target.lm_head
        rows = self._target_head_weight().index_select(0, self.ids.to(target.device))
        return self.kernels.prepare_linear(rows.to(self.dtype))

    def _target_head_weight(self) -> Tensor:
        target = self.target
        if target.config.tie_word_embeddings:
            return target.embedding
        weight = target.lm_head.weight
        shape = (target.config.vocab_size, target.config.hidden_size)
        if weight.is_meta or not weight.is_floating_point() or tuple(weight.shape) != shape:
            raise UnsupportedModelError(
                f"drafter {self.config.name}: it has no lm_head.weight of its own, and rows cannot be taken from "
                "a packed or quantized LM head; use a draft checkpoint with lm_head.weight"
            )
        return weight

    def _check_target_width(self, part: str) -> None:
        hidden, target_hidden = self.config.backbone.hidden_size, self.target.config.hidden_size
        if hidden != target_hidden:
            raise CheckpointError(
                f"drafter {self.config.name}: it has no {part} of its own, and the target's has {target_hidden} "
                f"features where the drafter has {hidden}"
            )

    def linear(self, *modules: str, bias: bool) -> LinearWeight:
        """One product of `modules`, one above the other."""
        weight = self.stacked(*(f"{module}.weight" for module in modules))
        biases = self.stacked(*(f"{module}.bias" for module in modules)) if bias else None
        return self.kernels.prepare_linear(weight, biases)

    def stacked(self, *names: str) -> Tensor:
        """The named tensors along their first dimension, in memory of the drafter's own."""
        shapes: Sequence[tuple[int, ...]] = [self.source.shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        result = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self.target.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            result[start : start + shape[0]].copy_(read_weight(self.source, name))
            start += shape[0]
        return result
