"""The dense decoder of the Llama, Mistral, Qwen2 and Qwen3 families."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.models.batch import ForwardBatch, ForwardResult
from sparkgap.models.config import ModelConfig
from sparkgap.ops.kernels import Kernels
from sparkgap.ops.operands import AttentionRows, KVCache, LinearWeight, RotaryTable


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer.

    Attributes:
        input_norm, post_attention_norm: `[hidden_size]`.
        qkv: query, key and value projections, one above the other.
        query_norm, key_norm: `[head_dim]`, or None in families without them.
        output: the attention's output projection.
        gate_up: gate and up projections, one above the other.
        down: the feed-forward's output projection.
        sliding_window: positions a row sees, its own included; None sees everything.
    """

    input_norm: Tensor
    qkv: LinearWeight
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: LinearWeight
    post_attention_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight
    sliding_window: int | None


class Decoder:
    """A target network. Written in `Kernels` and views only, so that a device can record a pass and replay it.

    Attributes:
        config: what the network looks like.
        kernels: what computes it.
        dtype, device: of weights, hidden states and KV cache.
        embedding: `[vocab_size, hidden_size]`.
        lm_head: product that gives logits; shares the embedding's storage where they are tied (and the kernels
            keep weights as they are).
        rotary: angles of each position, for as many positions as a sequence may have.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: LinearWeight,
        rotary: RotaryTable,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.embedding = embedding
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.rotary = rotary
        self.dtype: torch.dtype = embedding.dtype
        self.device: torch.device = embedding.device
        self._scale = config.head_dim**-0.5

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that a pass of one row reads, in the form in which they are held."""
        products = [w for layer in self.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        norms = [
            norm
            for layer in self.layers
            for norm in (layer.input_norm, layer.query_norm, layer.key_norm, layer.post_attention_norm)
            if norm is not None
        ]
        linear_bytes = sum(weight.nbytes for weight in (*products, self.lm_head))
        return linear_bytes + sum(norm.nbytes for norm in (*norms, self.final_norm)) + self.embedding[0].nbytes

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[rows, hidden_size]` of `token_ids` int64 `[rows]`."""
        return self.kernels.embed(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 `[rows, vocab_size]` of rows of `ForwardResult.hidden`."""
        return self.kernels.to_float32(self.kernels.linear(hidden, self.lm_head))

    def forward(
        self, batch: ForwardBatch, caches: Sequence[KVCache], captured_layers: tuple[int, ...] = ()
    ) -> ForwardResult:
        """One pass: writes each row's keys and values at its slot and gives the hidden states.

        Args:
            batch: rows to compute.
            caches: one for each layer.
            captured_layers: ids of layers whose output is kept. Id `k` is the residual stream after layer `k`
                (Hugging Face `hidden_states[k + 1]`). The last layer's is taken *before* the final norm, where
                Hugging Face's last hidden state is after it.

        Returns:
            Hidden states after the final norm, and the captured streams side by side in the order asked for.
        """
        kernels, eps = self.kernels, self.config.rms_norm_eps
        streams: dict[int, Tensor] = {}
        # Between layers the stream is the sum of `residual` and what the layer added, which the next norm adds up.
        added, residual = self.embed(batch.token_ids), None
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            qkv, stream = kernels.norm_linear(added, residual, layer.input_norm, eps, layer.qkv)
            if index - 1 in captured_layers:
                streams[index - 1] = stream
            attended = self._attention(layer, qkv, cache, batch.slots, batch.attention)
            gate_up, residual = kernels.norm_linear(attended, stream, layer.post_attention_norm, eps, layer.gate_up)
            added = kernels.silu_mul_linear(gate_up, layer.down)
        assert residual is not None
        hidden, stream = kernels.add_rms_norm(added, residual, self.final_norm, eps)
        streams[len(self.layers) - 1] = stream
        captured = kernels.concat([streams[index] for index in captured_layers]) if captured_layers else None
        return ForwardResult(hidden, captured)

    def _attention(
        self, layer: DecoderLayer, qkv: Tensor, cache: KVCache, slots: Tensor, rows: AttentionRows
    ) -> Tensor:
        kernels, config = self.kernels, self.config
        queries = kernels.rotary_kv_write(
            qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim),
            rows.positions,
            self.rotary,
            cache,
            slots,
            layer.query_norm,
            layer.key_norm,
            config.rms_norm_eps,
        )
        following = (layer.output, layer.gate_up)
        attended = kernels.paged_attention(queries, cache, rows, self._scale, layer.sliding_window, following)
        return kernels.linear(attended.view(-1, config.num_heads * config.head_dim), layer.output)
