"""The drafter as a trainable network: the same function as `models.drafter`, in autograd torch.

Anchors are packed by sequence: the context features and each layer's keys and values are computed once a sequence,
and all blocks of the sequence read them through a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparkgap.catalog.drafter_settings import MarkovHeadType

MARKOV_STD = 0.1
"""Usual size of W1's rows before training."""


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a trainable drafter.

    Attributes:
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: of the backbone.
        num_taps: captured target layers (m); `target_hidden_size` is the width of one.
        markov_rank: 0 is DFlash.
        markov_tokens: rows of the trained part of W1 (see `DraftNetwork`).
        lead_rows: rows at a block's start that predict nothing: 0 for DSpark, 1 (the anchor's) for DFlash.
        rms_norm_eps, rope_theta: as in the checkpoint's configuration.
        markov_head_type: `vanilla`, `gated` or `rnn` (see `ops.draft.DraftHeads`).
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_taps: int
    vocab_size: int
    draft_vocab_size: int
    markov_rank: int
    markov_tokens: int
    lead_rows: int
    rms_norm_eps: float
    rope_theta: float
    markov_head_type: MarkovHeadType = "vanilla"


@dataclass(frozen=True)
class AnchorBatch:
    """Anchors of a few sequences and the context they see.

    Attributes:
        taps: `[positions, m * target_hidden]`, captured hidden states, sequences one after the other.
        lengths: positions of each sequence in `taps`.
        anchors: for each sequence int64 `[anchors]`, positions in it; a block sees positions below its anchor.
        anchor_tokens: int64 `[all anchors]`, target ids.
        rows: rows of each block, lead rows included.
    """

    taps: Tensor
    lengths: Sequence[int]
    anchors: Sequence[Tensor]
    anchor_tokens: Tensor
    rows: int


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[rows, heads, head_dim]` rotated by `cos` and `sin` `[rows, head_dim / 2]` (the half layout)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32, in the compute type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalize the last dimension of `x`."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(dtype)


class Linear(nn.Module):
    """`x @ weight.T` with a float32 master weight, computed in `x`'s dtype."""

    def __init__(self, inputs: int, outputs: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` -> `[..., outputs]`."""
        return functional.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Attention of draft blocks over their sequence's context and themselves."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, head_dim = shape.hidden_size, shape.head_dim
        std = hidden**-0.5
        self.q_proj = Linear(hidden, shape.num_heads * head_dim, std=std)
        self.k_proj = Linear(hidden, shape.num_kv_heads * head_dim, std=std)
        self.v_proj = Linear(hidden, shape.num_kv_heads * head_dim, std=std)
        self.o_proj = Linear(shape.num_heads * head_dim, hidden, std=0.0)
        self.q_norm = RMSNorm(head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, shape.rms_norm_eps)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed, rotated keys of rows `x`: `[rows, kv_heads, head_dim]`."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return rotate(self.k_norm(keys, x.dtype), cos, sin)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed, rotated queries of rows `x`, with the scale of scores: `[rows, heads, head_dim]`."""
        queries = self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        rotated: Tensor = rotate(self.q_norm(queries, x.dtype), cos, sin) * float(self.shape.head_dim**-0.5)
        return rotated

    def forward(self, x: Tensor, context: Tensor, rotation: "Rotation", batch: AnchorBatch) -> Tensor:
        """`x` `[blocks * N, hidden]` and `context` `[positions, hidden]` -> `[blocks * N, hidden]`."""
        shape = self.shape
        kv_heads, head_dim, size = shape.num_kv_heads, shape.head_dim, batch.rows
        groups = shape.num_heads // kv_heads
        queries = self.queries(x, *rotation.block)
        block_keys = self.keys(x, *rotation.block).view(-1, size, kv_heads, head_dim)
        block_values = self.v_proj(x).view(-1, size, kv_heads, head_dim)
        context_keys = self.keys(context, *rotation.context)
        context_values = self.v_proj(context).unflatten(-1, (-1, head_dim))
        outputs, block, position = [], 0, 0
        queries = queries.view(-1, size, kv_heads, groups, head_dim)
        for length, anchors, bias in zip(batch.lengths, batch.anchors, rotation.biases, strict=True):
            count = anchors.shape[0]
            blocks, places = slice(block, block + count), slice(position, position + length)
            # [kv, blocks * groups * N, head_dim]
            rows = queries[blocks].permute(2, 0, 3, 1, 4).reshape(kv_heads, -1, head_dim)
            keys = context_keys[places].permute(1, 2, 0)
            scores = torch.bmm(rows, keys).view(kv_heads, count, groups * size, length) + bias
            per_block = rows.reshape(kv_heads * count, groups * size, head_dim)
            own_keys = block_keys[blocks].permute(2, 0, 3, 1).reshape(kv_heads * count, head_dim, size)
            own_scores = torch.bmm(per_block, own_keys).view(kv_heads, count, groups * size, size)
            weights = torch.cat([scores, own_scores], dim=-1).softmax(-1)
            seen = torch.bmm(
                weights[..., :length].reshape(kv_heads, -1, length), context_values[places].transpose(0, 1)
            )
            own_values = block_values[blocks].permute(2, 0, 1, 3).reshape(kv_heads * count, size, head_dim)
            own = torch.bmm(weights[..., length:].reshape(kv_heads * count, groups * size, size), own_values)
            mixed = seen.view(kv_heads, count, groups, size, head_dim) + own.view(
                kv_heads, count, groups, size, head_dim
            )
            outputs.append(mixed.permute(1, 3, 0, 2, 4).reshape(count * size, -1))
            block, position = block + count, position + length
        projected: Tensor = self.o_proj(torch.cat(outputs))
        return projected


class FeedForward(nn.ModuleDict):
    """Gated feed-forward of a draft layer; writes nothing before it is trained."""

    def __init__(self, shape: NetworkShape) -> None:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        super().__init__(
            {
                "gate_proj": Linear(hidden, inner, std=hidden**-0.5),
                "up_proj": Linear(hidden, inner, std=hidden**-0.5),
                "down_proj": Linear(inner, hidden, std=0.0),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, hidden]` -> `[rows, hidden]`."""
        fed: Tensor = self["down_proj"](functional.silu(self["gate_proj"](x)) * self["up_proj"](x))
        return fed


class Layer(nn.Module):
    """One Qwen3-style draft layer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, context: Tensor, rotation: "Rotation", batch: AnchorBatch) -> Tensor:
        """Residual stream `[blocks * N, hidden]` after this layer."""
        dtype = context.dtype
        x = x + self.self_attn(self.input_layernorm(x, dtype), context, rotation, batch)
        fed: Tensor = self.mlp(self.post_attention_layernorm(x, dtype))
        return x + fed


@dataclass(frozen=True)
class Rotation:
    """Angles and masks of a batch, shared by the layers: `(cos, sin)` of context and block rows, mask biases."""

    context: tuple[Tensor, Tensor]
    block: tuple[Tensor, Tensor]
    biases: list[Tensor]


class TrainableNetwork(nn.Module):
    """What all trainable drafters have.

    Args:
        shape: sizes.
        dtype: compute type; parameters are float32.

    Attributes:
        head: `[draft_vocab, hidden]`, the target's LM head rows of the draft vocabulary, frozen.
    """

    head: Tensor

    def __init__(self, shape: NetworkShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self._frequencies = 1.0 / shape.rope_theta**half

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[rows, head_dim / 2]` that rotate rows at `positions`."""
        angles = positions.float()[:, None] * self._frequencies.to(positions.device)
        return angles.cos(), angles.sin()


class DraftNetwork(TrainableNetwork):
    """Trainable block drafter over a frozen embedding and LM head.

    Args:
        shape: sizes.
        embedding: `[vocab, hidden]`, the target's.
        head: `[draft_vocab, hidden]`, the target's LM head rows of the draft vocabulary.
        mask_token_id: token whose embedding stands in rows 1 ... N - 1.
        tap_scale: float32 `[m * target_hidden]`, what each captured dimension is multiplied by before `fc`: their
            sizes differ by three orders of magnitude, and `fc` would first have to unlearn the largest.
        markov_rows: int64 `[vocab]`, the row of W1 that each target token trains; tokens that training never sees
            share row 0, which stays zero, so that they bring no bias.
        dtype: compute type; parameters are float32.
    """

    embedding: Tensor
    markov_rows: Tensor
    tap_scale: Tensor

    def __init__(
        self,
        shape: NetworkShape,
        embedding: Tensor,
        head: Tensor,
        mask_token_id: int,
        tap_scale: Tensor,
        markov_rows: Tensor,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(shape, dtype)
        self.mask_token_id = mask_token_id
        width = shape.num_taps * shape.target_hidden_size
        self.fc = Linear(width, shape.hidden_size, std=width**-0.5)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.num_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        if shape.markov_rank:
            self.markov_w1 = nn.Parameter(torch.randn(shape.markov_tokens, shape.markov_rank) * MARKOV_STD)
            with torch.no_grad():
                self.markov_w1[0] = 0
            self.markov_w2 = nn.Parameter(torch.zeros(shape.draft_vocab_size, shape.markov_rank))
            self.confidence = Linear(shape.hidden_size + shape.markov_rank, 1, std=0.0)
            inputs = shape.hidden_size + shape.markov_rank
            if shape.markov_head_type == "gated":
                self.markov_gate = Linear(inputs, shape.markov_rank, std=inputs**-0.5)
            elif shape.markov_head_type == "rnn":
                inputs += shape.markov_rank
                self.markov_joint = Linear(inputs, 3 * shape.markov_rank, std=inputs**-0.5)
        self.register_buffer("embedding", embedding.to(dtype), persistent=False)
        self.register_buffer("head", head.to(dtype), persistent=False)
        self.register_buffer("tap_scale", tap_scale, persistent=False)
        self.register_buffer("markov_rows", markov_rows, persistent=False)

    def _rotation(self, batch: AnchorBatch) -> Rotation:
        device, size = batch.taps.device, batch.rows
        biases = []
        for length, anchors in zip(batch.lengths, batch.anchors, strict=True):
            hidden = torch.arange(length, device=device) >= anchors[:, None]
            bias = torch.zeros(hidden.shape, dtype=self.dtype, device=device).masked_fill_(hidden, -torch.inf)
            biases.append(bias[:, None])
        context = torch.cat([torch.arange(length, device=device) for length in batch.lengths])
        block = torch.cat(list(batch.anchors))[:, None] + torch.arange(size, device=device)
        return Rotation(self.angles(context), self.angles(block.flatten()), biases)

    def forward(self, batch: AnchorBatch) -> Tensor:
        """Normed hidden states of the rows that predict: `[blocks * (rows - lead_rows), hidden]`, compute type."""
        rotation = self._rotation(batch)
        taps = (batch.taps * self.tap_scale).to(self.dtype)
        context = self.hidden_norm(self.fc(taps), self.dtype)
        tokens = torch.full((batch.anchor_tokens.shape[0], batch.rows), self.mask_token_id, device=batch.taps.device)
        tokens[:, 0] = batch.anchor_tokens
        x = self.embedding[tokens.flatten()].float()
        for layer in self.layers:
            x = layer(x, context, rotation, batch)
        if self.shape.lead_rows:
            x = x.view(-1, batch.rows, x.shape[-1])[:, self.shape.lead_rows :].flatten(0, 1)
        normed: Tensor = self.norm(x, self.dtype)
        return normed

    def folded_fc(self) -> Tensor:
        """`fc` of unscaled captured states: float32 `[hidden, m * target_hidden]`."""
        return self.fc.weight.float() * self.tap_scale

    def markov_states(self, previous_tokens: Tensor) -> Tensor:
        """`W1[previous]`: `[rows, rank]` in the compute type; `[rows, 0]` for DFlash."""
        if not self.shape.markov_rank:
            return torch.zeros(previous_tokens.shape[0], 0, dtype=self.dtype, device=previous_tokens.device)
        rows = self.markov_rows[previous_tokens]
        return functional.embedding(rows, self.markov_w1, padding_idx=0).to(self.dtype)

    def markov_output(self) -> Tensor:
        """W2 in the compute type: `[draft_vocab, rank]`; `[draft_vocab, 0]` for DFlash."""
        if not self.shape.markov_rank:
            return self.head[:, :0]
        return self.markov_w2.to(self.dtype)

    def markov_step(self, hidden: Tensor, markov: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What W2 multiplies at one place of each block, and the head's next state.

        Args:
            hidden: `[blocks, hidden]`, normed hidden states of the rows there.
            markov: `[blocks, rank]`, `markov_states` of the tokens before.
            state: `[blocks, rank]` of an `rnn` head; None at the block's start and for other heads.

        Returns:
            `[blocks, rank]`, and the state after this place (None without one).
        """
        kind = self.shape.markov_head_type
        if not self.shape.markov_rank or kind == "vanilla":
            return markov, None
        if kind == "gated":
            return torch.sigmoid(self.markov_gate(torch.cat([hidden, markov], dim=-1))) * markov, None
        state = torch.zeros_like(markov) if state is None else state
        joint: Tensor = self.markov_joint(torch.cat([state, markov, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def markov_latents(self, hidden: Tensor, markov: Tensor, tokens: int) -> Tensor:
        """What W2 multiplies at every row: `[blocks * tokens, rank]`.

        Args:
            hidden: `[blocks * tokens, hidden]`, as `forward` gives it.
            markov: `[blocks * tokens, rank]`, `markov_states` of the tokens before.
            tokens: tokens that a block predicts.
        """
        if self.shape.markov_head_type != "rnn":
            return self.markov_step(hidden, markov, None)[0]
        places = hidden.view(-1, tokens, hidden.shape[-1]), markov.view(-1, tokens, markov.shape[-1])
        state, latents = None, []
        for place in range(tokens):
            latent, state = self.markov_step(places[0][:, place], places[1][:, place], state)
            latents.append(latent)
        return torch.stack(latents, dim=1).flatten(0, 1)

    def confidence_logits(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """Logit of the probability that each drafted token survives: float32 `[rows]`."""
        logits: Tensor = self.confidence(torch.cat([hidden, markov], dim=-1))
        return logits[:, 0].float()
