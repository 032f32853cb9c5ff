"""Recordings made by hand, in microseconds."""

from sparkgap.device.trace import KernelCall
from sparkgap.engine.tracing import HostCall, PipelinedRound, Recording


def kernel(graph: str, kind: str, begin: int, end: int, *, run: int, part: int = 0, call: int = 0, thread: int = 0):
    return KernelCall(kind, graph, run, part, call, thread, begin * 1000, end * 1000)


def host(name: str, begin: int, end: int, *, is_torch: bool = False) -> HostCall:
    return HostCall(name, begin * 1000, end * 1000, is_torch)


def pipelined_round(run: int, at: int) -> list[KernelCall]:
    """1,000 microseconds on two threads, of which the last ten are idle."""
    return [
        kernel("begin", "BeginRound", at, at + 2, run=run, part=0),
        kernel("draft", "LinearInt8", at + 5, at + 90, run=run, part=1),
        kernel("draft", "LinearInt8", at + 6, at + 100, run=run, part=1, thread=1),
        kernel("lay out", "VerifyRows", at + 102, at + 104, run=run, part=2),
        kernel("target", "LinearInt8", at + 110, at + 790, run=run, part=3),
        kernel("target", "LinearInt8", at + 110, at + 800, run=run, part=3, thread=1),
        kernel("settle", "DrawTokens", at + 805, at + 850, run=run, part=4),
        kernel("settle", "SettleRound", at + 851, at + 855, run=run, part=4, call=1),
        kernel("context", "LinearInt8", at + 860, at + 900, run=run, part=5),
        kernel("context", "LinearInt8", at + 858, at + 899, run=run, part=5, thread=1),
        kernel("context", "RotaryWrite", at + 905, at + 930, run=run, part=5, call=1),
        kernel("context", "RotaryWrite", at + 905, at + 925, run=run, part=5, call=1, thread=1),
        kernel("context", "RotaryWrite", at + 931, at + 950, run=run, part=5, call=2),
        kernel("hand off", "HandOff", at + 952, at + 953, run=run, part=6),
    ]


def pipelined(rounds: int) -> Recording:
    """Rounds in two Slots; each begins 1,000 microseconds after the one before."""
    recording = Recording()
    for number in range(rounds):
        at = 10_000 + 1000 * number
        recording.kernels += pipelined_round(number + 1, at)
        submit, consume = host("submit", at - 1035, at - 1022), host("consume", at - 20, at + 960)
        launch = host("launch", at - 1027, at - 1023)
        recording.host += [submit, launch, consume]
        recording.rounds.append(PipelinedRound(number % 2, submit, consume, number + 1))
    return _sorted(recording)


def carried(rounds: int) -> Recording:
    """Rounds that the host carries on one thread: graphs, and a context update of single operations."""
    recording = Recording()
    for number in range(rounds):
        at, run = 10_000 + 1000 * number, 10 * number + 1
        recording.host += [
            host("round", at, at + 980),
            host("draft", at + 10, at + 115),
            host("aten.copy_.default", at + 12, at + 14, is_torch=True),
            host("target", at + 130, at + 805),
            host("verify", at + 810, at + 840),
            host("aten.argmax.default", at + 812, at + 830, is_torch=True),
            host("context", at + 850, at + 950),
            host("aten.index.Tensor", at + 851, at + 855, is_torch=True),
        ]
        recording.kernels += [
            kernel("draft", "LinearInt8", at + 20, at + 110, run=run),
            kernel("target", "LinearInt8", at + 140, at + 800, run=run + 1),
            kernel("", "LinearInt8", at + 860, at + 900, run=run + 2),
            kernel("", "RotaryWrite", at + 910, at + 920, run=run + 3),
            kernel("", "RotaryWrite", at + 925, at + 940, run=run + 4),
        ]
    return _sorted(recording)


def _sorted(recording: Recording) -> Recording:
    recording.kernels.sort(key=lambda call: call.begin_ns)
    recording.host.sort(key=lambda call: (call.begin_ns, -call.end_ns))
    return recording
