"""Rows of several sequences laid out for one forward pass."""

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

import torch

from sparkgap.models.batch import ForwardBatch
from sparkgap.ops.kernels import AttentionRows
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


def forward_batch(spans: Seq[RowSpan], block_size: int, device: torch.device) -> ForwardBatch:
    """A pass over `spans`, each of a different sequence and with at least one row.

    A sequence's blocks must reach its span's last position.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    tables: list[list[int]] = []
    width = max(-(-span.end // block_size) for span in spans)
    for span in spans:
        table = span.sequence.block_table
        token_ids += span.token_ids
        positions += range(span.start, span.end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(span.start, span.end)]
        tables.append((table + table[:1] * (width - len(table)))[:width])
    attention = AttentionRows(
        positions=torch.tensor(positions, device=device),
        row_starts=torch.tensor(
            list(accumulate((len(span.token_ids) for span in spans), initial=0)), dtype=torch.int32, device=device
        ),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        max_rows=max(len(span.token_ids) for span in spans),
        max_length=max(span.end for span in spans),
    )
    return ForwardBatch(torch.tensor(token_ids, device=device), torch.tensor(slots, device=device), attention)
