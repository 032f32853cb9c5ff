"""The MTP drafter: one decoder layer, applied again to what it gave (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Entry `i` of its context is made of the target's hidden state at position `i` and of the token *after* it:

    x_i = eh_proj [enorm(embed(t_{i+1})); hnorm(h_i)]
    y_i = layer(x_i), causal over entries, at position i
    head(norm(y_i)) predicts t_{i+2}

Drafting goes on with `y_i` in place of the next hidden state and the drafted token in place of the next one. There is
one layer, so an entry's key and value depend on `x_i` alone: a context update is a few products and no attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparkgap.catalog.drafters import DrafterCheckpoint
from sparkgap.models.decoder import Decoder, DecoderLayer
from sparkgap.models.drafter_base import DescribedDrafter
from sparkgap.models.drafter_config import DrafterConfig
from sparkgap.models.drafter_loading import DraftLoader, draft_rotary
from sparkgap.models.heads import Pick, Proposal
from sparkgap.ops.kernels import Kernels
from sparkgap.ops.operands import AttentionRows, KVCache, LinearWeight, RotaryTable


@dataclass(frozen=True)
class MTPWeights:
    """What an MTP drafter computes with.

    Attributes:
        embedding: `[vocab, hidden]`, the target's own tensor where the checkpoint has none.
        embedding_norm, hidden_norm: `[hidden]`, of the token's embedding and of the hidden state.
        projection: `[hidden, 2 * hidden]`, of both side by side, the embedding first.
        layer: the layer.
        context_kv: `[2 * kv_heads * head_dim, hidden]`, its key and value projections.
        final_norm: `[hidden]`.
        lm_head: `[draft_vocab, hidden]`, the target's own where the checkpoint has none and drafts all tokens.
        target_ids: int64 `[draft_vocab]`, target id of each draft id; None when they are the same.
        num_parameters: weights in the checkpoint's tensors that are used.
    """

    embedding: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: LinearWeight
    layer: DecoderLayer
    context_kv: LinearWeight
    final_norm: Tensor
    lm_head: LinearWeight
    target_ids: Tensor | None
    num_parameters: int


@dataclass(frozen=True)
class _Sequences:
    """Where the sequences of a draft have their KV.

    Attributes:
        row_starts: int32 `[sequences + 1]`, one row each.
        block_tables: int32 `[sequences, max_blocks]`.
        caches: of the drafter.
        max_length: most positions that a row sees (host number).
    """

    row_starts: Tensor
    block_tables: Tensor
    caches: Sequence[KVCache]
    max_length: int


class MTPDraft(NamedTuple):
    """What is known of a draft before its first token is.

    Attributes:
        stream: `[sequences, hidden]`, `x` of the last entry of each context.
        positions, slots: int64 `[steps, sequences]`, of each pass.
        sequences: where they have their KV.
    """

    stream: Tensor
    positions: Tensor
    slots: Tensor
    sequences: _Sequences

    def first(self, count: int) -> "MTPDraft":
        """The first `count` sequences' part."""
        layout = self.sequences
        part = _Sequences(layout.row_starts[: count + 1], layout.block_tables[:count], layout.caches, layout.max_length)
        return MTPDraft(self.stream[:count], self.positions[:, :count], self.slots[:, :count], part)


class MTPDrafter(DescribedDrafter):
    """An MTP draft model bound to a target. Written in `Kernels` and views only, except for a caller's own `pick`.

    Its caches are the layer's KV, and the stream `x` of each entry, held in two halves as if they were a head's key and
    value: the last one is where a draft begins. So what a draft needs of a sequence lies in the sequence's blocks.

    Attributes:
        config: what the networks look like.
        kernels: what computes them.
        weights: their weights.
        dtype, device: of weights, hidden states and context KV.
        target_ids: int64 `[draft_vocab]`, target id of each draft id; None when they are the same.
        max_context_length: longest context that can be drafted after.
    """

    reads_ahead = True

    def __init__(
        self,
        config: DrafterConfig,
        kernels: Kernels,
        weights: MTPWeights,
        rotary: RotaryTable,
        max_length: int | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.weights = weights
        self.dtype: torch.dtype = weights.embedding.dtype
        self.device: torch.device = weights.embedding.device
        self.target_ids: Tensor | None = weights.target_ids
        positions = rotary.cos.shape[0]
        self.max_context_length = positions - config.max_speculative_tokens
        self._max_length = min(max_length or positions, positions)
        self._rotary = rotary
        self._scale = config.backbone.head_dim**-0.5
        self._row_starts = torch.arange(_ROW_STARTS, dtype=torch.int32, device=self.device)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: DrafterCheckpoint,
        target: Decoder,
        kernels: Kernels,
        dtype: torch.dtype,
        max_model_len: int | None = None,
    ) -> "MTPDrafter":
        """Load a draft model for `target`; see `Drafter.from_checkpoint`."""
        config = DrafterConfig.from_settings(checkpoint.settings, checkpoint.name)
        config.check_fits(target.config)
        weights = _load(DraftLoader(config, checkpoint, target, kernels, dtype))
        return cls(config, kernels, weights, draft_rotary(config, target.device, max_model_len), max_model_len)

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
        """Write the entries of positions that the target has computed.

        Args:
            captured: `[rows, hidden_size]`, as `ForwardResult.captured`.
            positions: int64 `[rows]`.
            slots: int64 `[rows]`, KV slot of each row in every cache; -1 writes nothing.
            caches: as `cache_shapes`.
            following: int64 `[rows]`, the token after each row's.
        """
        if following is None:
            raise ValueError("an MTP drafter's context is made of the tokens after its positions, too")
        kernels, backbone, layer = self.kernels, self.config.backbone, self.weights.layer
        stream = self._stream(following, captured)
        pairs, _ = kernels.norm_linear(stream, None, layer.input_norm, backbone.rms_norm_eps, self.weights.context_kv)
        context, streams = caches
        kernels.rotary_kv_write(
            pairs.view(-1, 2 * backbone.num_kv_heads, backbone.head_dim),
            positions,
            self._rotary,
            context,
            slots,
            key_norm=layer.key_norm,
            eps=backbone.rms_norm_eps,
        )
        halves = stream.view(-1, 2, backbone.hidden_size // 2)
        kernels.kv_write(halves[:, :1], halves[:, 1:], streams, slots)

    def draft(
        self,
        anchors: Tensor,
        context_lengths: Tensor,
        block_tables: Tensor,
        caches: Sequence[KVCache],
        num_speculative_tokens: int,
        max_length: int = 0,
    ) -> MTPDraft:
        """What a draft begins from; `propose` makes its passes, each of which needs the token before.

        Args:
            anchors: int64 `[sequences]`, the last token of each, whose position is its context length. Contexts have
                it already, as the token after their last position.
            context_lengths: int64 `[sequences]`, positions whose context is written; 0 for a sequence that only pads.
            block_tables: int32 `[sequences, max_blocks]`, with blocks for `num_speculative_tokens` - 1 positions more.
            caches: as `cache_shapes`; entries from the context length on are written.
            num_speculative_tokens: tokens to draft.
            max_length: upper bound of `context_lengths` (host number); 0 when unknown.

        Raises:
            ConfigError: more tokens than one round may draft.
        """
        kernels, (context, streams) = self.kernels, caches
        steps, capacity = self.config.block_rows(num_speculative_tokens), block_tables.shape[1] * context.block_size
        rows = kernels.step_rows(context_lengths, block_tables, steps, context.block_size, self._max_length)
        half = self.config.backbone.hidden_size // 2
        stream = kernels.concat(
            [kernels.embed(rows.sources, part.view(-1, half)) for part in (streams.keys, streams.values)]
        )
        longest = min(max_length + steps - 1, capacity) if max_length else capacity
        layout = _Sequences(self._starts(anchors.shape[0]), block_tables, caches, longest)
        return MTPDraft(stream, rows.positions, rows.slots, layout)

    def propose(self, anchors: Tensor, draft: MTPDraft, pick: Pick | None = None) -> Proposal:
        """Draft tokens of each sequence, each by one more pass of the layer.

        Args:
            anchors: int64 `[sequences]`, the token before the first draft token.
            draft: where the draft begins.
            pick: chooses each token; None takes the largest logit.
        """
        kernels, ids = self.kernels, self.target_ids
        steps, sequences = draft.positions.shape
        token_ids = kernels.empty((steps, sequences), torch.int64, self.device)
        scores = kernels.empty((steps, sequences), torch.float32, self.device)
        stream, picked_from = draft.stream, list[Tensor]()
        for step in range(steps):
            logits, given = self._pass(stream, draft, step)
            if pick is None:
                kernels.draft_pick(logits, ids, token_ids[step], scores[step])
            else:
                draft_ids = pick(step, logits)
                token_ids[step] = draft_ids if ids is None else ids[draft_ids]
                scores[step] = logits.amax(dim=-1)
                picked_from.append(logits)
            if step + 1 < steps:
                stream = self._stream(token_ids[step], given)
        return Proposal(token_ids.t(), scores.t(), None, torch.stack(picked_from, dim=1) if pick else None)

    def _stream(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """`x` `[rows, hidden]` of tokens and the hidden states before them."""
        kernels, weights, eps = self.kernels, self.weights, self.config.backbone.rms_norm_eps
        embedded = kernels.rms_norm(kernels.embed(token_ids, weights.embedding), weights.embedding_norm, eps)
        return kernels.linear(
            kernels.concat((embedded, kernels.rms_norm(hidden, weights.hidden_norm, eps))), weights.projection
        )

    def _pass(self, stream: Tensor, draft: MTPDraft, step: int) -> tuple[Tensor, Tensor]:
        """Logits float32 `[sequences, draft_vocab]` of one row of each sequence, and its stream after the layer."""
        kernels, backbone, weights, layer = self.kernels, self.config.backbone, self.weights, self.weights.layer
        eps, layout, positions = backbone.rms_norm_eps, draft.sequences, draft.positions[step]
        context = layout.caches[0]
        qkv, _ = kernels.norm_linear(stream, None, layer.input_norm, eps, layer.qkv)
        queries = kernels.rotary_kv_write(
            qkv.view(-1, backbone.num_heads + 2 * backbone.num_kv_heads, backbone.head_dim),
            positions,
            self._rotary,
            context,
            draft.slots[step],
            layer.query_norm,
            layer.key_norm,
            eps,
        )
        rows = AttentionRows(positions, layout.row_starts, layout.block_tables, 1, layout.max_length)
        attended = kernels.paged_attention(queries, context, rows, self._scale, layer.sliding_window)
        attended = kernels.linear(attended.view(-1, backbone.num_heads * backbone.head_dim), layer.output)
        gate_up, residual = kernels.norm_linear(attended, stream, layer.post_attention_norm, eps, layer.gate_up)
        added = kernels.silu_mul_linear(gate_up, layer.down)
        hidden, given = kernels.add_rms_norm(added, residual, weights.final_norm, eps)
        return kernels.to_float32(kernels.linear(hidden, weights.lm_head)), given

    def _starts(self, sequences: int) -> Tensor:
        """First row of each sequence, one row each. Graphs borrow the memory: it is the drafter's own for so many."""
        if sequences < len(self._row_starts):
            return self._row_starts[: sequences + 1]
        return torch.arange(sequences + 1, dtype=torch.int32, device=self.device)


_ROW_STARTS = 1024
"""Far more than any graph has sequences."""


def _load(loader: DraftLoader) -> MTPWeights:
    return MTPWeights(
        embedding=loader.embedding(),
        embedding_norm=loader.stacked("enorm.weight"),
        hidden_norm=loader.stacked("hnorm.weight"),
        projection=loader.kernels.prepare_equalized(loader.stacked("eh_proj.weight")),
        layer=loader.layer(0),
        context_kv=loader.linear(
            "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj", bias=loader.config.backbone.attention_bias
        ),
        final_norm=loader.stacked("norm.weight"),
        lm_head=loader.lm_head(),
        target_ids=None if loader.ids is None else loader.ids.to(loader.target.device),
        num_parameters=loader.num_parameters(),
    )
