"""The CPU device's kernels: `Kernels` over the native module.

Activations are float32 whatever the model's dtype is: at the few rows of a decoding pass they are a few kilobytes
against megabytes of weights, so bfloat16 would save nothing, cost two conversions an operation and round the
residual stream at every layer. Weights and KV cache, which are what memory bandwidth goes to, keep the model's
dtype or are quantized. Operations also take bfloat16 activations and answer in kind.

A row's result has the same bits whatever rows stand beside it, however many threads run and whichever instruction
set the kernels were compiled for.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparkgap import _native
from sparkgap.errors import CheckpointError, ConfigError
from sparkgap.ops.draft import DraftChain, DraftHeads, DraftStep, StepRows
from sparkgap.ops.kernels import AttentionRows, Kernels, KVCache, LinearWeight, PackedForm, QuantizedWeight, RotaryTable
from sparkgap.ops.w8a8 import Quantization

ValueForm = Literal["int8", "bfloat16", "float32"]

ISA_VARIABLE = "SPARKGAP_ISA"
"""Environment variable that forces a kernel variant: `avx512`, `avx2` or `portable`."""


@dataclass(frozen=True)
class NativeLinearWeight(LinearWeight):
    """A weight packed for the native kernels.

    Attributes:
        weight: on the `meta` device: the shape of the original, without its values.
        packed: the values, in the native module's own memory.
        form: what the values are packed as.
    """

    packed: _native.PackedWeight = field(kw_only=True)
    form: ValueForm = field(kw_only=True)

    @property
    def nbytes(self) -> int:
        """See `LinearWeight.nbytes`; int8 has a scale and an offset of 4 bytes for each output channel."""
        values = self.in_features * _PACKED_BYTES[self.form]
        channel = values + (8 if self.form == "int8" else 0) + (0 if self.bias is None else 4)
        return self.out_features * channel


class NativeKernels(Kernels):
    """`Kernels` on CPU threads.

    Args:
        threads: compute threads; None takes the cores available to the process.
        quantization: `w8a8` packs weights as int8 with a scale for each output channel, and quantizes activations
            to int8 with a scale for each row; None keeps weights in their own dtype.
        activation_dtype: of embeddings, and so of everything computed from them.

    Raises:
        ConfigError: the variant that `SPARKGAP_ISA` names is not in this build, or not for this CPU.
    """

    def __init__(
        self,
        threads: int | None = None,
        quantization: Quantization | None = None,
        activation_dtype: torch.dtype = torch.float32,
    ) -> None:
        if quantization not in (None, "w8a8"):
            raise ConfigError(f"quantization must be w8a8 or none, got {quantization!r}")
        if activation_dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"activations must be float32 or bfloat16, got {activation_dtype}")
        self.quantization = quantization
        self.activation_dtype = activation_dtype
        variant = os.environ.get(ISA_VARIABLE, "")
        try:
            self.executor = _native.Executor(threads or _native.usable_cores(), variant)
        except RuntimeError as error:
            raise ConfigError(f"{ISA_VARIABLE}={variant}: {error}") from error

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, quantize: bool = True) -> NativeLinearWeight:
        """Pack a copy of `weight` `[out_features, in_features]`; the original is not kept.

        Raises:
            CheckpointError: the weight has infinities or NaN and is to be quantized.
        """
        is_int8 = quantize and self.quantization == "w8a8"
        form: ValueForm = "int8" if is_int8 else _PACKED_FORMS.get(weight.dtype, "float32")
        source = weight.detach() if weight.dtype in _PACKED_FORMS else weight.detach().to(torch.float32)
        if bias is not None:
            bias = bias.detach().to(torch.float32).contiguous()
        packed = self.executor.pack_linear(source.contiguous(), bias, form)
        if form == "int8" and not torch.tensor(packed.scales()).isfinite().all():
            raise CheckpointError(
                f"a weight of shape {list(weight.shape)} has infinities or NaN: it cannot be quantized"
            )
        return NativeLinearWeight(
            torch.empty(weight.shape, dtype=weight.dtype, device="meta"), bias, packed=packed, form=form
        )

    def prepare_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> NativeLinearWeight:
        """See `Kernels.prepare_quantized`; packed as `prepare_linear` packs what it quantizes itself."""
        out_features, in_features = weight.values.shape
        if bias is not None:
            bias = bias.detach().to(torch.float32).contiguous()
        packed = self.executor.blank_weight(
            out_features, in_features, "int8", bias is not None, weight.input_scale or 0.0
        )
        parts = packed.parts()
        blocks, groups = -(-out_features // 16), -(-in_features // 4)
        padded = functional.pad(weight.values, (0, groups * 4 - in_features, 0, blocks * 16 - out_features))
        pairs, paired = blocks // 2, blocks // 2 * 2 * 64 * groups
        rows = padded[: pairs * 32].view(pairs, 2, 16, groups, 4)
        parts["packed"][:paired].view(pairs, groups, 2, 16, 4).copy_(rows.permute(0, 3, 1, 2, 4))
        last = padded[pairs * 32 :].view(blocks % 2, 16, groups, 4)
        parts["packed"][paired:].view(blocks % 2, groups, 16, 4).copy_(last.transpose(1, 2))
        parts["offsets"].copy_(padded.sum(1, dtype=torch.int32).mul_(-128))
        parts["scales"][:out_features] = weight.scales
        if bias is not None:
            parts["bias"][:out_features] = bias
        shape = torch.empty(weight.values.shape, dtype=torch.int8, device="meta")
        return NativeLinearWeight(shape, bias, packed=packed, form="int8")

    def packed_form(self, weight: LinearWeight) -> PackedForm:
        """See `Kernels.packed_form`."""
        if not isinstance(weight, NativeLinearWeight):
            raise TypeError("the weight was not prepared by NativeKernels")
        facts = {
            "out_features": weight.out_features,
            "in_features": weight.in_features,
            "form": weight.form,
            "dtype": str(weight.weight.dtype).removeprefix("torch."),
            "bias": weight.bias is not None,
            "input_scale": weight.packed.input_scale,
        }
        return PackedForm(facts, weight.packed.parts())

    def blank_packed(self, facts: Mapping[str, Any]) -> tuple[NativeLinearWeight, dict[str, Tensor]]:
        """See `Kernels.blank_packed`."""
        try:
            form, shape = facts["form"], (facts["out_features"], facts["in_features"])
            packed = self.executor.blank_weight(*shape, form, facts["bias"], facts["input_scale"])
            dtype = _DTYPES[facts["dtype"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"no packed weight has these facts: {dict(facts)}") from error
        parts = packed.parts()
        bias = parts["bias"][: shape[0]] if "bias" in parts else None
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return NativeLinearWeight(meta, bias, packed=packed, form=form), parts

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `Kernels.embed`; rows come in `activation_dtype`."""
        out = self._empty((token_ids.shape[0], table.shape[1]), self.activation_dtype)
        self.executor.embed(token_ids, table, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        out = self._empty(x.shape, x.dtype)
        self.executor.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        out, total = self._empty(x.shape, x.dtype), self._empty(x.shape, x.dtype)
        self.executor.add_rms_norm(x, residual, weight, eps, out, total)
        return out, total

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """See `Kernels.linear`; `weight` must come from this class's `prepare_linear`."""
        return self._linear(x, weight, None)

    def written_linear(self, x: Tensor, weight: LinearWeight, slots: Tensor) -> Tensor:
        """See `Kernels.written_linear`; products that are not int8 leave such rows out."""
        return self._linear(x, weight, slots)

    def _linear(self, x: Tensor, weight: LinearWeight, slots: Tensor | None) -> Tensor:
        if not isinstance(weight, NativeLinearWeight):
            raise TypeError("the weight was not prepared by NativeKernels.prepare_linear")
        out = self._empty((x.shape[0], weight.out_features), x.dtype)
        self.executor.linear(x, weight.packed, out, slots)
        return out

    def rotary(self, x: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
        """See `Kernels.rotary`."""
        out = self._empty(x.shape, x.dtype)
        self.executor.rotary(x, None, 0.0, positions, table.cos, table.sin, out)
        return out

    def kv_write(self, keys: Tensor, values: Tensor, cache: KVCache, slots: Tensor) -> None:
        """See `Kernels.kv_write`; values are rounded to the cache's dtype."""
        self.executor.kv_write(keys, values, cache.keys, cache.values, slots)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: LinearWeight
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.norm_linear`; bit for bit what the single operations give."""
        if not isinstance(weight, NativeLinearWeight) or weight.form != "int8":
            return super().norm_linear(x, residual, norm, eps, weight)
        out = self._empty((x.shape[0], weight.out_features), x.dtype)
        total = None if residual is None else self._empty(x.shape, x.dtype)
        self.executor.norm_linear(x, residual, norm, eps, weight.packed, out, total)
        return out, x if total is None else total

    def silu_mul_linear(self, gate_up: Tensor, weight: LinearWeight) -> Tensor:
        """See `Kernels.silu_mul_linear`; bit for bit what the single operations give."""
        if not isinstance(weight, NativeLinearWeight) or weight.form != "int8":
            return super().silu_mul_linear(gate_up, weight)
        out = self._empty((gate_up.shape[0], weight.out_features), gate_up.dtype)
        self.executor.silu_linear(gate_up, weight.packed, out)
        return out

    def norm_rotary(self, x: Tensor, norm: Tensor, eps: float, positions: Tensor, table: RotaryTable) -> Tensor:
        """See `Kernels.norm_rotary`."""
        out = self._empty(x.shape, x.dtype)
        self.executor.rotary(x, norm, eps, positions, table.cos, table.sin, out)
        return out

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
        """See `Kernels.rotary_kv_write`."""
        heads = qkv.shape[1] - 2 * cache.keys.shape[2]
        queries = self._empty((qkv.shape[0], heads, qkv.shape[2]), qkv.dtype)
        self.executor.rotary_write(
            qkv, query_norm, key_norm, eps, positions, table.cos, table.sin, cache.keys, cache.values, slots, queries
        )
        return queries

    def paged_attention(
        self,
        queries: Tensor,
        cache: KVCache,
        rows: AttentionRows,
        scale: float,
        sliding_window: int | None = None,
        following: Sequence[LinearWeight] = (),
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        out = self._empty(queries.shape, queries.dtype)
        self.executor.paged_attention(
            queries,
            cache.keys,
            cache.values,
            rows.positions,
            rows.row_starts,
            rows.block_tables,
            rows.max_rows,
            rows.max_length,
            scale,
            sliding_window or 0,
            out,
            [weight.packed for weight in following if isinstance(weight, NativeLinearWeight)],
        )
        return out

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
        """See `Kernels.block_attention`; `max_length` is not needed, lengths are read where they lie."""
        del max_length
        out = self._empty(queries.shape, queries.dtype)
        self.executor.block_attention(
            queries,
            keys,
            values,
            cache.keys,
            cache.values,
            context_lengths,
            block_tables,
            scale,
            sliding_window or 0,
            causal,
            out,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        out = self._empty((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        self.executor.silu_mul(gate_up, out)
        return out

    def concat(self, tensors: Sequence[Tensor]) -> Tensor:
        """See `Kernels.concat`."""
        widths = [tensor.shape[-1] for tensor in tensors]
        out = self._empty((*tensors[0].shape[:-1], sum(widths)), tensors[0].dtype)
        start = 0
        for tensor, width in zip(tensors, widths, strict=True):
            self.executor.convert(tensor, out[..., start : start + width])
            start += width
        return out

    def to_float32(self, x: Tensor) -> Tensor:
        """See `Kernels.to_float32`."""
        if x.dtype == torch.float32:
            return x
        out = self._empty(x.shape, torch.float32)
        self.executor.convert(x, out)
        return out

    def draft_inputs(
        self, anchors: Tensor, context_lengths: Tensor, block_rows: int, mask_token_id: int
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.draft_inputs`."""
        rows = anchors.shape[0] * block_rows
        token_ids, positions = self._empty((rows,), torch.int64), self._empty((rows,), torch.int64)
        self.executor.draft_blocks(anchors, context_lengths, block_rows, mask_token_id, token_ids, positions)
        return token_ids, positions

    def step_rows(
        self, context_lengths: Tensor, block_tables: Tensor, steps: int, block_size: int, max_length: int
    ) -> StepRows:
        """See `Kernels.step_rows`."""
        sequences = context_lengths.shape[0]
        sources = self._empty((sequences,), torch.int64)
        positions, slots = self._empty((steps, sequences), torch.int64), self._empty((steps, sequences), torch.int64)
        self.executor.step_rows(context_lengths, block_tables, block_size, max_length, sources, positions, slots)
        return StepRows(sources, positions, slots)

    def draft_pick(self, logits: Tensor, target_ids: Tensor | None, token_ids: Tensor, scores: Tensor) -> None:
        """See `Kernels.draft_pick`."""
        self.executor.draft_pick(logits, None, target_ids, token_ids, scores)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Kernels.empty`."""
        del device
        return self._empty(shape, dtype)

    def draft_step(
        self, base_logits: Tensor, hidden: Tensor, previous: Tensor, state: Tensor | None, heads: DraftHeads
    ) -> DraftStep:
        """See `Kernels.draft_step`."""
        step = self._head_step(hidden, previous, state, heads)
        if step.bias is None:
            return DraftStep(base_logits, None, step.confidences)
        logits = self._empty(base_logits.shape, torch.float32)
        self.executor.add_logits(base_logits, step.bias, logits)
        return DraftStep(logits, step.state, step.confidences)

    def draft_chain(
        self, base_logits: Tensor, hidden: Tensor, anchors: Tensor, heads: DraftHeads, lead_rows: int = 0
    ) -> DraftChain:
        """See `Kernels.draft_chain`; bit for bit what `draft_step` with the largest logit gives."""
        sequences, block_rows, _ = base_logits.shape
        steps = block_rows - lead_rows
        token_ids = self._empty((steps, sequences), torch.int64)
        scores = self._empty((steps, sequences), torch.float32)
        confidences = self._empty((steps, sequences), torch.float32) if heads.has_confidences else None
        chain = DraftChain(token_ids, scores, confidences)
        # In bfloat16 a step's bias is rounded before it is added.
        if heads.head_type == "vanilla" and self.activation_dtype == hidden.dtype == torch.float32:
            self._vanilla_chain(base_logits, hidden, anchors, heads, lead_rows, chain)
        else:
            self._chain_by_steps(base_logits, hidden, anchors, heads, lead_rows, chain)
        return DraftChain(token_ids.t(), scores.t(), None if confidences is None else confidences.t())

    def _vanilla_chain(
        self, base_logits: Tensor, hidden: Tensor, anchors: Tensor, heads: DraftHeads, lead_rows: int, out: DraftChain
    ) -> None:
        """Fill `out` `[steps, sequences]` by the kernel of the whole chain."""
        assert heads.w1 is not None
        assert isinstance(heads.w2, NativeLinearWeight)
        weights = biases = None
        if out.confidences is not None:
            weights, biases = heads.confidence_places()
        self.executor.markov_chain(
            base_logits,
            hidden,
            anchors,
            lead_rows,
            heads.w1,
            heads.w2.packed,
            heads.target_ids,
            weights,
            biases,
            *out,
        )

    def _chain_by_steps(
        self, base_logits: Tensor, hidden: Tensor, anchors: Tensor, heads: DraftHeads, lead_rows: int, out: DraftChain
    ) -> None:
        """Fill `out` `[steps, sequences]` step by step, each some operations."""
        state: Tensor | None = None
        if heads.head_type == "rnn":
            for row in range(lead_rows):
                _, _, state = self._latent(hidden[:, row], anchors, state, heads)
        previous = anchors
        for number in range(base_logits.shape[1] - lead_rows):
            row = lead_rows + number
            confidences = None if out.confidences is None else out.confidences[number]
            step = self._head_step(hidden[:, row], previous, state, heads.at(number), confidences)
            state = step.state
            self.executor.draft_pick(
                base_logits[:, row], step.bias, heads.target_ids, out.token_ids[number], out.scores[number]
            )
            previous = out.token_ids[number]

    def _head_step(
        self,
        hidden: Tensor,
        previous: Tensor,
        state: Tensor | None,
        heads: DraftHeads,
        confidences: Tensor | None = None,
    ) -> "_HeadStep":
        """What the heads add to a row's logits; confidences go to `confidences` where it is given."""
        embedded = bias = None
        if heads.w1 is not None and heads.w2 is not None:
            latent, embedded, state = self._latent(hidden, previous, state, heads)
            bias = self.to_float32(self.linear(latent, heads.w2))
        weight, offset = heads.confidence_weight, heads.confidence_bias
        if weight is not None and offset is not None:
            if confidences is None:
                confidences = self._empty((hidden.shape[0],), torch.float32)
            read = embedded if weight.shape[0] > hidden.shape[-1] else None
            self.executor.confidence(hidden, read, weight, offset, confidences)
        return _HeadStep(bias, state, confidences)

    def _latent(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None, heads: DraftHeads
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `w2` multiplies, the embedding of the token before, and the next state."""
        assert heads.w1 is not None
        embedded = self.embed(previous, heads.w1)
        if heads.head_type == "vanilla":
            return embedded, embedded, None
        if heads.projection is None:
            raise ValueError(f"a {heads.head_type} head needs a projection")
        latent = self._empty(embedded.shape, embedded.dtype)
        if heads.head_type == "gated":
            self.executor.gated_head(self.linear(self.concat((hidden, embedded)), heads.projection), embedded, latent)
            return latent, embedded, None
        if state is None:
            state = self._empty(embedded.shape, embedded.dtype)
            self.executor.zero(state)
        projected = self.linear(self.concat((state, embedded, hidden)), heads.projection)
        following = self._empty(embedded.shape, embedded.dtype)
        self.executor.recurrent_head(projected, state, latent, following)
        return latent, embedded, following

    def draw_tokens(
        self,
        logits: Tensor,
        temperatures: Tensor,
        log_min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        scores: Tensor,
    ) -> None:
        """A token of each row, drawn by the random number of its sequence's seed and its position.

        What it is drawn from is `rounds.logits.probabilities`; random numbers are `rounds.random.uniform`'s.

        Args:
            logits: float32 `[sequences * W, vocab]`.
            temperatures: float32 `[sequences]`; 0 takes the largest logit, the first of equals.
            log_min_p: float32 `[sequences]`, least scaled logit that stays, the largest being 0; -inf keeps all.
            top_k: int64 `[sequences]`; 0 keeps all.
            top_p: float64 `[sequences]`; 1 keeps all.
            seeds: int64 `[sequences]`.
            positions: int64 `[sequences]`, of each sequence's first row: its token will be at the next.
            token_ids: int64 `[sequences * W]`, filled.
            scores: float32 `[sequences * W]`, filled with the largest logits; NaN where any of the row is NaN.
        """
        self.executor.draw_tokens(logits, temperatures, log_min_p, top_k, top_p, seeds, positions, token_ids, scores)

    def begin_round(self, *tensors: Tensor) -> None:
        """See `Kernels.begin_round`."""
        self.executor.begin_round(*tensors)

    def verify_rows(self, *operands: Any) -> None:
        """See `Kernels.verify_rows`."""
        self.executor.verify_rows(*operands)

    def settle_round(self, *operands: Any) -> None:
        """See `Kernels.settle_round`."""
        self.executor.settle_round(*operands)

    def look_up(
        self,
        texts: Tensor,
        text_rows: Tensor,
        positions: Tensor,
        draft_ids: Tensor,
        lengths: tuple[int, int],
        out: Tensor,
    ) -> None:
        """See `Kernels.look_up`."""
        self.executor.look_up(texts, text_rows, positions, draft_ids, *lengths, out)

    def remember(self, texts: Tensor, text_rows: Tensor, positions: Tensor, results: Tensor) -> None:
        """See `Kernels.remember`."""
        self.executor.remember(texts, text_rows, positions, results)

    def hand_off(
        self, next_anchors: Tensor, next_positions: Tensor, state_anchors: Tensor, state_positions: Tensor
    ) -> None:
        """See `Kernels.hand_off`."""
        self.executor.hand_off(next_anchors, next_positions, state_anchors, state_positions)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result; during a capture from the graph's arena."""
        if self.executor.capturing:
            return self.executor.empty(list(shape), _DTYPE_NAMES[dtype])
        return torch.empty(tuple(shape), dtype=dtype)

    def argmax(self, x: Tensor) -> Tensor:
        """Place of the largest of each row of `x` `[rows, features]`, the first of equals: int64 `[rows]`.

        A NaN counts as larger than every number, as in torch.
        """
        out = self._empty((x.shape[0],), torch.int64)
        self.executor.argmax(x, out)
        return out


class _HeadStep(NamedTuple):
    """Bias on the draft logits (None without a Markov head), the heads' next state, and confidences."""

    bias: Tensor | None
    state: Tensor | None
    confidences: Tensor | None


_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int8")}

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int64: "int64"}
"""What the native module calls the dtypes of results."""

_PACKED_FORMS: Mapping[torch.dtype, ValueForm] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_PACKED_BYTES: Mapping[ValueForm, int] = {"int8": 1, "bfloat16": 2, "float32": 4}
