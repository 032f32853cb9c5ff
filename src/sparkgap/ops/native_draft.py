"""Drafts as native operations."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparkgap.ops.draft import DraftChain, DraftHeads, DraftStep, StepRows
from sparkgap.ops.draft_kernels import DraftKernels
from sparkgap.ops.native_network import NativeNetworkKernels
from sparkgap.ops.native_weights import NativeLinearWeight


class NativeDraftKernels(NativeNetworkKernels, DraftKernels):
    """`DraftKernels` as native operations."""

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


class _HeadStep(NamedTuple):
    """Bias on the draft logits (None without a Markov head), the heads' next state, and confidences."""

    bias: Tensor | None
    state: Tensor | None
    confidences: Tensor | None
