"""A Slot: the fixed tensors of one round in flight, and what outlives a round."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparkgap.models.batch import ForwardBatch
from sparkgap.ops.operands import AttentionRows
from sparkgap.ops.rounds import RoundStatus
from sparkgap.rounds.drawing import SamplingNumbers, as_int64
from sparkgap.rounds.sequence import Sequence

_STATUSES = tuple(RoundStatus)


@dataclass(frozen=True)
class RoundShape:
    """Sizes that all rounds of a pipeline share.

    Attributes:
        max_sequences: most sequences of a round.
        width: most rows of each sequence, N + 1.
        block_size: positions in a KV block.
        max_model_len: most positions of a sequence.
    """

    max_sequences: int
    width: int
    block_size: int
    max_model_len: int

    @property
    def max_blocks(self) -> int:
        """KV blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


class RoundState:
    """What one round leaves to the next, on the device. It belongs to no Slot: it is valid while Slots come and go.

    Attributes:
        anchors: int64 `[max_sequences]`, the last token of each row of the last round that was launched.
        positions: int64 `[max_sequences]`, their positions.
        texts: int32 `[rows, max_model_len]`, tokens by position where drafts are looked up in them, else no rows. A
            sequence keeps its row from round to round.
    """

    def __init__(self, shape: RoundShape, text_rows: int = 0) -> None:
        self.anchors = torch.zeros(shape.max_sequences, dtype=torch.int64)
        self.positions = torch.zeros(shape.max_sequences, dtype=torch.int64)
        # Not filled: memory that no text reaches is never touched.
        self.texts = torch.empty((text_rows, shape.max_model_len), dtype=torch.int32)
        self._texts: np.ndarray = self.texts.numpy()

    def write_text(self, row: int, sequence: Sequence) -> None:
        """Write all tokens of a sequence that no round in flight has."""
        self._texts[row, : sequence.num_tokens] = sequence.token_ids(0, sequence.num_tokens)


class SequenceResult(NamedTuple):
    """What one round gave one sequence.

    Attributes:
        num_accepted: draft tokens that the target takes too.
        status: whether the logits were numbers.
        token_ids: the accepted draft tokens and the target's own, in order.
        num_draft_tokens: draft tokens that were verified.
        has_drafts: whether there were any to verify.
    """

    num_accepted: int
    status: RoundStatus
    token_ids: list[int]
    num_draft_tokens: int
    has_drafts: bool


class SamplingTensors:
    """How each sequence of a round draws its tokens, see `NativeKernels.draw_tokens`."""

    def __init__(self, max_sequences: int) -> None:
        self.temperatures = torch.zeros(max_sequences)
        self.log_min_p = torch.zeros(max_sequences)
        self.top_k = torch.zeros(max_sequences, dtype=torch.int64)
        self.top_p = torch.ones(max_sequences, dtype=torch.float64)
        self.seeds = torch.zeros(max_sequences, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.nbytes for tensor in vars(self).values())

    def stage(self, row: int, sequence: Sequence) -> None:
        """Write what one sequence's parameters say."""
        numbers = SamplingNumbers.of(sequence.params)
        self.temperatures[row] = numbers.temperature
        self.log_min_p[row] = numbers.log_min_p
        self.top_k[row] = numbers.top_k
        self.top_p[row] = numbers.top_p
        self.seeds[row] = as_int64(sequence.seed)

    def clear(self, row: int) -> None:
        """A row that only pads takes the largest logit."""
        self.temperatures[row] = 0.0


class Slot:
    """Tensors that a round's graphs are bound to, for as long as the pipeline lives.

    The host writes what a round is staged with while no launch uses the Slot; everything else is the device's.

    Attributes:
        sources: int32 `[max_sequences]`, row of the state that each sequence goes on from; -1 for what is staged.
        staged_anchors, staged_positions: int64 `[max_sequences]`, where sequences that join begin.
        block_tables: int32 `[max_sequences, max_blocks]`.
        text_rows: int32 `[max_sequences]`, row of each sequence's text; -1 where it only pads, or nothing is looked up.
        runs: int32 `[max_sequences]`, last tokens that stood before where drafts were looked up, else 0.
        wants_draft: int64 `[1]`, 0 where the drafts of all sequences were looked up, so that the round had no draft.
        choice: int64 `[1]`, index of the round's width where the device chooses it.
        num_blocks: int32 `[max_sequences]`, entries of each table that hold; 0 where a row only pads.
        anchors, positions: int64 `[max_sequences]`, where the round begins.
        drafts: int64 `[max_sequences, N]`, draft tokens, looked up or proposed.
        token_ids, row_positions, slots: int64 `[max_sequences * W]`, the rows to verify.
        context_positions, context_slots: int64 `[max_sequences * W]`, the same without rejected rows.
        sampling: how tokens are drawn.
        picks, scores: int64 and float32 `[max_sequences * W]`, the target's token of each row and its logit.
        next_anchors, next_positions: int64 `[max_sequences]`, where the round ends.
        results: int64 `[max_sequences * (W + 2)]`, see `results_of`.
    """

    def __init__(self, shape: RoundShape) -> None:
        self.shape = shape
        sequences, rows = shape.max_sequences, shape.max_sequences * shape.width
        self.sources = torch.full((sequences,), -1, dtype=torch.int32)
        self.staged_anchors = torch.zeros(sequences, dtype=torch.int64)
        self.staged_positions = torch.zeros(sequences, dtype=torch.int64)
        self.block_tables = torch.zeros((sequences, shape.max_blocks), dtype=torch.int32)
        self.num_blocks = torch.zeros(sequences, dtype=torch.int32)
        self.text_rows = torch.full((sequences,), -1, dtype=torch.int32)
        self.anchors = torch.zeros(sequences, dtype=torch.int64)
        self.positions = torch.zeros(sequences, dtype=torch.int64)
        self.drafts = torch.zeros((sequences, shape.width - 1), dtype=torch.int64)
        self.token_ids = torch.zeros(rows, dtype=torch.int64)
        self.row_positions = torch.zeros(rows, dtype=torch.int64)
        self.slots = torch.full((rows,), -1)
        self.context_positions = torch.zeros(rows, dtype=torch.int64)
        self.context_slots = torch.full((rows,), -1)
        self.sampling = SamplingTensors(sequences)
        self.picks = torch.zeros(rows, dtype=torch.int64)
        self.scores = torch.zeros(rows)
        self.next_anchors = torch.zeros(sequences, dtype=torch.int64)
        self.next_positions = torch.zeros(sequences, dtype=torch.int64)
        self.results = torch.zeros(sequences * (shape.width + 2), dtype=torch.int64)
        self.runs = torch.zeros(sequences, dtype=torch.int32)
        self.choice = torch.zeros(1, dtype=torch.int64)
        self.wants_draft = torch.ones(1, dtype=torch.int64)
        self._row_starts = {
            width: torch.arange(0, sequences * width + 1, width, dtype=torch.int32)
            for width in range(1, shape.width + 1)
        }
        self._owners: list[Sequence | None] = [None] * sequences
        # The same memory as arrays, in which a number is written in a tenth of the time.
        self._sources: np.ndarray = self.sources.numpy()
        self._staged_anchors: np.ndarray = self.staged_anchors.numpy()
        self._staged_positions: np.ndarray = self.staged_positions.numpy()
        self._block_tables: np.ndarray = self.block_tables.numpy()
        self._num_blocks: np.ndarray = self.num_blocks.numpy()
        self._text_rows: np.ndarray = self.text_rows.numpy()
        self._results = self.results.numpy().data
        self._runs = self.runs.numpy().data
        self._choice = self.choice.numpy().data
        self._wants_draft = self.wants_draft.numpy().data

    @property
    def nbytes(self) -> int:
        """Memory of all tensors."""
        tensors = sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))
        return tensors + self.sampling.nbytes

    @property
    def has_drafted(self) -> bool:
        """Whether the last round, if it was one that drafts, needed the drafter."""
        return bool(self._wants_draft[0])

    def results_of(self, sequences: int, width: int) -> Tensor:
        """Where a round of so many sequences, of `width` rows each, leaves its results; see `Kernels.settle_round`.

        int64 `[sequences, width + 2]`, a view.
        """
        return self.results[: sequences * (width + 2)].view(sequences, width + 2)

    def batch(self, sequences: int, width: int) -> ForwardBatch:
        """The first `sequences` sequences' rows to verify, at most `shape.width` of each, as views."""
        end = sequences * width
        attention = AttentionRows(
            self.row_positions[:end],
            self._row_starts[width][: sequences + 1],
            self.block_tables[:sequences],
            width,
            self.shape.max_model_len,
        )
        return ForwardBatch(self.token_ids[:end], self.slots[:end], attention)

    def stage(self, sequences: Seq[Sequence], sources: Seq[int], text_rows: Seq[int], padded_to: int) -> None:
        """Write a round's inputs.

        Args:
            sequences: with blocks for all positions that the round may write.
            sources: for each, its row of the state; -1 where it begins from its own tokens.
            text_rows: for each, the row of its text; -1 where nothing is looked up.
            padded_to: number of sequences of the graphs.
        """
        for row, (sequence, source, text_row) in enumerate(zip(sequences, sources, text_rows, strict=True)):
            self._sources[row] = source
            self._text_rows[row] = text_row
            if source < 0:
                self._staged_anchors[row] = sequence.output_token_ids[-1]
                self._staged_positions[row] = sequence.num_computed_tokens
            known = self._num_blocks[row] if self._owners[row] is sequence else 0
            self._owners[row] = None  # until all that is staged is the sequence's
            if not known:
                self.sampling.stage(row, sequence)
            table = sequence.block_table
            if len(table) > known:
                self._block_tables[row, known : len(table)] = table[known:]
            self._num_blocks[row] = len(table)
            self._owners[row] = sequence
        for row in range(len(sequences), padded_to):
            self._owners[row] = None
            self.sampling.clear(row)
            self._sources[row] = self._text_rows[row] = -1
            self._staged_anchors[row] = self._staged_positions[row] = self._num_blocks[row] = 0

    def forget(self, sequence: Sequence) -> None:
        """The sequence gives its blocks back: what is staged of its table holds no more."""
        for row, owner in enumerate(self._owners):
            if owner is sequence:
                self._owners[row] = None

    def read_results(self, sequences: int, widths: Seq[int], drafter: bool = True) -> list[SequenceResult]:
        """Copies of what the launch gave each of the first `sequences` sequences.

        Args:
            sequences: of the round.
            widths: rows that each may have had; of more than one, `choice` says which.
            drafter: whether one drafts for sequences whose drafts are not looked up.
        """
        width = widths[self._choice[0]] if len(widths) > 1 else widths[0]
        results = []
        for row in range(sequences):
            start = row * (width + 2)
            accepted, status, *picks = self._results[start : start + width + 2].tolist()
            drafts = widths[-1] > 1 and (drafter or self._runs[row] > 0)
            verified = width - 1 if drafts else 0
            results.append(SequenceResult(accepted, _STATUSES[status], picks[: accepted + 1], verified, drafts))
        return results
