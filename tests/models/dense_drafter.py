"""A block drafter written straight from its equations: dense attention over the whole context, no cache.

Independent of the code under `src`: plain differentiable torch over a dictionary of tensors in the checkpoint's
names. It recomputes everything from the captured hidden states of all positions at every call.
Source: arXiv 2607.05147 (DSpark), arXiv 2602.06036 (DFlash).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Pick = Callable[[int, Tensor], int]


@dataclass(frozen=True)
class DenseDrafter:
    """`config`: Qwen3 keys of the draft layers; `weights`: the checkpoint's tensors, with `embed_tokens.weight`
    `[vocab, hidden]` and `lm_head.weight` `[draft_vocab, hidden]`; `target_ids`: target id of each draft id."""

    config: Mapping[str, Any]
    weights: Weights
    mask_token_id: int
    sample_from_anchor: bool
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    head_type: str = "none"
    confidence: bool = False
    confidence_with_markov: bool = False
    target_ids: Tensor | None = None

    def block_hidden(self, captured: Tensor, anchor: int, num_tokens: int) -> Tensor:
        """Hidden states `[num_tokens, hidden]` of the rows that predict, for a block whose anchor stands at
        position `len(captured)`. `captured` is `[positions, m * target_hidden]`."""
        rows = num_tokens if self.sample_from_anchor else num_tokens + 1
        hidden = self._block_rows(captured, anchor, rows)
        return hidden if self.sample_from_anchor else hidden[1:]

    def _block_rows(self, captured: Tensor, anchor: int, rows: int) -> Tensor:
        w, eps = self.weights, self.config["rms_norm_eps"]
        context = rms_norm(captured @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        x = w["embed_tokens.weight"][torch.tensor([anchor] + [self.mask_token_id] * (rows - 1))]
        for i in range(self.config["num_hidden_layers"]):
            p = f"layers.{i}."
            y = rms_norm(x, w[p + "input_layernorm.weight"], eps)
            x = x + self._attention(i, y, context)
            y = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        return rms_norm(x, w["norm.weight"], eps)

    def _attention(self, layer: int, block: Tensor, context: Tensor) -> Tensor:
        config, eps = self.config, self.config["rms_norm_eps"]
        heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        prefix = f"layers.{layer}.self_attn."
        length, rows = len(context), len(block)
        seen = torch.cat([context, block])
        positions = torch.arange(length + rows)
        q = self._project(prefix + "q_proj", block).view(rows, heads, size)
        k = self._project(prefix + "k_proj", seen).view(length + rows, kv_heads, size)
        v = self._project(prefix + "v_proj", seen).view(length + rows, kv_heads, size)
        theta = config["rope_theta"]
        q = rotate(rms_norm(q, self.weights[prefix + "q_norm.weight"], eps), positions[length:], theta)
        k = rotate(rms_norm(k, self.weights[prefix + "k_norm.weight"], eps), positions, theta)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        own, other = positions[length:, None], positions[None, :]
        visible = torch.ones(rows, length + rows, dtype=torch.bool)
        window = self.windows[layer]
        if window is not None:
            visible &= other > own - window
        if self.causal[layer]:
            visible &= other <= own
        attention = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return self._project(prefix + "o_proj", torch.einsum("hqk,khd->qhd", attention, v).reshape(rows, -1))

    def _project(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Base logits over the draft vocabulary."""
        return hidden @ self.weights["lm_head.weight"].T

    def propose(
        self, captured: Tensor, anchor: int, num_tokens: int, pick: Pick | None = None
    ) -> tuple[Tensor, Tensor, list[int], Tensor | None]:
        """Base logits `[N, draft_vocab]`, final logits `[N, draft_vocab]`, target ids of the draft tokens, and
        their confidences `[N]`; `pick` takes a step and its logits, and gives a draft id."""
        rows = num_tokens if self.sample_from_anchor else num_tokens + 1
        block = self._block_rows(captured, anchor, rows)
        state = torch.zeros(self._rank)
        if not self.sample_from_anchor and self.head_type == "rnn":
            _, state = self._bias(block[0], anchor, state)
        hidden = block[rows - num_tokens :]
        base = self.logits(hidden)
        final, tokens, confidences = [], [], []
        previous = anchor
        for step in range(num_tokens):
            bias, state = self._bias(hidden[step], previous, state)
            final.append(base[step] + bias)
            confidences.append(self._confidence(hidden[step], previous))
            draft_id = int(final[-1].argmax()) if pick is None else pick(step, final[-1])
            previous = draft_id if self.target_ids is None else int(self.target_ids[draft_id])
            tokens.append(previous)
        return base, torch.stack(final), tokens, torch.stack(confidences) if self.confidence else None

    @property
    def _rank(self) -> int:
        return 0 if self.head_type == "none" else self.weights["markov_head.markov_w1.weight"].shape[1]

    def _bias(self, hidden: Tensor, previous: int, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.head_type == "none":
            return torch.zeros(()), state
        embedded = self.weights["markov_head.markov_w1.weight"][previous]
        if self.head_type == "vanilla":
            latent = embedded
        elif self.head_type == "gated":
            gate = torch.sigmoid(self._project("markov_head.gate_proj", torch.cat([hidden, embedded])))
            latent = gate * embedded
        else:
            z = torch.cat([state, embedded, hidden])
            gate, candidate, output = self._project("markov_head.joint_proj", z).split(self._rank)
            keep = torch.sigmoid(gate)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            latent = torch.tanh(output)
        return self.weights["markov_head.markov_w2.weight"] @ latent, state

    def _confidence(self, hidden: Tensor, previous: int) -> Tensor:
        if not self.confidence:
            return torch.zeros(())
        features = hidden
        if self.confidence_with_markov:
            features = torch.cat([hidden, self.weights["markov_head.markov_w1.weight"][previous]])
        return torch.sigmoid(self._project("confidence_head.proj", features)[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of `x` `[rows, heads, size]`; feature `i` turns with feature `i + size / 2`."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (positions[:, None] * frequencies).float()[:, None, :]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
