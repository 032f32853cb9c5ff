"""Graphs of the CPU device: kernel calls recorded with bound pointers, replayed by the native module."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparkgap import _native

_ALLOCATIONS = frozenset({torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default})


class CaptureError(RuntimeError):
    """Something was computed during capture that a replay would not compute again."""


class CallTiming(NamedTuple):
    """Time of one recorded call.

    Attributes:
        kind: of the call, such as `LinearInt8`.
        share_ns: nanoseconds of each thread's share of it.
    """

    kind: str
    share_ns: tuple[int, ...]


class CpuGraph:
    """A recorded pass over tensors at fixed addresses.

    Recording runs nothing: results are undefined until the first `replay`. The graph keeps alive every tensor that
    its calls read or write, and the arena that results made during the capture lie in. Replays read the present
    content of the tensors: change them in place.

    Memory of a result that the caller drops, which are all that lie between input and output, serves later results:
    of this graph, and of graphs that are captured later over the same arena. A graph that is replayed so overwrites
    what others of its arena left there, except in tensors that the caller still holds.

    Args:
        executor: of the kernels to record.
        arena: memory for results; None takes an arena of the graph's own.
        name: what traces call it.

    Example:
        graph = CpuGraph(kernels.executor)
        with graph.capture():
            logits = decoder.logits(decoder.forward(batch, caches).hidden)
        graph.replay()
    """

    def __init__(self, executor: _native.Executor, arena: _native.Arena | None = None, name: str = "") -> None:
        self._executor = executor
        self._name = name
        self._arena = _native.Arena() if arena is None else arena
        self._graph = _native.Graph(executor.threads, self._arena, name)
        self._captured = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the native kernels that are called inside the block, once.

        Raises:
            CaptureError: torch computed something inside the block, or the graph was captured before. A graph
                whose capture failed cannot be replayed.
        """
        if self._captured:
            raise CaptureError("the graph was captured before; make a new one")
        self._captured = True
        graph = self._graph
        self._executor.begin_capture(graph)
        failed = True
        try:
            with _NoCompute():  # type: ignore[no-untyped-call]
                yield
            failed = False
        finally:
            self._executor.end_capture()
            if failed:
                self._graph = _native.Graph(self._executor.threads, self._arena, self._name)

    def replay(self) -> None:
        """Run the recorded calls in order; the GIL is released meanwhile.

        Raises:
            CaptureError: nothing was captured.
            IndexError: a token id, position, slot or block in a tensor lies outside its range.
        """
        if not len(self._graph):
            raise CaptureError("the graph holds no calls: nothing was captured, or the capture failed")
        self._graph.replay()

    def profile(self, repeats: int = 10) -> list["CallTiming"]:
        """How long each call takes, by running every thread's share of it alone, one after the other.

        The shortest of `repeats` runs counts, so that other work on the machine hardly shows. The calls run for real:
        they write what a replay writes.
        """
        if not len(self._graph):
            raise CaptureError("the graph holds no calls: nothing was captured, or the capture failed")
        kinds, times = self._graph.kinds(), self._graph.profile(repeats)
        threads = self._executor.threads
        return [CallTiming(kind, tuple(times[i * threads : (i + 1) * threads])) for i, kind in enumerate(kinds)]

    @property
    def native(self) -> _native.Graph:
        """The recorded calls, for a program to take."""
        return self._graph

    @property
    def nbytes(self) -> int:
        """Memory of the recorded calls, without the arena."""
        return self._graph.bytes

    def __len__(self) -> int:
        """Kernel calls in the graph."""
        return len(self._graph)


class _NoCompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets views and uninitialized memory through and refuses every other torch operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; telling the compiler so would import it, which takes a second."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        call: Callable[..., Any] = func
        if func not in _ALLOCATIONS and not _is_view(func):
            raise CaptureError(
                f"{func} was called during capture; a replay would leave it out. Use the kernels' operations"
            )
        return call(*args, **(kwargs or {}))


@functools.cache
def _is_view(func: Any) -> bool:
    """True when the operation only gives another view of an argument."""
    schema = func._schema
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    returns = [result.alias_info for result in schema.returns]
    return not writes and bool(returns) and all(alias is not None for alias in returns)
