"""What an engine did when: kernel calls of the device, calls of the host, and rounds of the task pipeline.

Nothing of the engine knows of it. While a recording is under way, the methods in `_watched` are replaced, in the
objects of that engine alone, by ones that also take the time; before and after it an engine runs as if there were none.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from sparkgap import _native
from sparkgap.device.trace import KernelCall, now_ns, record_kernels
from sparkgap.engine.loading import LoadedEngine
from sparkgap.errors import ConfigError, EngineError
from sparkgap.ops.native_kernels import NativeKernels
from sparkgap.rounds.pipeline.pipeline import Pipeline

ROUND = "round"
"""A round that the host carries, from its inputs to its tokens."""

DRAFT, TARGET, VERIFY, CONTEXT = "draft", "target", "verify", "context"
"""Its passes, and the choice of tokens."""

SUBMIT, LAUNCH, CONSUME = "submit", "launch", "consume"
"""A round of the pipeline: staged and given away, given to the stream (a part of that), waited for and read."""


@dataclass(frozen=True)
class HostCall:
    """One call of the engine's thread.

    Attributes:
        name: a stage such as `ROUND`, or a torch operation's name.
        begin_ns, end_ns: in the time of `device.trace.now_ns`.
        is_torch: whether it is a torch operation.
    """

    name: str
    begin_ns: int
    end_ns: int
    is_torch: bool = False


@dataclass
class PipelinedRound:
    """One round of the pipeline.

    Attributes:
        slot: index of its Slot.
        submit: the call that staged and launched it.
        consume: the call that waited for it; None when it was left in flight.
        run: its run among the kernel calls; 0 when it did not run while the recording was on.
    """

    slot: int
    submit: HostCall
    consume: HostCall | None = None
    run: int = 0


@dataclass
class Recording:
    """What happened while a recording was on; complete once its block has ended.

    Attributes:
        kernels: kernel calls, by begin.
        host: calls of the host, by begin.
        rounds: of the pipeline, in order.
        num_dropped: kernel calls that were given up for later ones.
    """

    kernels: list[KernelCall] = field(default_factory=list)
    host: list[HostCall] = field(default_factory=list)
    rounds: list[PipelinedRound] = field(default_factory=list)
    num_dropped: int = 0


@contextmanager
def record(loaded: LoadedEngine, *, torch_operations: bool = False) -> Iterator[Recording]:
    """Record what the engine does inside the block, which must give it requests from this thread.

    Args:
        loaded: the engine.
        torch_operations: record those of this thread too. That takes longer than most of them do: they can be counted
            then, and times mean little.

    Raises:
        ConfigError: torch computes the passes, so that there are no kernel calls to record.
        EngineError: another recording is under way in this process.
    """
    if not isinstance(loaded.target.kernels, NativeKernels):
        raise ConfigError(
            f"a trace needs the CPU's native kernels, and torch computes on device {loaded.target.device} with this "
            "dtype; use device cpu and another dtype than float16"
        )
    recording = Recording()
    watch = _Watch(recording.host)
    pipeline = None if loaded.pipeline is None else loaded.pipeline.pipeline
    rounds = _Rounds(recording.rounds)
    with ExitStack() as stack:
        try:
            kernels = stack.enter_context(record_kernels())
        except RuntimeError as error:
            raise EngineError(f"cannot trace: {error}") from error
        if torch_operations:
            stack.enter_context(_TorchOperations(recording.host))
        for target, method, name in _watched(loaded):
            stack.enter_context(watch.method(target, method, name))
        if pipeline is not None:
            stack.enter_context(rounds.watch(pipeline, watch))
        yield recording
    rounds.finish()
    recording.kernels, recording.num_dropped = kernels.calls, kernels.num_dropped
    recording.host.sort(key=lambda call: (call.begin_ns, -call.end_ns))


def _watched(loaded: LoadedEngine) -> list[tuple[object, str, str]]:
    """Objects, their methods, and what a trace calls them."""
    runner = loaded.engine.runner if loaded.pipeline is None else loaded.pipeline.direct
    passes = loaded.passes
    found: list[tuple[object, str, str]] = [
        (loaded.engine, "step", "step"),
        (runner, "prefill", "prompt"),
        (runner, "decode", ROUND),
        (passes, "decode", TARGET),
        (passes, "draft", DRAFT),
        (passes, "propose", DRAFT),
        (passes, "update_context", CONTEXT),
        (getattr(runner, "sampler"), "sample", VERIFY),  # noqa: B009 # every runner of a loaded engine has one
    ]
    if passes.drafting is not None:
        found.append((passes.drafting.drafter, "propose", DRAFT))
    if loaded.pipeline is not None:
        pipeline = loaded.pipeline.pipeline
        found += [(slot, "stage", f"stage Slot {index}") for index, slot in enumerate(pipeline.slots)]
        found.append((pipeline.stream, "launch", LAUNCH))
    return found


class _Watch:
    """Replaces methods by ones that append what they did to a list."""

    def __init__(self, calls: list[HostCall]) -> None:
        self._calls = calls

    @contextmanager
    def method(self, target: object, method: str, name: str) -> Iterator[None]:
        """Watch one method of one object inside the block."""
        original: Callable[..., Any] = getattr(target, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_ns = now_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._calls.append(HostCall(name, begin_ns, now_ns()))

        with replaced(target, method, timed):
            yield

    @property
    def last(self) -> HostCall:
        """The call that ended last."""
        return self._calls[-1]


@contextmanager
def replaced(target: object, method: str, by: Callable[..., Any]) -> Iterator[None]:
    """Another method in one object inside the block."""
    vars(target)[method] = by
    try:
        yield
    finally:
        del vars(target)[method]


class _Rounds:
    """Notes which Slot, launch and host calls belong to a round of the pipeline."""

    def __init__(self, rounds: list[PipelinedRound]) -> None:
        self._rounds = rounds
        self._launches: dict[int, tuple[_native.Launch, PipelinedRound]] = {}

    @contextmanager
    def watch(self, pipeline: Pipeline, watch: _Watch) -> Iterator[None]:
        """Watch `submit` and `consume` inside the block."""
        with watch.method(pipeline, "submit", SUBMIT), watch.method(pipeline, "consume", CONSUME):
            submit, consume = pipeline.submit, pipeline.consume

            def submitted(sequences: Any) -> None:
                submit(sequences)
                newest = pipeline.rounds[-1]
                round_ = PipelinedRound(newest.slot, watch.last)
                self._rounds.append(round_)
                self._launches[id(newest.launch)] = (newest.launch, round_)

            def consumed() -> Any:
                oldest = id(pipeline.rounds[0].launch)
                results = consume()
                # One that was submitted before the recording began is not among them.
                if oldest in self._launches:
                    self._launches[oldest][1].consume = watch.last
                return results

            vars(pipeline).update(submit=submitted, consume=consumed)
            try:
                yield
            finally:
                vars(pipeline).update(submit=submit, consume=consume)

    def finish(self) -> None:
        """Look up what only the device knew."""
        for launch, round_ in self._launches.values():
            round_.run = launch.run


class _TorchOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends every torch operation of the thread to a list."""

    def __init__(self, calls: list[HostCall]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        begin_ns = now_ns()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._calls.append(HostCall(str(func), begin_ns, now_ns(), is_torch=True))
