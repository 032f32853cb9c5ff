"""`sparkgap trace`: what a request's rounds do when."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.cli import loading
from sparkgap.cli.bench_options import mode_configs
from sparkgap.cli.console import print_json, print_note, use_utf8_output
from sparkgap.cli.generate import complete, make_request
from sparkgap.cli.latency import MATRIX_MODES
from sparkgap.cli.options import EngineOptions, MaxTokens, SamplingOptions
from sparkgap.cli.prompts import PromptSource
from sparkgap.cli.trace_report import print_intervals
from sparkgap.config import EXECUTION_MODES, EngineConfig
from sparkgap.errors import ConfigError

if TYPE_CHECKING:
    from sparkgap.api import LLM
    from sparkgap.bench.trace.requests import TracedRequest

PLAIN_MODES = ("graphs", "pipeline")
"""Execution modes that differ without a drafter."""


@dataclass(frozen=True)
class TracedSampling(SamplingOptions):
    """As for `generate`, with a shorter answer."""

    max_tokens: MaxTokens = 64


def trace(
    engine: EngineOptions,
    sampling: TracedSampling,
    asked: PromptSource,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the trace goes; what is there is replaced.")
    ] = Path("sparkgap-trace.json"),
    compare: Annotated[
        bool,
        typer.Option("--compare", help=f"Execution modes side by side: {', '.join(MATRIX_MODES)}; see --graphs."),
    ] = False,
    mode: Annotated[
        list[str] | None,
        typer.Option("--mode", help=f"Compare these of {', '.join(EXECUTION_MODES)} instead. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> int:
    """Record when a request's graphs, kernels, host calls and rounds run.

    The request is answered three times: to warm up, recorded, and once more to count torch's operations. A trace that
    Perfetto (ui.perfetto.dev) and chrome://tracing open goes to --output, and a report of the intervals in steady
    rounds to standard output.

    Exit status: 0; 1 when a recording changed a token or modes gave different ones; 2 on bad input.
    """
    use_utf8_output()
    text = asked.read()
    config, params = engine.config(), sampling.params()
    asked.check()
    _check_output(output)
    models = {name: loading.load_llm(wanted) for name, wanted in _configs(config, compare, mode or []).items()}
    from sparkgap.bench.machine import machine_facts
    from sparkgap.bench.trace.chrome import write_trace
    from sparkgap.bench.trace.intervals import interval_reports
    from sparkgap.bench.trace.requests import mode_of, trace_request

    def ask(llm: "LLM", params: Any) -> Any:
        return complete(llm, make_request(llm, text, system=asked.system, raw=asked.raw), params)

    traced = {name or mode_of(llm.info()): trace_request(llm, ask, params) for name, llm in models.items()}
    reports = interval_reports({name: (found.recording, found.counted) for name, found in traced.items()})
    same = len({tuple(request.output.outputs[0].token_ids) for request in traced.values()}) == 1
    info = next(iter(models.values())).info()
    facts = {
        "model": info["model"],
        "speculation": info["speculation"],
        "threads": info["threads"],
        "machine": machine_facts(),
        "prompt_tokens": len(next(iter(traced.values())).output.prompt_token_ids),
        "same_tokens": same and all(request.same_tokens for request in traced.values()),
    }
    write_trace(output, {name: request.recording for name, request in traced.items()}, facts)
    if as_json:
        modes = {name: asdict(reports[name]) | _facts(found) for name, found in traced.items()}
        print_json(facts | {"output": str(output), "modes": modes})
    else:
        print_intervals(reports)
        _print_notes(traced, output, bool(facts["same_tokens"]))
    return 0 if facts["same_tokens"] else 1


def _configs(config: EngineConfig, compare: bool, modes: list[str]) -> dict[str, EngineConfig]:
    """What is traced, by the mode's name; one without a name where none are compared."""
    if not compare and not modes:
        return {"": config}
    usual = MATRIX_MODES if config.speculation else PLAIN_MODES
    return mode_configs(config, list(dict.fromkeys(modes or usual)))


def _check_output(output: Path) -> None:
    """What cannot be written shows before anything is loaded. Raises ConfigError."""
    if output.is_dir():
        raise ConfigError(f"cannot write trace {output}: it is a directory; name a file")
    if not output.parent.is_dir():
        raise ConfigError(f"cannot write trace {output}: there is no directory {output.parent}; make it first")


def _facts(traced: "TracedRequest") -> dict[str, Any]:
    return {
        "completion_tokens": len(traced.output.outputs[0].token_ids),
        "kernel_calls": len(traced.recording.kernels),
        "dropped_kernel_calls": traced.recording.num_dropped,
        "captures_while_traced": traced.graph_captures,
        "same_tokens": traced.same_tokens,
    }


def _print_notes(traced: "dict[str, TracedRequest]", output: Path, same: bool) -> None:
    for name, request in traced.items():
        if request.recording.num_dropped:
            print_note(f"{name}: the first {request.recording.num_dropped} kernel calls were given up for later ones")
    if not same:
        print_note("DIFFERENT tokens, with and without a recording or in different modes")
    print_note(f"trace in {output}; open it at ui.perfetto.dev or chrome://tracing")
