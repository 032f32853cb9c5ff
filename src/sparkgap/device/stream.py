"""Streams of the CPU device: programs of graphs that run in order on a thread of their own, without the GIL."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sparkgap import _native
from sparkgap.device.cpu import CpuGraph


class Condition(NamedTuple):
    """When a graph of a program runs.

    Attributes:
        selector: int64 `[1]`, read when the graph before has ended.
        choice: the value of it with which the graph runs.
    """

    selector: Tensor
    choice: int


class CpuProgram:
    """Graphs that one launch replays one after another. Keeps them, and all that they read and write, alive.

    Args:
        graphs: with their names.
        passes: names of the graphs with which a launch is under way; none for all. Who waits for the launch before is
            woken once the first call of the first of them that runs has run, and not between the two launches.
        conditions: for each graph, a tensor, int64 `[1]`, and the value of it with which the graph runs, or None: it
            always runs. The first and the last always do. Operations of rounds in earlier graphs of the program write
            the tensors.

    Attributes:
        names: of the graphs, in order, for those who look at the times of a launch.
    """

    def __init__(
        self,
        graphs: Sequence[tuple[str, CpuGraph]],
        passes: Sequence[str] = (),
        conditions: Sequence[Condition | None] = (),
    ) -> None:
        self.names = tuple(name for name, _ in graphs)
        long_parts = [number for number, name in enumerate(self.names) if name in passes]
        if missing := set(passes).difference(self.names):
            raise ValueError(f"the program has no graph {', '.join(sorted(missing))}")
        selectors = [None if condition is None else condition.selector for condition in conditions]
        choices = [0 if condition is None else condition.choice for condition in conditions]
        self._native = _native.Program([graph.native for _, graph in graphs], long_parts, selectors, choices)

    def replay(self) -> None:
        """Run it on this thread.

        Raises:
            IndexError: an index in a tensor lies outside its range.
        """
        self._native.replay()


class CpuStream:
    """Runs programs first in, first out. `_native.Launch` is what is known of each.

    After a launch that fails, those behind it fail without running until `reset`: they would begin from what it left
    half done.
    """

    def __init__(self) -> None:
        self._native = _native.Stream()

    def launch(self, program: CpuProgram) -> _native.Launch:
        """Take a program; returns at once.

        Raises:
            RuntimeError: the stream was stopped.
        """
        return self._native.launch(program._native)

    def reset(self, timeout_s: float) -> bool:
        """Wait until nothing runs or waits, and forget a failure; False when that takes longer."""
        return self._native.reset(timeout_s)

    def stop(self) -> None:
        """Let what runs end, fail what waits, and take nothing any more."""
        self._native.stop()
