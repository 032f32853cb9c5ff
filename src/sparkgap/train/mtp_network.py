"""The multi-token prediction module as a trainable network (DeepSeek-V3, arXiv 2412.19437, section 2.2).

One module is applied once for each drafted token. Its first application at an anchor reads the target's hidden state
of the position before and the anchor's token; each further one reads its own output there and the next token. What the
rows see is what they see when serving: keys and values of positions before the anchor's come from the target's hidden
states, those of the draft's own rows from the applications before.

Keys and values of a conversation are computed once for all its anchors, the rest at the anchors alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparkgap.train.network import Attention, FeedForward, Linear, NetworkShape, RMSNorm, TrainableNetwork


@dataclass(frozen=True)
class MtpBatch:
    """Anchors of a few sequences and what stands before them.

    Attributes:
        taps: `[positions, target_hidden]`, captured hidden states of positions 0 ... last anchor - 1 of each
            sequence, sequences one after the other.
        following: int64 `[positions]`, the token after each of them.
        lengths: positions of each sequence in `taps`.
        anchors: for each sequence int64 `[anchors]`, positions of at least 1.
        tokens: int64 `[all anchors, N]`, the anchor's token and those after it, which the N rows read.
    """

    taps: Tensor
    following: Tensor
    lengths: Sequence[int]
    anchors: Sequence[Tensor]
    tokens: Tensor


class ScaledRMSNorm(RMSNorm):
    """RMSNorm that brings each dimension to its usual size with a fixed factor beside the learned weight.

    Args:
        scale: float32 `[size]`.
        eps: of the norm.
    """

    scale: Tensor

    def __init__(self, scale: Tensor, eps: float) -> None:
        super().__init__(scale.shape[0], eps)
        self.register_buffer("scale", scale, persistent=False)

    def folded(self) -> Tensor:
        """The weight of a plain RMSNorm that computes the same."""
        return self.weight * self.scale

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalize the last dimension of `x`."""
        return functional.rms_norm(x.float(), self.weight.shape, self.folded(), self.eps).to(dtype)


@dataclass(frozen=True)
class _Context:
    """Keys and values of a batch's positions, and who sees them.

    Attributes:
        keys, values: for each sequence `[kv_heads, positions, head_dim]`.
        biases: for each sequence `[1, anchors, 1, positions]`, minus infinity where an anchor's rows see nothing.
    """

    keys: list[Tensor]
    values: list[Tensor]
    biases: list[Tensor]


class DraftRowAttention(Attention):
    """Attention of one draft row an anchor: over its sequence's context and the rows of its draft before it."""

    def rows(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], context: _Context, own: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attention output `[anchors, hidden]`.

        Args:
            x: `[anchors, hidden]`, normed.
            rotation: `(cos, sin)` of the rows' positions.
            context: keys and values of the context.
            own: keys and values `[anchors, kv_heads, head_dim]` of the draft's rows after its first, this one's last.
        """
        shape = self.shape
        kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
        groups = shape.num_heads // kv_heads
        queries = self.queries(x, *rotation).view(x.shape[0], kv_heads, groups, head_dim)
        outputs, first = [], 0
        own_scores = [(queries * keys[:, :, None]).sum(-1) for keys, _ in own]
        for keys, values, bias in zip(context.keys, context.values, context.biases, strict=True):
            count, length = bias.shape[1], keys.shape[1]
            part = slice(first, first + count)
            first += count
            rows = queries[part].transpose(0, 1).reshape(kv_heads, count * groups, head_dim)
            scores = torch.bmm(rows, keys.transpose(1, 2)).view(kv_heads, count, groups, length) + bias
            if own:
                mine = torch.stack([each[part].transpose(0, 1) for each in own_scores], dim=-1)
                scores = torch.cat([scores, mine], dim=-1)
            weights = scores.softmax(-1)
            seen = torch.bmm(weights[..., :length].reshape(kv_heads, count * groups, length), values)
            mixed = seen.view(kv_heads, count, groups, head_dim)
            for index, (_, own_values) in enumerate(own):
                share = weights[..., length + index, None]
                mixed = mixed + share * own_values[part].transpose(0, 1)[:, :, None]
            outputs.append(mixed.transpose(0, 1).reshape(count, -1))
        projected: Tensor = self.o_proj(torch.cat(outputs))
        return projected


class MtpLayer(nn.Module):
    """The module's decoder layer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DraftRowAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def keys_and_values(self, normed: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, kv_heads, head_dim]` of rows `normed` `[rows, hidden]`."""
        attention = self.self_attn
        return attention.keys(normed, *rotation), attention.v_proj(normed).unflatten(-1, (-1, attention.shape.head_dim))

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        rotation: tuple[Tensor, Tensor],
        context: _Context,
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Residual stream `[anchors, hidden]` after this layer.

        Args:
            x: `[anchors, hidden]`, residual stream, float32.
            normed: `input_layernorm(x)` in the compute type.
            rotation, context, own: as `DraftRowAttention.rows`.
        """
        x = x + self.self_attn.rows(normed, rotation, context, own)
        fed: Tensor = self.mlp(self.post_attention_layernorm(x, normed.dtype))
        return x + fed


class MtpNetwork(TrainableNetwork):
    """Trainable multi-token prediction module over a frozen embedding and LM head.

    Args:
        shape: sizes; one layer, one captured layer, no Markov head.
        embedding: `[vocab, hidden]`, the target's.
        head: `[draft_vocab, hidden]`, the target's LM head rows of the draft vocabulary.
        draft_ids: int64 `[draft_vocab]`, target id of each draft id.
        scale: float32 `[target_hidden]`, what brings each dimension of a normed hidden state to a size of 1.
        dtype: compute type; parameters are float32.
    """

    embedding: Tensor
    draft_ids: Tensor

    def __init__(
        self, shape: NetworkShape, embedding: Tensor, head: Tensor, draft_ids: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, dtype)
        hidden = shape.hidden_size
        self.enorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.hnorm = ScaledRMSNorm(scale, shape.rms_norm_eps)
        self.eh_proj = Linear(2 * hidden, hidden, std=(2 * hidden) ** -0.5)
        self.layers = nn.ModuleList([MtpLayer(shape)])
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.register_buffer("embedding", embedding.to(dtype), persistent=False)
        self.register_buffer("head", head.to(dtype), persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @property
    def _layer(self) -> MtpLayer:
        layer = self.layers[0]
        assert isinstance(layer, MtpLayer)
        return layer

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The layer's residual stream `[rows, hidden]` of tokens and hidden states, float32."""
        embedded = self.enorm(self.embedding[tokens], self.dtype)
        joined: Tensor = self.eh_proj(torch.cat([embedded, self.hnorm(hidden, self.dtype)], dim=-1))
        return joined.float()

    def _context(self, batch: MtpBatch, normed: Tensor) -> _Context:
        layer = self._layer
        device = normed.device
        places = torch.cat([torch.arange(length, device=device) for length in batch.lengths])
        keys, values = (
            [each.transpose(0, 1) for each in torch.split(rows, list(batch.lengths))]
            for rows in layer.keys_and_values(normed, self.angles(places))
        )
        biases = []
        for length, anchors in zip(batch.lengths, batch.anchors, strict=True):
            hidden = torch.arange(length, device=device) >= anchors[:, None]
            bias = torch.zeros(hidden.shape, dtype=normed.dtype, device=device).masked_fill_(hidden, -torch.inf)
            biases.append(bias[None, :, None])
        return _Context(keys, values, biases)

    def forward(self, batch: MtpBatch) -> Tensor:
        """Normed hidden states of each anchor's N rows, which read `batch.tokens`: `[anchors * N, hidden]`."""
        return torch.stack(self._unroll(batch, batch.tokens.shape[1], drafting=False)[0], dim=1).flatten(0, 1)

    def draft(self, batch: MtpBatch, tokens: int) -> Tensor:
        """Target ids of the most probable tokens after each anchor: int64 `[anchors, tokens]`.

        Rows after the first read what was drafted; only the first column of `batch.tokens` is used.
        """
        return torch.stack(self._unroll(batch, tokens, drafting=True)[1], dim=1)

    def _unroll(self, batch: MtpBatch, tokens: int, drafting: bool) -> tuple[list[Tensor], list[Tensor]]:
        layer = self._layer
        inputs = self._inputs(batch.following, batch.taps)
        normed = layer.input_layernorm(inputs, self.dtype)
        context = self._context(batch, normed)
        anchors = torch.cat(list(batch.anchors))
        starts = torch.tensor([0, *batch.lengths[:-1]], device=anchors.device).cumsum(0)
        counts = torch.tensor([len(each) for each in batch.anchors], device=anchors.device)
        first = starts.repeat_interleave(counts) + anchors - 1
        x, normed = inputs[first], normed[first]
        own: list[tuple[Tensor, Tensor]] = []
        states: list[Tensor] = []
        drafted: list[Tensor] = []
        for row in range(tokens):
            rotation = self.angles(anchors - 1 + row)
            if row:
                x = self._inputs(drafted[-1] if drafting else batch.tokens[:, row], x)
                normed = layer.input_layernorm(x, self.dtype)
                own.append(layer.keys_and_values(normed, rotation))
            x = layer(x, normed, rotation, context, own)
            states.append(self.norm(x, self.dtype))
            if drafting:
                drafted.append(self.draft_ids[(states[-1] @ self.head.T).argmax(-1)])
        return states, drafted
