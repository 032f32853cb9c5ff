"""The passes of a round as replays of graphs that are all captured at startup."""

import time
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from sparkgap import _native
from sparkgap.graphs.context import CONTEXT_GRAPHS, ContextGraphs
from sparkgap.graphs.counters import Family, GraphCounters
from sparkgap.graphs.family import GraphFamily, buckets_up_to, next_bucket
from sparkgap.graphs.inputs import DraftInputs, TargetInputs
from sparkgap.graphs.passes import DraftModel, Passes, TargetOutput
from sparkgap.models.batch import ForwardBatch
from sparkgap.models.heads import Proposal
from sparkgap.models.interfaces import Draft, Target
from sparkgap.ops.operands import KVCache

TOO_MANY_SEQUENCES = "more sequences than the largest graph"
"""Reason for an eager pass: no graph has so many sequences."""


CHUNK_ROWS = (*range(4, 33, 4), 40, 48, 56, 64)
"""Rows of the graphs for a chunk of one prompt, which is padded to the next.

Prompts beside decodes are read in such chunks, and an eager pass over so few rows takes half as long again on the host.
"""


class _TargetResults(NamedTuple):
    hidden: Tensor
    logits: Tensor | None
    captured: Tensor | None


class CapturedPasses(Passes):
    """Passes replayed from graphs; those over longer chunks of prompts, and out of the graphs' capacity, run eagerly.

    Target graphs exist for 1 row of each sequence and, with a drafter, for N + 1 and for one row more than each of
    `verified_lengths`; draft graphs for the block's rows. Each kind has a graph for every number of sequences in
    `buckets`. Chunks of one prompt have target graphs without logits, of `CHUNK_ROWS` rows. What context graphs there
    are, `context_graph` says.

    Args:
        target, caches, draft: as `Passes`; computed by native kernels.
        executor: of those kernels.
        max_sequences: most sequences decoded together.
        max_model_len: most positions of a sequence.
        sampled_drafts: whether drafts are sampled, of which graphs compute what needs no token of the draft.
        verified_lengths: numbers of draft tokens that are verified besides the drafter's N, none of them larger.
        context_graph: `masked` or `compact` (`graphs.context`), or `off` to update contexts eagerly.

    Attributes:
        buckets: numbers of sequences that there are graphs for, smallest first.
        context_graph: as given; None without a drafter.
        counters: of captures, replays and eager passes.
    """

    def __init__(
        self,
        target: Target,
        caches: Seq[KVCache],
        draft: DraftModel | None = None,
        *,
        executor: _native.Executor,
        max_sequences: int,
        max_model_len: int,
        sampled_drafts: bool = False,
        verified_lengths: Seq[int] = (),
        context_graph: str = "masked",
    ) -> None:
        super().__init__(target, caches, draft)
        started = time.perf_counter()
        self.buckets = buckets_up_to(max_sequences)
        self.context_graph = None if draft is None else context_graph
        self.counters = GraphCounters()
        self._executor = executor
        self._target_graphs: GraphFamily[_TargetResults] = GraphFamily("target", executor, self.counters)
        self._draft_graphs: GraphFamily[Proposal] = GraphFamily("draft", executor, self.counters)
        self._draft_begin_graphs: GraphFamily[Draft] = GraphFamily("draft", executor, self.counters)
        self._context_graphs: GraphFamily[None] = GraphFamily("context", executor, self.counters)
        drafts = (*(() if draft is None else (draft.num_speculative_tokens,)), *verified_lengths)
        widths = (*(length + 1 for length in drafts), 1)
        largest, max_blocks = self.buckets[-1], -(-max_model_len // caches[0].block_size)
        self._target_inputs = {width: TargetInputs(largest, width, max_blocks, max_model_len) for width in widths}
        self._chunk_inputs = {rows: TargetInputs(1, rows, max_blocks, max_model_len) for rows in CHUNK_ROWS}
        self._draft_inputs = DraftInputs(largest, max_blocks)
        self._context: ContextGraphs | None = None
        if draft is not None and context_graph != "off":
            most_rows = max(largest * widths[0], CHUNK_ROWS[-1])
            self._context = CONTEXT_GRAPHS[context_graph](self._context_graphs, draft, most_rows)
        with torch.inference_mode():
            self._capture(sampled_drafts)
        families = (self._target_graphs, self._draft_graphs, self._draft_begin_graphs, self._context_graphs)
        for family in families:
            family.close()
        input_bytes = sum(i.nbytes for i in (*self._target_inputs.values(), *self._chunk_inputs.values()))
        if draft is not None:
            input_bytes += self._draft_inputs.nbytes
        if self._context is not None:
            input_bytes += self._context.nbytes
        self.counters.capture_ms = (time.perf_counter() - started) * 1000
        self.counters.memory_bytes = sum(family.nbytes for family in families) + input_bytes
        self._captures_at_close = executor.captures

    def end_startup(self) -> None:
        """Count what was captured up to now, by whomever, as captured at startup."""
        self._captures_at_close = self._executor.captures

    def report(self) -> GraphCounters:
        """The counters as they are now."""
        self.counters.captures_since_startup = self._executor.captures - self._captures_at_close
        return self.counters

    def prefill(self, batch: ForwardBatch) -> TargetOutput:
        """See `Passes.prefill`. Of a replay the output holds until the next pass of the target."""
        rows = batch.token_ids.shape[0]
        padded = next_bucket(CHUNK_ROWS, rows)
        if batch.attention.block_tables.shape[0] > 1 or padded is None:
            return super().prefill(batch)
        inputs = self._chunk_inputs[padded]
        inputs.load_chunk(batch)
        results = self._target_graphs.replay(named_inputs(inputs.batch(1)), is_round=False)
        captured = None if results.captured is None else results.captured[:rows]
        return TargetOutput(results.hidden[:rows], None, captured, results.captured)

    def decode(self, batch: ForwardBatch) -> TargetOutput:
        """See `Passes.decode`."""
        sequences, rows = batch.attention.block_tables.shape[0], batch.token_ids.shape[0]
        bucket = self._bucket(sequences)
        if bucket is None:
            self._count_eager("target")
            output = super().decode(batch)
            return TargetOutput(output.hidden, output.logits, output.captured, eager_reason=TOO_MANY_SEQUENCES)
        inputs = self._target_inputs[rows // sequences]
        inputs.load(batch, bucket)
        results = self._target_graphs.replay(named_inputs(inputs.batch(bucket)))
        captured = None if results.captured is None else results.captured[:rows]
        assert results.logits is not None
        return TargetOutput(results.hidden[:rows], results.logits[:rows], captured, results.captured)

    def draft(self, anchors: Tensor, context_lengths: Tensor, block_tables: Tensor, max_length: int) -> Draft:
        """See `Passes.draft`."""
        sequences = anchors.shape[0]
        bucket = self._bucket(sequences)
        if bucket is None:
            self._count_eager("draft")
            return super().draft(anchors, context_lengths, block_tables, max_length)
        self._draft_inputs.load(anchors, context_lengths, block_tables, bucket)
        return self._draft_begin_graphs.replay(self._draft_inputs.tensors(bucket)).first(sequences)

    def propose(self, anchors: Tensor, context_lengths: Tensor, block_tables: Tensor, max_length: int) -> Proposal:
        """See `Passes.propose`."""
        sequences = anchors.shape[0]
        bucket = self._bucket(sequences)
        if bucket is None:
            self._count_eager("draft")
            return super().propose(anchors, context_lengths, block_tables, max_length)
        self._draft_inputs.load(anchors, context_lengths, block_tables, bucket)
        proposal = self._draft_graphs.replay(self._draft_inputs.tensors(bucket))
        confidences = None if proposal.confidences is None else proposal.confidences[:sequences]
        return Proposal(proposal.token_ids[:sequences], proposal.scores[:sequences], confidences, None)

    def update_context(self, output: TargetOutput, positions: Tensor, slots: Tensor, following: Tensor) -> None:
        """See `Passes.update_context`."""
        if self._context is None or output.graph_captured is None:
            if self._context is not None and output.eager_reason is not None:
                self._count_eager("context")
            super().update_context(output, positions, slots, following)
        else:
            self._context.update(output.graph_captured, positions, slots, following, is_round=output.logits is not None)

    def _capture(self, sampled_drafts: bool) -> None:
        """Capture every graph, largest first, so that the smaller ones fit in its memory; then try the smallest."""
        captured = [self._capture_target(inputs.batch(1), False) for inputs in reversed(self._chunk_inputs.values())]
        for bucket in reversed(self.buckets):
            captured += [self._capture_target(inputs.batch(bucket), True) for inputs in self._target_inputs.values()]
            if self.drafting is not None:
                self._capture_draft(bucket, sampled_drafts)
        # Every input says "write nothing" until it is first loaded.
        smallest = self.buckets[0]
        for inputs in self._target_inputs.values():
            self._target_graphs.replay(named_inputs(inputs.batch(smallest)))
        if self.drafting is not None:
            self._draft_graphs.replay(self._draft_inputs.tensors(smallest))
            if sampled_drafts:
                self._draft_begin_graphs.replay(self._draft_inputs.tensors(smallest))
        if self._context is not None:
            self._context.capture([rows for rows in captured if rows is not None])
        self.counters.replays.clear()

    def _capture_target(self, batch: ForwardBatch, with_logits: bool) -> Tensor | None:
        def compute() -> _TargetResults:
            result = self.target.forward(batch, self.caches, self.captured_layers)
            logits = self.target.logits(result.hidden) if with_logits else None
            return _TargetResults(result.hidden, logits, result.captured)

        return self._target_graphs.capture(named_inputs(batch), compute).captured

    def _capture_draft(self, bucket: int, sampled_drafts: bool) -> None:
        tensors = self._draft_inputs.tensors(bucket)

        def draft() -> Draft:
            return Passes.draft(self, **tensors, max_length=0)

        self._draft_graphs.capture(tensors, lambda: self._draft_model.drafter.propose(tensors["anchors"], draft()))
        if sampled_drafts:
            self._draft_begin_graphs.capture(tensors, draft)

    def _bucket(self, sequences: int) -> int | None:
        """The smallest number of sequences that a graph has and `sequences` fit in; None beyond the largest."""
        return next_bucket(self.buckets, sequences)

    def _count_eager(self, family: Family) -> None:
        self.counters.eager[family, TOO_MANY_SEQUENCES] += 1


def named_inputs(batch: ForwardBatch) -> dict[str, Tensor]:
    """A target pass's inputs by name."""
    attention = batch.attention
    return {
        "token_ids": batch.token_ids,
        "slots": batch.slots,
        "positions": attention.positions,
        "row_starts": attention.row_starts,
        "block_tables": attention.block_tables,
    }
