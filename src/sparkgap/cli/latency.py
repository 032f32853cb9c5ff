"""`sparkgap bench latency`: plain decoding, speculation and other engines side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from sparkgap.bench.prompts import BenchPrompt, EncodedPrompt, encode_prompts
from sparkgap.cli import loading
from sparkgap.cli.bench_options import PromptOptions, check_positive, mode_configs, progress_bar
from sparkgap.cli.console import print_json, status, use_utf8_output
from sparkgap.cli.latency_report import make_report, print_report
from sparkgap.cli.options import EngineOptions
from sparkgap.config import EXECUTION_MODES, EngineConfig, SpeculativeConfig
from sparkgap.errors import ConfigError

if TYPE_CHECKING:
    from sparkgap.api import LLM
    from sparkgap.bench.latency import Column, EngineColumn

_DEFAULT_LIMIT = 3
"""Built-in prompts, one of each category."""

MATRIX_MODES = ("graphs", "compact", "masked", "pipeline")
"""Columns of `--matrix` beside plain decoding."""

MATRIX_PROMPT_TOKENS = 1868
"""Length of the made-up prompt of `--matrix`."""

ALL_DRAFTS = "pipeline, all drafts"
"""Column of the pipeline that verifies all draft tokens of each round, as the other modes do."""

SPECULATIVE = "speculative"
"""Column of speculation as configured."""

_PHASE_REPEATS = 30
"""Times that each phase of a round is measured."""


def latency(
    engine: EngineOptions,
    prompts: PromptOptions,
    prompt_tokens: Annotated[
        int | None,
        typer.Option("--prompt-tokens", metavar="N", help="Measure one made-up prompt of N tokens instead."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Output tokens of every answer; end of sequence is ignored.")
    ] = 128,
    repeats: Annotated[int, typer.Option("--repeats", help="Times that every prompt is measured.")] = 5,
    warmups: Annotated[
        int | None,
        typer.Option("--warmups", help="Times that it is answered before, unmeasured; default: 1, or 2 with --matrix."),
    ] = None,
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help=f"Compare execution modes ({', '.join(MATRIX_MODES)}) after a prompt of {MATRIX_PROMPT_TOKENS} tokens "
            "and measure the phases of a round.",
        ),
    ] = False,
    mtp: Annotated[
        str | None,
        typer.Option(
            "--mtp",
            metavar="MODEL",
            help="With --matrix: an MTP drafter, directory or hf:owner/name, for one more column in the pipeline; "
            "default: the shipped one, where the model has one.",
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help=f"With --matrix: these of {', '.join(EXECUTION_MODES)} instead. May be repeated.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="ENGINE", help="Also transformers or llama.cpp (CPU). May be repeated."),
    ] = None,
    also_dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--also-dtype", metavar="DTYPE", help="Also plain decoding in this dtype, not quantized. May be repeated."
        ),
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Report as Markdown tables.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> int:
    """Measure time to first token and time per token, one request at a time, with all columns in turn."""
    use_utf8_output()
    peers, modes = list(dict.fromkeys(peer or ())), list(dict.fromkeys(mode or MATRIX_MODES)) if matrix else []
    if warmups is None:
        warmups = 2 if matrix else 1
    if matrix and prompt_tokens is None and prompts.prompts is None:
        prompt_tokens = MATRIX_PROMPT_TOKENS
    _check(max_tokens, repeats, warmups, prompt_tokens, prompts)
    _check_matrix(matrix, mode, mtp)
    _check_output(as_json, as_markdown)
    chosen = [] if prompt_tokens is not None else _read(prompts)
    from sparkgap.bench.latency import EngineColumn, check_room, measure_latency, measure_phases
    from sparkgap.bench.machine import READ_BUFFER_BYTES, MemoryReader, machine_facts
    from sparkgap.bench.peers import check_peers

    check_peers(peers)
    machine = machine_facts()
    config = engine.config()
    others = [
        replace(config, dtype=dtype, quantization="none", speculation=False, speculative_config=None)
        for dtype in dict.fromkeys(also_dtype or ())
    ]
    plain, speculative = _engines(config, modes, mtp, is_whole_matrix=matrix and not mode)
    encoded = _encode(plain, chosen, prompts.raw, prompt_tokens)
    check_room(encoded, max_tokens, plain.info()["max_model_len"])
    own = [EngineColumn(plain), *(EngineColumn(llm, name) for name, llm in speculative.items())]
    columns: list[Column] = [*own]
    columns += [EngineColumn(loading.load_llm(other), f"plain {other.dtype}") for other in others]
    columns += _peer_columns(plain, peers, encoded, max_tokens)
    reader = MemoryReader(plain.device, plain.info()["threads"], READ_BUFFER_BYTES)
    with progress_bar("Measuring", len(encoded) * (warmups + repeats)) as advance:
        turns = measure_latency(
            columns,
            encoded,
            num_tokens=max_tokens,
            repeats=repeats,
            warmups=warmups,
            read_bandwidth=reader.bytes_per_s,
            advance=advance,
        )
    settings = {
        "max_tokens": max_tokens,
        "repeats": repeats,
        "warmups": warmups,
        "read_buffer_bytes": reader.buffer_bytes,
    }
    report = make_report(plain, columns, turns, encoded, machine, settings)
    if matrix:
        context_tokens = max(len(prompt.token_ids) for prompt in encoded)
        report.facts["phase_context_tokens"] = context_tokens
        try:
            report.phases.update(measure_phases(own, report.summaries, context_tokens, _PHASE_REPEATS))
            report.notes.extend(_phase_notes(own))
        except ConfigError as error:
            report.notes.append(f"the phases of a round were not measured: {error}")
    if not speculative:
        reason = "no drafter was named, and none comes with Sparkgap for this model; give --draft DIR"
        if engine.no_speculation:
            reason = "--no-speculation"
        report.notes.append(f"speculation was not measured: {reason}")
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, as_markdown)
    return 1 if report.identical is False else 0


def _phase_notes(columns: "Sequence[EngineColumn]") -> list[str]:
    chained = [column.name for column in columns if column.info["task_pipeline"]["active"]]
    if not chained:
        return []
    return [
        f"whole rounds of {', '.join(chained)} are chained on the device, and last from the results of one to those of "
        "the next; in every column the host gives passes to the device one by one"
    ]


def _check(max_tokens: int, repeats: int, warmups: int, prompt_tokens: int | None, prompts: PromptOptions) -> None:
    check_positive("repeats", repeats)
    if max_tokens < 2:
        raise ConfigError(f"max-tokens must be at least 2 for a time between tokens, got {max_tokens}")
    if warmups < 0:
        raise ConfigError(f"warmups must not be negative, got {warmups}")
    if prompt_tokens is not None:
        check_positive("prompt-tokens", prompt_tokens)
        if prompts.prompts is not None or prompts.limit is not None:
            raise ConfigError(
                "--prompt-tokens, which --matrix uses where there are no --prompts, makes the one prompt itself; leave "
                "out --prompts and --limit, or give --matrix --prompts"
            )


def _check_output(as_json: bool, as_markdown: bool) -> None:
    if as_json and as_markdown:
        raise ConfigError("--json and --markdown contradict each other; use one of them")


def _check_matrix(matrix: bool, mode: Sequence[str] | None, mtp: str | None) -> None:
    if mode and not matrix:
        raise ConfigError("--mode chooses columns of --matrix; add it")
    if mtp is not None and not matrix:
        raise ConfigError("--mtp is one more column of --matrix; add it")


def _read(prompts: PromptOptions) -> list[BenchPrompt]:
    return prompts.read(limit=_DEFAULT_LIMIT if prompts.prompts is None else None)


def _engines(
    config: EngineConfig, modes: Sequence[str], mtp: str | None, *, is_whole_matrix: bool
) -> "tuple[LLM, dict[str, LLM]]":
    """Plain decoding, and what speculates by the column's name: modes, or what the configuration describes.

    A whole matrix also has the pipeline without a choice of lengths, and with an MTP drafter.
    """
    compared = _compared(config, modes)
    if is_whole_matrix or mtp is not None:
        compared |= _mtp_column(config, mtp)
    plain, speculative = _load(config, compared)
    if is_whole_matrix:
        speculative |= _all_drafts_column(speculative)
    return plain, speculative


def _compared(config: EngineConfig, modes: Sequence[str]) -> dict[str, EngineConfig]:
    """What speculates, by the column's name; without modes the one engine that the configuration describes.

    Raises:
        ConfigError: modes are to be compared, and speculation is switched off; as `mode_configs`.
    """
    if not modes:
        return {SPECULATIVE: config} if config.speculation else {}
    if not config.speculation:
        raise ConfigError("--matrix compares ways to speculate; leave out --no-speculation")
    # Asking for speculation makes a missing drafter an error.
    wanted = config.speculative_config or SpeculativeConfig()
    return mode_configs(replace(config, speculative_config=wanted), modes)


def _all_drafts_column(speculative: "Mapping[str, LLM]") -> "dict[str, LLM]":
    """The pipeline that verifies all draft tokens, as the modes beside it do; none where it does so anyway."""
    pipeline = speculative["pipeline"]
    wanted = pipeline.config.speculative_config
    if wanted is None or pipeline.info()["speculation"]["prefix_scheduling"] is None:
        return {}
    every = replace(wanted, prefix_scheduling=False)
    return {ALL_DRAFTS: loading.load_llm(replace(pipeline.config, speculative_config=every))}


def _mtp_column(config: EngineConfig, mtp: str | None) -> dict[str, EngineConfig]:
    """The configuration with an MTP drafter in the pipeline, by its column's name; none where none is named or shipped.

    Raises:
        ConfigError: the drafter that is named is none, or the configuration says itself how rounds are run.
        SparkgapError: it cannot be had.
    """
    wanted = config.speculative_config or SpeculativeConfig()
    if mtp is None:
        from sparkgap.catalog.checkpoint import open_checkpoint
        from sparkgap.catalog.shipped import match_shipped

        found = match_shipped(open_checkpoint(config.model, allow_download=config.allow_download), "mtp").drafter
        if found is None or found.settings.method != "mtp":
            return {}
    # It gives no confidences to choose by.
    speculation = replace(wanted, method="mtp", model=mtp, num_speculative_tokens=None, prefix_scheduling=None)
    in_pipeline = mode_configs(replace(config, speculative_config=speculation), ["pipeline"])["pipeline"]
    return {f"MTP-{loading.num_draft_tokens(in_pipeline)} + pipeline": in_pipeline}


def _load(config: EngineConfig, compared: dict[str, EngineConfig]) -> "tuple[LLM, dict[str, LLM]]":
    """The engine without a drafter, and those with one by the column's name.

    They are different ones: an engine with a drafter also fills the drafter's context in plain rounds.
    """
    # A drafter that is wrong shows before anything else is loaded.
    speculative = {name: loading.load_llm(other) for name, other in compared.items()}
    for llm in speculative.values():
        if llm.info()["speculation"] is None:
            # No drafter is named, and none is asked for.
            return llm, {}
    return loading.load_llm(replace(config, speculation=False, speculative_config=None)), speculative


def _encode(llm: "LLM", chosen: Sequence[BenchPrompt], raw: bool, prompt_tokens: int | None) -> list[EncodedPrompt]:
    from sparkgap.bench.latency import synthetic_prompt

    return encode_prompts(llm, chosen, raw=raw) if prompt_tokens is None else [synthetic_prompt(llm, prompt_tokens)]


def _peer_columns(
    plain: "LLM", peers: Sequence[str], prompts: Sequence[EncodedPrompt], max_tokens: int
) -> "Iterator[Column]":
    from sparkgap.bench.peers import load_peer

    if peers and plain.device.type != "cpu":
        raise ConfigError(f"peers run on the CPU, and the model is on {plain.device}; add --device cpu")
    longest = max(len(prompt.token_ids) for prompt in prompts) + max_tokens
    for name in peers:
        with status(f"loading {name} ..."):
            yield load_peer(name, plain.checkpoint, threads=plain.info()["threads"], max_tokens=longest)
