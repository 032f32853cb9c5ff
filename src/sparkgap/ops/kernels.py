"""The verbs models are written in. One interface; a device brings its implementation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparkgap.ops import draft, rounds
from sparkgap.ops.draft import DraftChain, DraftHeads, DraftStep, StepRows


@dataclass(frozen=True)
class KVCache:
    """One layer's paged keys and values.

    Attributes:
        keys, values: `[num_blocks, block_size, kv_heads, head_dim]`. Slot `s` is place `s % block_size` of block
            `s // block_size`.
    """

    keys: Tensor
    values: Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self.keys.shape[0]

    @property
    def block_size(self) -> int:
        """Positions in one block."""
        return self.keys.shape[1]


@dataclass(frozen=True)
class RotaryTable:
    """Rotation angles of each position, already scaled by the RoPE variant.

    Attributes:
        cos, sin: float32 `[max_positions, rotary_dim / 2]`, with any attention factor (yarn) multiplied in.
            Feature `i` of a head is rotated with feature `i + rotary_dim / 2` (Hugging Face's "half" layout).
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class AttentionRows:
    """Which rows of a forward pass belong to which sequence, and where each sequence's KV lies.

    Rows of a sequence are consecutive, sequences follow each other. All tensors are on the device.

    Attributes:
        positions: int64 `[rows]`, the position of each row in its sequence.
        row_starts: int32 `[sequences + 1]`, first row of each sequence; the last entry is the number of rows.
        block_tables: int32 `[sequences, max_blocks]`, block of positions `i * block_size ...`; unused entries
            are any valid block.
        max_rows: most rows of one sequence (host number, an upper bound).
        max_length: most KV positions that any row sees (host number, an upper bound).
    """

    positions: Tensor
    row_starts: Tensor
    block_tables: Tensor
    max_rows: int
    max_length: int


@dataclass(frozen=True)
class LinearWeight:
    """A matrix product's weight in the form its kernels want; made by `Kernels.prepare_linear`.

    Attributes:
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def in_features(self) -> int:
        """Size of an input row."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Size of an output row."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads of it, without what is only padding."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix product's weight as a quantized checkpoint holds it (W8A8, symmetric).

    Attributes:
        values: int8 `[out_features, in_features]`, in -127 ... 127: kernels multiply magnitudes.
        scales: float32 `[out_features]`, of each output channel.
        input_scale: the one scale of its int8 inputs (static); None gives each row its own (dynamic).
    """

    values: Tensor
    scales: Tensor
    input_scale: float | None = None


class PackedForm(NamedTuple):
    """A prepared weight's content.

    Attributes:
        facts: values of JSON's types.
        tensors: contiguous CPU tensors over the weight's own memory, the same on every instruction set.
    """

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


class Kernels(ABC):
    """The operations of one device. Every one returns new tensors, except `kv_write`, which writes the cache.

    Row operations never mix rows: what row `r` gives does not depend on which rows stand beside it (exactly on
    devices with fixed-order kernels; within the reduction order of the library's matrix product in the torch
    reference).

    Inputs of `rotary`, `rms_norm`, `kv_write`, `paged_attention` and `block_attention` may be views of wider rows
    (queries, keys and values side by side, as one product gives them): a head's features are contiguous, heads
    follow each other, only the row stride is larger. Everything returned is contiguous.
    """

    @abstractmethod
    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, quantize: bool = True) -> LinearWeight:
        """Bring `weight` `[out_features, in_features]` into the form that `linear` reads fastest.

        Args:
            weight: floating-point values.
            bias: `[out_features]`.
            quantize: False keeps the weight's dtype where these kernels quantize.
        """

    @abstractmethod
    def prepare_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> LinearWeight:
        """The same for a weight that is quantized already, whatever these kernels do with others."""

    def packed_form(self, weight: LinearWeight) -> PackedForm | None:
        """What must be kept of a prepared weight to have it again without preparing it; None: nothing is worth it."""
        del weight
        return None

    def blank_packed(self, facts: Mapping[str, Any]) -> tuple[LinearWeight, dict[str, Tensor]]:
        """A weight of these facts, and its tensors for the caller to fill.

        Raises:
            ValueError: no weight of these kernels has such facts.
        """
        raise ValueError(f"these kernels keep no weight, so none of {dict(facts)}")

    @abstractmethod
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows of `table` `[vocab, hidden]` at `token_ids` int64 `[rows]`: `[rows, hidden]`."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32, in `x`'s dtype."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`(rms_norm(s), s)` for `s = x + residual`."""

    @abstractmethod
    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """`x @ weight.T + bias`: `[rows, in_features]` -> `[rows, out_features]`."""

    def written_linear(self, x: Tensor, weight: LinearWeight, slots: Tensor) -> Tensor:
        """`linear(x, weight)` for rows that go to a cache: rows whose slot (int64 `[rows]`) is -1 may hold anything."""
        del slots
        return self.linear(x, weight)

    @abstractmethod
    def rotary(self, x: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
        """`x` `[rows, heads, head_dim]` rotated at `positions` int64 `[rows]`.

        Features beyond the table's rotary_dim pass unchanged.
        """

    @abstractmethod
    def kv_write(self, keys: Tensor, values: Tensor, cache: KVCache, slots: Tensor) -> None:
        """Write `keys` and `values` `[rows, kv_heads, head_dim]` at `slots` int64 `[rows]`; -1 writes nothing."""

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: LinearWeight
    ) -> tuple[Tensor, Tensor]:
        """`(linear(rms_norm(s, norm, eps), weight), s)` for `s = x + residual`, or `s = x` without a residual."""
        if residual is None:
            return self.linear(self.rms_norm(x, norm, eps), weight), x
        normed, total = self.add_rms_norm(x, residual, norm, eps)
        return self.linear(normed, weight), total

    def silu_mul_linear(self, gate_up: Tensor, weight: LinearWeight) -> Tensor:
        """`linear(silu_mul(gate_up), weight)`."""
        return self.linear(self.silu_mul(gate_up), weight)

    def norm_rotary(self, x: Tensor, norm: Tensor, eps: float, positions: Tensor, table: RotaryTable) -> Tensor:
        """`rotary(rms_norm(x, norm, eps), positions, table)` for heads `[rows, heads, head_dim]`."""
        return self.rotary(self.rms_norm(x, norm, eps), positions, table)

    def rotary_kv_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        table: RotaryTable,
        cache: KVCache,
        slots: Tensor,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Rotate queries and keys and write keys and values to the cache; gives the queries.

        Args:
            qkv: `[rows, heads + 2 * kv_heads, head_dim]`: queries (0 heads or more), keys, values.
            positions: int64 `[rows]`.
            table: angles of the positions.
            cache: where keys and values go.
            slots: int64 `[rows]`; -1 writes nothing.
            query_norm, key_norm: `[head_dim]`, weights of an RMSNorm of each head before the rotation.
            eps: of the norms.

        Returns:
            `[rows, heads, head_dim]`.
        """
        kv_heads = cache.keys.shape[2]
        heads = qkv.shape[1] - 2 * kv_heads
        queries, keys, values = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if query_norm is not None:
            queries = self.rms_norm(queries, query_norm, eps)
        if key_norm is not None:
            keys = self.rms_norm(keys, key_norm, eps)
        self.kv_write(self.rotary(keys, positions, table), values, cache, slots)
        return self.rotary(queries, positions, table)

    @abstractmethod
    def paged_attention(
        self,
        queries: Tensor,
        cache: KVCache,
        rows: AttentionRows,
        scale: float,
        sliding_window: int | None = None,
        following: Sequence[LinearWeight] = (),
    ) -> Tensor:
        """Causal attention of `queries` `[rows, heads, head_dim]` over the cache: same shape.

        A row at position `p` sees its sequence's positions `0 ... p` (the last `sliding_window` of them, itself
        included, where that is given). Query head `h` reads KV head `h // (heads / kv_heads)`.

        `following` are weights of the products that come next, in order. A device may fetch them meanwhile; results do
        not depend on them.
        """

    @abstractmethod
    def block_attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cache: KVCache,
        context_lengths: Tensor,
        block_tables: Tensor,
        scale: float,
        sliding_window: int | None = None,
        max_length: int = 0,
        causal: bool = False,
    ) -> Tensor:
        """Attention of draft blocks: each row sees its sequence's live context and its whole block.

        Args:
            queries: `[sequences, block_rows, heads, head_dim]`; row `i` stands at position `context_length + i`.
            keys, values: `[sequences, block_rows, kv_heads, head_dim]`, the block's own.
            cache: context KV; positions `0 ... context_length - 1` are seen.
            context_lengths: int64 `[sequences]`, live lengths.
            block_tables: int32 `[sequences, max_blocks]`.
            scale: multiplies the dot products.
            sliding_window: when given, a row sees positions above `its own - sliding_window` only.
            max_length: upper bound of `context_lengths` (host number); 0 when unknown: the block tables' whole
                capacity is looked at.
            causal: a row sees, of its block, itself and the rows before it only.

        Returns:
            `[sequences, block_rows, heads, head_dim]`.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up` `[rows, 2 * features]`, gate first: `[rows, features]`."""

    def concat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors `[rows, features_i]` side by side: `[rows, sum of features_i]`."""
        return torch.cat(list(tensors), dim=-1)

    def to_float32(self, x: Tensor) -> Tensor:
        """`x` in float32."""
        return x.to(torch.float32)

    def draft_inputs(
        self, anchors: Tensor, context_lengths: Tensor, block_rows: int, mask_token_id: int
    ) -> tuple[Tensor, Tensor]:
        """Token ids and positions, int64 `[sequences * block_rows]` each, of draft blocks.

        A block is its anchor (int64 `[sequences]`), then mask tokens, at positions from its context length
        (int64 `[sequences]`) on.
        """
        return draft.draft_inputs(anchors, context_lengths, block_rows, mask_token_id)

    def step_rows(
        self, context_lengths: Tensor, block_tables: Tensor, steps: int, block_size: int, max_length: int
    ) -> StepRows:
        """Rows of `steps` draft passes of one row a sequence: the first stands at the last position of its context.

        Rows from position `max_length` or the end of the block table on stand at the last position before and write
        nothing, as do the rows of a sequence without context, which only pads.

        Args:
            context_lengths: int64 `[sequences]`, live lengths.
            block_tables: int32 `[sequences, max_blocks]`.
            steps: passes.
            block_size: positions in a block.
            max_length: most positions of a sequence.
        """
        return draft.step_rows(context_lengths, block_tables, steps, block_size, max_length)

    def draft_pick(self, logits: Tensor, target_ids: Tensor | None, token_ids: Tensor, scores: Tensor) -> None:
        """The token with the largest logit of each row.

        Args:
            logits: float32 `[sequences, draft_vocab]`.
            target_ids: int64 `[draft_vocab]`, target id of each draft id; None when they are the same.
            token_ids: int64 `[sequences]`, filled with target ids.
            scores: float32 `[sequences]`, filled with the largest logits; NaN if any logit of the row is NaN.
        """
        draft.draft_pick(logits, target_ids, token_ids, scores)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that operations fill."""
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def draft_step(
        self, base_logits: Tensor, hidden: Tensor, previous: Tensor, state: Tensor | None, heads: DraftHeads
    ) -> DraftStep:
        """One step of the heads' chain, for a caller that picks the token itself.

        Args:
            base_logits: float32 `[sequences, draft_vocab]`; may be a view of every block's row.
            hidden: `[sequences, hidden]`; may be a view of every block's row.
            previous: int64 `[sequences]`, target id of the token before.
            state: what the step before gave; None at a block's start.
            heads: the heads' weights, at the step's place (`DraftHeads.at`).
        """
        return draft.draft_step(self.linear, base_logits, hidden, previous, state, heads)

    def draft_chain(
        self, base_logits: Tensor, hidden: Tensor, anchors: Tensor, heads: DraftHeads, lead_rows: int = 0
    ) -> DraftChain:
        """The heads' whole chain over draft blocks, where each step takes the token with the largest logit.

        Args:
            base_logits: float32 `[sequences, block_rows, draft_vocab]`.
            hidden: `[sequences, block_rows, hidden]`.
            anchors: int64 `[sequences]`, the token before the first step.
            heads: the heads' weights.
            lead_rows: rows at the block's start that predict nothing: they advance the rnn's state, with the
                anchor as the token before, and give no step.
        """
        return draft.draft_chain(self.linear, base_logits, hidden, anchors, heads, lead_rows)

    def begin_round(
        self,
        sources: Tensor,
        staged_anchors: Tensor,
        staged_positions: Tensor,
        state_anchors: Tensor,
        state_positions: Tensor,
        anchors: Tensor,
        positions: Tensor,
    ) -> None:
        """Where each sequence's round begins.

        Args:
            sources: int32 `[sequences]`, row of the state that the round before left; -1 takes what is staged.
            staged_anchors, staged_positions: int64 `[sequences]`.
            state_anchors, state_positions: int64, one entry a row of the state.
            anchors, positions: int64 `[sequences]`, filled.
        """
        rounds.begin_round(
            sources, staged_anchors, staged_positions, state_anchors, state_positions, anchors, positions
        )

    def verify_rows(
        self,
        anchors: Tensor,
        positions: Tensor,
        draft_ids: Tensor | None,
        block_tables: Tensor,
        num_blocks: Tensor,
        block_size: int,
        max_length: int,
        token_ids: Tensor,
        row_positions: Tensor,
        slots: Tensor,
    ) -> None:
        """Rows of a target pass: each sequence's anchor and its draft tokens, W of each.

        Rows from position `max_length` on stand at the last position and write nothing, as do all rows of a sequence
        that only pads.

        Args:
            anchors, positions: int64 `[sequences]`.
            draft_ids: int64 `[sequences, W - 1]`, any strides; None for W = 1.
            block_tables: int32 `[sequences, max_blocks]`.
            num_blocks: int32 `[sequences]`, entries of each table that hold; 0 for a sequence that only pads.
            block_size: positions in a block.
            max_length: most positions of a sequence.
            token_ids, row_positions, slots: int64 `[sequences * W]`, filled.

        Raises:
            IndexError: (native) a row that must be written lies beyond its sequence's blocks.
        """
        rounds.verify_rows(
            anchors,
            positions,
            draft_ids,
            block_tables,
            num_blocks,
            block_size,
            max_length,
            token_ids,
            row_positions,
            slots,
        )

    def settle_round(
        self,
        picks: Tensor,
        scores: Tensor,
        draft_ids: Tensor | None,
        draft_scores: Tensor | None,
        positions: Tensor,
        row_positions: Tensor,
        slots: Tensor,
        context_length: int,
        context_positions: Tensor | None,
        context_slots: Tensor | None,
        next_anchors: Tensor,
        next_positions: Tensor,
        results: Tensor,
    ) -> None:
        """Accept each sequence's draft tokens as long as they are the target's picks.

        Args:
            picks: int64 `[sequences * W]`, the target's token of each row.
            scores: float32 `[sequences * W]`, not finite where the target's logits give no token.
            draft_ids, draft_scores: int64 and float32 `[sequences, W - 1]`, any strides; None for W = 1.
            positions: int64 `[sequences]`, of the anchors.
            row_positions, slots: int64 `[sequences * W]`, of the verified rows.
            context_length: rows from this position on give no context.
            context_positions, context_slots: int64 `[sequences * W]`, filled; slots of rejected rows are -1. None
                without a drafter.
            next_anchors, next_positions: int64 `[sequences]`, filled: the last token that counts, and its position.
            results: int64 `[sequences, W + 2]`, filled: accepted draft tokens, `RoundStatus`, picks.
        """
        rounds.settle_round(
            picks,
            scores,
            draft_ids,
            draft_scores,
            positions,
            row_positions,
            slots,
            context_length,
            context_positions,
            context_slots,
            next_anchors,
            next_positions,
            results,
        )

    def look_up(
        self,
        texts: Tensor,
        text_rows: Tensor,
        positions: Tensor,
        draft_ids: Tensor,
        lengths: tuple[int, int],
        out: Tensor,
    ) -> None:
        """Drafts of each sequence: what followed its last tokens before, else what was proposed (`rounds.lookup`).

        Args:
            texts: int32 `[rows, capacity]`, tokens by position.
            text_rows: int32 `[sequences]`, row of each sequence's text; -1 where it only pads.
            positions: int64 `[sequences]`, of the anchors, whose tokens the texts have.
            draft_ids: int64 `[sequences, N]`, the proposed draft tokens.
            lengths: fewest and most last tokens that are compared.
            out: int64 `[sequences, N]`, filled.
        """
        rounds.look_up(texts, text_rows, positions, draft_ids, lengths, out)

    def remember(self, texts: Tensor, text_rows: Tensor, positions: Tensor, results: Tensor) -> None:
        """Write a round's tokens behind the anchors, as far as `texts` reach; `results` as of `settle_round`.

        Raises:
            IndexError: a sequence with a text has fewer than 0 accepted tokens, or more than its round drafted.
        """
        rounds.remember(texts, text_rows, positions, results)

    def hand_off(
        self, next_anchors: Tensor, next_positions: Tensor, state_anchors: Tensor, state_positions: Tensor
    ) -> None:
        """Leave each sequence's new anchor and position, int64 `[sequences]`, in the first rows of the state."""
        rounds.hand_off(next_anchors, next_positions, state_anchors, state_positions)
