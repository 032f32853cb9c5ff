"""An MTP drafter written straight from its equations: everything is recomputed from all tokens, with no cache.

Independent of the code under `src`: plain torch over a dictionary of tensors in the checkpoint's names.
Source: arXiv 2412.19437, section 2.2.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dense_drafter import rms_norm, rotate
from torch import Tensor


@dataclass(frozen=True)
class DenseMTP:
    """`config`: Qwen3 keys of the layer; `weights`: the checkpoint's tensors, with `embed_tokens.weight` and
    `lm_head.weight`; `window`: of the layer; `target_ids`: target id of each draft id."""

    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    window: int | None = None
    target_ids: Tensor | None = None

    def stream(self, hidden: Tensor, following: Sequence[int]) -> Tensor:
        """`x` `[entries, hidden]` of the target's hidden states and the tokens after their positions."""
        w, eps = self.weights, self.config["rms_norm_eps"]
        embedded = rms_norm(w["embed_tokens.weight"][torch.tensor(list(following))], w["enorm.weight"], eps)
        return torch.cat([embedded, rms_norm(hidden, w["hnorm.weight"], eps)], dim=-1) @ w["eh_proj.weight"].T

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value `[entries, kv_heads, head_dim]` of each entry."""
        w, eps, config = self.weights, self.config["rms_norm_eps"], self.config
        shape = (len(x), config["num_key_value_heads"], config["head_dim"])
        normed = rms_norm(x, w["layers.0.input_layernorm.weight"], eps)
        keys = (normed @ w["layers.0.self_attn.k_proj.weight"].T).view(shape)
        keys = rms_norm(keys, w["layers.0.self_attn.k_norm.weight"], eps)
        values = (normed @ w["layers.0.self_attn.v_proj.weight"].T).view(shape)
        return rotate(keys, torch.arange(len(x)), config["rope_theta"]), values

    def layer(self, x: Tensor) -> Tensor:
        """`y` `[entries, hidden]`."""
        w, eps, config = self.weights, self.config["rms_norm_eps"], self.config
        heads, kv_heads, size, length = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            len(x),
        )
        prefix = "layers.0."
        normed = rms_norm(x, w[prefix + "input_layernorm.weight"], eps)
        q = (normed @ w[prefix + "self_attn.q_proj.weight"].T).view(length, heads, size)
        q = rotate(rms_norm(q, w[prefix + "self_attn.q_norm.weight"], eps), torch.arange(length), config["rope_theta"])
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in self.keys_and_values(x))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        own, other = torch.arange(length)[:, None], torch.arange(length)[None, :]
        visible = other <= own
        if self.window is not None:
            visible &= other > own - self.window
        attention = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("hqk,khd->qhd", attention, v).reshape(length, -1)
        x = x + attended @ w[prefix + "self_attn.o_proj.weight"].T
        normed = rms_norm(x, w[prefix + "post_attention_layernorm.weight"], eps)
        gate, up = normed @ w[prefix + "mlp.gate_proj.weight"].T, normed @ w[prefix + "mlp.up_proj.weight"].T
        return x + (gate * torch.sigmoid(gate) * up) @ w[prefix + "mlp.down_proj.weight"].T

    def propose(
        self, hidden: Tensor, tokens: Sequence[int], count: int, pick: Callable[[int, Tensor], int] | None = None
    ) -> tuple[Tensor, list[int]]:
        """Logits `[count, draft_vocab]` and target ids of the draft tokens.

        `hidden` `[positions, hidden]` is the target's of all committed positions; `tokens` are theirs and the anchor.
        """
        w, eps = self.weights, self.config["rms_norm_eps"]
        x = self.stream(hidden, tokens[1:])
        logits, drafted = [], []
        for step in range(count):
            y = self.layer(x)[-1:]
            logits.append((rms_norm(y, w["norm.weight"], eps) @ w["lm_head.weight"].T)[0])
            draft_id = int(logits[-1].argmax()) if pick is None else pick(step, logits[-1])
            drafted.append(draft_id if self.target_ids is None else int(self.target_ids[draft_id]))
            x = torch.cat([x, self.stream(y, drafted[-1:])])
        return torch.stack(logits), drafted
