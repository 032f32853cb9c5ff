"""Rows of several sequences laid out for one forward pass."""

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

import torch

from sparkgap.models.batch import ForwardBatch
from sparkgap.ops.operands import AttentionRows
from sparkgap.rounds.sequence import Sequence


class RowSpan(NamedTuple):
    """Consecutive rows of one sequence: `token_ids` at positions `start`, `start + 1`, ...

    The tokens need not be the sequence's own: verification lays out draft tokens.
    """

    sequence: Sequence
    start: int
    token_ids: Seq[int]

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + len(self.token_ids)


def forward_batch(
    spans: Seq[RowSpan], block_size: int, device: torch.device, max_model_len: int | None = None
) -> ForwardBatch:
    """A pass over `spans`, each of a different sequence and with at least one row.

    A sequence's blocks must reach its span's last position, or `max_model_len`: rows from there on write no KV,
    stand at the last position, and give nothing of use.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for span in spans:
        table, end = span.sequence.block_table, span.end
        valid = end if max_model_len is None else min(end, max_model_len)
        token_ids += span.token_ids
        positions += [*range(span.start, valid), *[valid - 1] * (end - valid)]
        slots += [table[p // block_size] * block_size + p % block_size for p in range(span.start, valid)]
        slots += [-1] * (end - valid)
    max_length = max(positions) + 1
    starts = list(accumulate((len(span.token_ids) for span in spans), initial=0))
    attention = AttentionRows(
        positions=torch.tensor(positions, device=device),
        row_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        block_tables=block_tables([span.sequence.block_table for span in spans], max_length, block_size, device),
        max_rows=max(len(span.token_ids) for span in spans),
        max_length=max_length,
    )
    return ForwardBatch(torch.tensor(token_ids, device=device), torch.tensor(slots, device=device), attention)


def block_tables(tables: Seq[list[int]], max_length: int, block_size: int, device: torch.device) -> torch.Tensor:
    """Tables side by side, int32 `[sequences, blocks of max_length]`; unused entries repeat the first block."""
    width = max(-(-max_length // block_size), 1)
    rows = [(table + table[:1] * (width - len(table)))[:width] for table in tables]
    return torch.tensor(rows, dtype=torch.int32, device=device)
