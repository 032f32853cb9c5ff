"""Graphs of one family, found by what they were captured over."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from sparkgap import _native
from sparkgap.device.cpu import CaptureError, CpuGraph
from sparkgap.errors import MissingBindingError
from sparkgap.graphs.binding import Binding
from sparkgap.graphs.counters import Family, GraphCounters

Outputs = TypeVar("Outputs")

BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""Numbers of sequences that graphs are captured for. A pass is padded to the next one, so by less than a quarter."""


def buckets_up_to(max_sequences: int) -> tuple[int, ...]:
    """Numbers of sequences to capture for an engine that decodes at most `max_sequences` together, smallest first."""
    largest = min(max_sequences, BUCKETS[-1])
    return (*(bucket for bucket in BUCKETS if bucket < largest), largest)


def row_buckets(max_rows: int, rows_each: int) -> tuple[int, ...]:
    """Numbers of rows to capture for at most `max_rows` together, smallest first.

    Every number up to the `rows_each` of one sequence; beyond, four for each doubling, as in `BUCKETS`.
    """
    buckets = list(range(1, min(rows_each, max_rows) + 1))
    while buckets[-1] < max_rows:
        last = buckets[-1]
        buckets.append(min(last + max(1, 1 << last.bit_length() >> 3), max_rows))
    return tuple(buckets)


def next_bucket(buckets: Sequence[int], number: int) -> int | None:
    """The smallest of `buckets`, in rising order, that holds `number`; None beyond the largest."""
    return next((bucket for bucket in buckets if bucket >= number), None)


class GraphFamily(Generic[Outputs]):
    """Graphs that run in turn: results of a replay hold until the next replay of the same family.

    Attributes:
        name: which family.
        counters: told of captures and replays.
        arena: memory of results and of what lies between, shared by the family's graphs.
    """

    def __init__(self, name: Family, executor: _native.Executor, counters: GraphCounters) -> None:
        self.name: Family = name
        self.counters = counters
        self.arena = _native.Arena()
        self._executor = executor
        self._graphs: dict[Binding, tuple[CpuGraph, Outputs]] = {}
        self._open = True

    def __len__(self) -> int:
        """Captured graphs."""
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        """Memory of results, workspaces and recorded calls."""
        return self.arena.bytes + sum(graph.nbytes for graph, _ in self._graphs.values())

    def __contains__(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether a graph was captured over these tensors."""
        return Binding.of(inputs) in self._graphs

    def capture(self, inputs: Mapping[str, Tensor], compute: Callable[[], Outputs]) -> Outputs:
        """Record `compute` over `inputs`, which it must read and nothing else that changes; nothing runs.

        Args:
            inputs: what a replay will be asked for with.
            compute: the pass; gives tensors in (nested) tuples, or None in places.

        Returns:
            What `compute` gave, in memory that other graphs of the family use too.

        Raises:
            CaptureError: capture is closed, the inputs have a graph already, or the pass did something that cannot be
                recorded.
        """
        if not self._open:
            raise CaptureError(f"capture of {self.name} graphs is closed: all are captured at startup")
        binding = Binding.of(inputs)
        if binding in self._graphs:
            raise CaptureError(f"a {self.name} graph was captured over these tensors before: {binding}")
        graph = CpuGraph(self._executor, self.arena, self.name)
        with graph.capture():
            results = compute()
        outputs = cast(Outputs, _map_tensors(self.arena.alias, results))
        self._graphs[binding] = (graph, outputs)
        self.counters.captures_at_startup += 1
        return outputs

    def close(self) -> None:
        """End capturing for good."""
        self._open = False

    def replay(self, inputs: Mapping[str, Tensor], is_round: bool = True) -> Outputs:
        """Run the graph that was captured over `inputs`, on their present content.

        Args:
            inputs: as `capture` was given.
            is_round: whether it is a pass of a decode round, which are counted.

        Raises:
            MissingBindingError: there is none.
        """
        graph, outputs = self._find(inputs)
        graph.replay()
        self.counters.replays[self.name] += is_round
        return outputs

    def graph(self, inputs: Mapping[str, Tensor]) -> CpuGraph:
        """The graph that was captured over `inputs`, to be part of a program.

        Raises:
            MissingBindingError: there is none.
        """
        return self._find(inputs)[0]

    def _find(self, inputs: Mapping[str, Tensor]) -> tuple[CpuGraph, Outputs]:
        binding = Binding.of(inputs)
        captured = self._graphs.get(binding)
        if captured is None:
            raise MissingBindingError(
                f"no {self.name} graph is bound to these tensors, and there is no capture after startup: {binding}"
            )
        return captured


def _map_tensors(change: Callable[[Tensor], Tensor], value: object) -> object:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [_map_tensors(change, part) for part in value]
        make: Callable[..., tuple[object, ...]] = getattr(type(value), "_make", tuple)
        return make(parts)
    return value
