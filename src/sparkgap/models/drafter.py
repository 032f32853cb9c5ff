"""The block drafter: context update, draft pass and proposal (DSpark, arXiv 2607.05147; DFlash, arXiv 2602.06036).

It keeps keys and values of committed positions only. What it knows of a position is the target's captured hidden
states there, never the token: a position's context can be written once the target has computed it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.catalog.drafters import DrafterCheckpoint
from sparkgap.models.decoder import Decoder, DecoderLayer
from sparkgap.models.drafter_base import DescribedDrafter
from sparkgap.models.drafter_config import DrafterConfig
from sparkgap.models.drafter_loading import DrafterWeights, load_drafter_weights
from sparkgap.models.heads import DraftOutput, Pick, Proposal, propose
from sparkgap.ops.kernels import Kernels
from sparkgap.ops.operands import KVCache, RotaryTable


@dataclass(frozen=True)
class _Block:
    """Where the rows of one draft pass stand and what they see."""

    positions: Tensor
    sequences: int
    rows: int
    context_lengths: Tensor
    block_tables: Tensor
    max_length: int


class Drafter(DescribedDrafter):
    """A draft model bound to a target. Written in `Kernels` and views only, except for a caller's own `pick`.

    Attributes:
        config: what the networks look like.
        kernels: what computes them.
        weights: their weights.
        dtype, device: of weights, hidden states and context KV.
        target_ids: int64 `[draft_vocab]`, target id of each draft id; None when they are the same.
        max_context_length: longest context that a block can follow.
    """

    reads_ahead = False

    def __init__(self, config: DrafterConfig, kernels: Kernels, weights: DrafterWeights, rotary: RotaryTable) -> None:
        self.config = config
        self.kernels = kernels
        self.weights = weights
        self.dtype: torch.dtype = weights.embedding.dtype
        self.device: torch.device = weights.embedding.device
        self.target_ids: Tensor | None = weights.heads.target_ids
        self.max_context_length = rotary.cos.shape[0] - config.longest_draft
        self._rotary = rotary
        self._scale = config.backbone.head_dim**-0.5

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: DrafterCheckpoint,
        target: Decoder,
        kernels: Kernels,
        dtype: torch.dtype,
        max_model_len: int | None = None,
    ) -> "Drafter":
        """Load a draft model for `target`, taking embedding and LM head from it where the checkpoint has none.

        Args:
            checkpoint: the draft model.
            target: what it drafts for; its device is the drafter's.
            kernels: what computes the drafter.
            dtype: of weights and activations.
            max_model_len: longest sequence; None takes what the drafter declares.

        Raises:
            CheckpointError: damaged, or not made for this target.
            UnsupportedModelError: a kind of drafter that this engine does not run.
        """
        config = DrafterConfig.from_settings(checkpoint.settings, checkpoint.name)
        config.check_fits(target.config)
        weights, rotary = load_drafter_weights(config, checkpoint, target, kernels, dtype, max_model_len)
        return cls(config, kernels, weights, rotary)

    @property
    def num_parameters(self) -> int:
        """Weights of the drafter's own; embedding and LM head count only where they are not the target's."""
        return self.weights.num_parameters

    def context_update(
        self,
        captured: Tensor,
        positions: Tensor,
        slots: Tensor,
        caches: Sequence[KVCache],
        following: Tensor | None = None,
    ) -> None:
        """Write the context keys and values of positions that the target has computed.

        Args:
            captured: `[rows, m * target_hidden_size]`, as `ForwardResult.captured`.
            positions: int64 `[rows]`.
            slots: int64 `[rows]`, KV slot of each row in every layer's cache; -1 writes nothing.
            caches: one for each draft layer.
            following: not read: what a block drafter knows of a position is the hidden states alone.
        """
        del following
        kernels, backbone, weights = self.kernels, self.config.backbone, self.weights
        pairs, _ = kernels.norm_linear(
            kernels.written_linear(captured, weights.context_fc, slots),
            None,
            weights.context_norm,
            backbone.rms_norm_eps,
            weights.context_kv,
        )
        heads = 2 * backbone.num_kv_heads
        pairs = pairs.view(-1, backbone.num_layers * heads, backbone.head_dim)
        for index, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
            kernels.rotary_kv_write(
                pairs[:, index * heads : (index + 1) * heads],
                positions,
                self._rotary,
                cache,
                slots,
                key_norm=layer.key_norm,
                eps=backbone.rms_norm_eps,
            )

    def draft(
        self,
        anchors: Tensor,
        context_lengths: Tensor,
        block_tables: Tensor,
        caches: Sequence[KVCache],
        num_speculative_tokens: int,
        max_length: int = 0,
    ) -> DraftOutput:
        """One pass over each sequence's block.

        Args:
            anchors: int64 `[sequences]`, the last token of each, whose position is its context length.
            context_lengths: int64 `[sequences]`, positions whose context is written.
            block_tables: int32 `[sequences, max_blocks]`.
            caches: one for each draft layer; only read.
            num_speculative_tokens: tokens to draft.
            max_length: upper bound of `context_lengths` (host number); 0 when unknown.

        Raises:
            ConfigError: more tokens than the drafter was trained for.
        """
        kernels, config, weights = self.kernels, self.config, self.weights
        eps = config.backbone.rms_norm_eps
        sequences, rows = anchors.shape[0], config.block_rows(num_speculative_tokens)
        token_ids, positions = kernels.draft_inputs(anchors, context_lengths, rows, config.settings.mask_token_id)
        block = _Block(positions, sequences, rows, context_lengths, block_tables, max_length)
        added, residual = kernels.embed(token_ids, weights.embedding), None
        for index, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
            qkv, stream = kernels.norm_linear(added, residual, layer.input_norm, eps, layer.qkv)
            attended = self._attention(layer, qkv, cache, block, config.settings.layer_causal[index])
            gate_up, residual = kernels.norm_linear(attended, stream, layer.post_attention_norm, eps, layer.gate_up)
            added = kernels.silu_mul_linear(gate_up, layer.down)
        assert residual is not None
        hidden, _ = kernels.add_rms_norm(added, residual, weights.final_norm, eps)
        logits = kernels.to_float32(kernels.linear(hidden, weights.lm_head))
        return DraftOutput(
            logits.view(sequences, rows, config.settings.draft_vocab_size),
            hidden.view(sequences, rows, config.backbone.hidden_size),
            config.lead_rows,
        )

    def propose(self, anchors: Tensor, draft: DraftOutput, pick: Pick | None = None) -> Proposal:
        """Draft tokens of each sequence; see `heads.propose`."""
        return propose(self.kernels, self.weights.heads, anchors, draft, pick)

    def _keyed(self, heads: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """Query or key heads `[rows, heads, head_dim]`, normed and rotated at their positions."""
        assert norm is not None
        return self.kernels.norm_rotary(heads, norm, self.config.backbone.rms_norm_eps, positions, self._rotary)

    def _attention(self, layer: DecoderLayer, qkv: Tensor, cache: KVCache, block: _Block, causal: bool) -> Tensor:
        kernels, backbone = self.kernels, self.config.backbone
        heads, kv_heads, head_dim = backbone.num_heads, backbone.num_kv_heads, backbone.head_dim
        qkv = qkv.view(-1, heads + 2 * kv_heads, head_dim)
        queries = self._keyed(qkv[:, :heads], layer.query_norm, block.positions)
        keys = self._keyed(qkv[:, heads : heads + kv_heads], layer.key_norm, block.positions)
        split = (block.sequences, block.rows)
        attended = kernels.block_attention(
            queries.view(*split, heads, head_dim),
            keys.view(*split, kv_heads, head_dim),
            qkv[:, heads + kv_heads :].view(*split, kv_heads, head_dim),
            cache,
            block.context_lengths,
            block.block_tables,
            self._scale,
            layer.sliding_window,
            block.max_length,
            causal,
        )
        return kernels.linear(attended.view(-1, heads * head_dim), layer.output)
