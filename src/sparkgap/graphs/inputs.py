"""Fixed tensors that graphs read: allocated once, filled before each replay.

A batch of fewer sequences than its graph has is padded with sequences that write nothing: token 0 at position 0 and
slot -1. What they give is not looked at, and no other row depends on it.
"""

import torch
from torch import Tensor

from sparkgap.models.batch import ForwardBatch
from sparkgap.ops.operands import AttentionRows


def _fill(buffer: Tensor, values: Tensor, end: int, padding: int) -> None:
    """`values` at the start of `buffer`, and `padding` from there to `end`."""
    count = values.shape[0]
    buffer[:count].copy_(values)
    if end > count:
        buffer[count:end].fill_(padding)


class TargetInputs:
    """Inputs of target passes with the same number of rows for each sequence.

    Attributes:
        rows: of each sequence.
        max_blocks: KV blocks of the longest sequence.
    """

    def __init__(self, max_sequences: int, rows: int, max_blocks: int, max_length: int) -> None:
        self.rows = rows
        self.max_blocks = max_blocks
        self._max_length = max_length
        self._token_ids = torch.zeros(max_sequences * rows, dtype=torch.int64)
        self._positions = torch.zeros(max_sequences * rows, dtype=torch.int64)
        self._slots = torch.full((max_sequences * rows,), -1)
        self._row_starts = torch.arange(0, (max_sequences + 1) * rows, rows, dtype=torch.int32)
        self._block_tables = torch.zeros((max_sequences, max_blocks), dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        """Memory of all inputs."""
        tensors = (self._token_ids, self._positions, self._slots, self._row_starts, self._block_tables)
        return sum(tensor.nbytes for tensor in tensors)

    def batch(self, sequences: int) -> ForwardBatch:
        """The first `sequences` sequences' inputs, as views."""
        end = sequences * self.rows
        attention = AttentionRows(
            self._positions[:end],
            self._row_starts[: sequences + 1],
            self._block_tables[:sequences],
            self.rows,
            self._max_length,
        )
        return ForwardBatch(self._token_ids[:end], self._slots[:end], attention)

    def load(self, batch: ForwardBatch, sequences: int) -> None:
        """Take over a batch's content, padded to `sequences` sequences."""
        end = sequences * self.rows
        tables = batch.attention.block_tables
        _fill(self._token_ids, batch.token_ids, end, 0)
        _fill(self._positions, batch.attention.positions, end, 0)
        _fill(self._slots, batch.slots, end, -1)
        self._block_tables[: tables.shape[0], : tables.shape[1]].copy_(tables)

    def load_chunk(self, batch: ForwardBatch) -> None:
        """Take over a batch of one sequence with fewer rows: those that pad belong to none, and attend to nothing."""
        tables = batch.attention.block_tables
        _fill(self._token_ids, batch.token_ids, self.rows, 0)
        _fill(self._positions, batch.attention.positions, self.rows, 0)
        _fill(self._slots, batch.slots, self.rows, -1)
        self._row_starts[1] = batch.token_ids.shape[0]
        self._block_tables[:, : tables.shape[1]].copy_(tables)


class DraftInputs:
    """Inputs of draft passes.

    Attributes:
        max_blocks: KV blocks of the longest context.
    """

    def __init__(self, max_sequences: int, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._anchors = torch.zeros(max_sequences, dtype=torch.int64)
        self._context_lengths = torch.zeros(max_sequences, dtype=torch.int64)
        self._block_tables = torch.zeros((max_sequences, max_blocks), dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        """Memory of all inputs."""
        return self._anchors.nbytes + self._context_lengths.nbytes + self._block_tables.nbytes

    def tensors(self, sequences: int) -> dict[str, Tensor]:
        """The first `sequences` sequences' inputs, as views, by the names of `DraftNetwork.draft`."""
        return {
            "anchors": self._anchors[:sequences],
            "context_lengths": self._context_lengths[:sequences],
            "block_tables": self._block_tables[:sequences],
        }

    def load(self, anchors: Tensor, context_lengths: Tensor, block_tables: Tensor, sequences: int) -> None:
        """Take over inputs of a draft pass, padded to `sequences` sequences."""
        _fill(self._anchors, anchors, sequences, 0)
        _fill(self._context_lengths, context_lengths, sequences, 0)
        self._block_tables[: block_tables.shape[0], : block_tables.shape[1]].copy_(block_tables)


class ContextInputs:
    """Positions, slots and following tokens of context updates, all slots -1 until something is loaded."""

    def __init__(self, max_rows: int) -> None:
        self._positions = torch.zeros(max_rows, dtype=torch.int64)
        self._slots = torch.full((max_rows,), -1)
        self._following = torch.zeros(max_rows, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Memory of all inputs."""
        return self._positions.nbytes + self._slots.nbytes + self._following.nbytes

    def tensors(self, rows: int) -> dict[str, Tensor]:
        """The first `rows` rows, as views, by the names of `DraftNetwork.context_update`."""
        return {
            "positions": self._positions[:rows],
            "slots": self._slots[:rows],
            "following": self._following[:rows],
        }

    def load(self, positions: Tensor, slots: Tensor, following: Tensor, rows: int) -> None:
        """Take over positions, slots and following tokens, padded to `rows` rows."""
        _fill(self._positions, positions, rows, 0)
        _fill(self._slots, slots, rows, -1)
        _fill(self._following, following, rows, 0)

    def select(self, positions: Tensor, slots: Tensor, following: Tensor, chosen: Tensor, rows: int) -> None:
        """Take over the `chosen` rows (int64 indices) only, padded to `rows` rows."""
        count = len(chosen)
        torch.index_select(positions, 0, chosen, out=self._positions[:count])
        torch.index_select(slots, 0, chosen, out=self._slots[:count])
        torch.index_select(following, 0, chosen, out=self._following[:count])
        if rows > count:
            # Positions and tokens of padding stay what they were: valid ones of an earlier update.
            self._slots[count:rows].fill_(-1)
