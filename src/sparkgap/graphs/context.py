"""Graphs of the context update, in the two ways that a round can leave out rejected rows."""

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from sparkgap.graphs.family import GraphFamily, next_bucket, row_buckets
from sparkgap.graphs.inputs import ContextInputs
from sparkgap.graphs.passes import DraftModel


class ContextGraphs(Protocol):
    """Context updates as replays."""

    @property
    def nbytes(self) -> int:
        """Memory of the graphs' inputs."""
        ...

    def capture(self, captured: Seq[Tensor]) -> None:
        """Capture every graph and replay the smallest, which writes nothing.

        Args:
            captured: `[rows, m * hidden_size]` of each target graph, where it leaves them.
        """
        ...

    def update(
        self, captured: Tensor, positions: Tensor, slots: Tensor, following: Tensor, is_round: bool = True
    ) -> None:
        """Write the drafter's context KV.

        Args:
            captured: `[padded rows, m * hidden_size]`, of a target graph.
            positions: int64 `[rows]`.
            slots: int64 `[rows]`; -1 writes nothing.
            following: int64 `[rows]`, the token after each row's.
            is_round: whether the rows are of a decode round.
        """
        ...


class MaskedContextGraphs:
    """One graph for each target graph: all its rows, read where the target leaves them, rejected ones at slot -1."""

    def __init__(self, graphs: GraphFamily[None], model: DraftModel, max_rows: int) -> None:
        self._graphs = graphs
        self._model = model
        self._inputs = ContextInputs(max_rows)

    @property
    def nbytes(self) -> int:
        """See `ContextGraphs.nbytes`."""
        return self._inputs.nbytes

    def capture(self, captured: Seq[Tensor]) -> None:
        """See `ContextGraphs.capture`."""
        for rows in captured:
            inputs = self._tensors(rows)
            # N + 1 sequences of 1 row and 1 sequence of N + 1 rows may leave their rows at the same place.
            if inputs not in self._graphs:
                _capture(self._graphs, self._model, inputs)
        self._graphs.replay(self._tensors(min(captured, key=len)))

    def update(
        self, captured: Tensor, positions: Tensor, slots: Tensor, following: Tensor, is_round: bool = True
    ) -> None:
        """See `ContextGraphs.update`."""
        self._inputs.load(positions, slots, following, captured.shape[0])
        self._graphs.replay(self._tensors(captured), is_round)

    def _tensors(self, captured: Tensor) -> dict[str, Tensor]:
        return {"captured": captured, **self._inputs.tensors(captured.shape[0])}


class CompactContextGraphs:
    """One graph for each number of accepted rows (`family.row_buckets`): the host copies these rows together first.

    Rows of several sequences lie one behind the other, so that a graph serves any number of them. Between two buckets
    rows are padded at slot -1.
    """

    def __init__(self, graphs: GraphFamily[None], model: DraftModel, max_rows: int) -> None:
        self._graphs = graphs
        self._model = model
        self._buckets = row_buckets(max_rows, model.num_speculative_tokens + 1)
        self._inputs = ContextInputs(max_rows)
        self._captured = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """See `ContextGraphs.nbytes`."""
        return self._inputs.nbytes + self._captured.nbytes

    def capture(self, captured: Seq[Tensor]) -> None:
        """See `ContextGraphs.capture`."""
        like = captured[0]
        self._captured = torch.zeros(self._buckets[-1], like.shape[1], dtype=like.dtype)
        for rows in reversed(self._buckets):
            _capture(self._graphs, self._model, self._tensors(rows))
        self._graphs.replay(self._tensors(self._buckets[0]))

    def update(
        self, captured: Tensor, positions: Tensor, slots: Tensor, following: Tensor, is_round: bool = True
    ) -> None:
        """See `ContextGraphs.update`. Without an accepted row there is nothing to replay."""
        accepted = slots.ge(0).nonzero().view(-1)
        rows = len(accepted)
        if not rows:
            return
        bucket = next_bucket(self._buckets, rows)
        assert bucket is not None, "no more rows than the target's largest graph has"
        torch.index_select(captured, 0, accepted, out=self._captured[:rows])
        self._inputs.select(positions, slots, following, accepted, bucket)
        self._graphs.replay(self._tensors(bucket), is_round)

    def _tensors(self, rows: int) -> dict[str, Tensor]:
        return {"captured": self._captured[:rows], **self._inputs.tensors(rows)}


def _capture(graphs: GraphFamily[None], model: DraftModel, inputs: dict[str, Tensor]) -> None:
    graphs.capture(inputs, lambda: model.drafter.context_update(**inputs, caches=model.caches))


CONTEXT_GRAPHS: dict[str, type[MaskedContextGraphs] | type[CompactContextGraphs]] = {
    "masked": MaskedContextGraphs,
    "compact": CompactContextGraphs,
}
"""By the name of the setting."""
