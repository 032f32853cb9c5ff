"""`sparkgap bench latency`: plain decoding, speculation and other engines side by side."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.bench.prompts import BenchPrompt, EncodedPrompt, encode_prompts
from sparkgap.cli import loading
from sparkgap.cli.bench_options import PromptOptions, check_positive, progress_bar
from sparkgap.cli.console import print_json, status, use_utf8_output
from sparkgap.cli.options import EngineOptions
from sparkgap.config import EngineConfig
from sparkgap.errors import ConfigError

if TYPE_CHECKING:
    from sparkgap.api import LLM
    from sparkgap.bench.latency import Column, ColumnSummary, Floor, Spread, Turn

_DEFAULT_LIMIT = 3
"""Built-in prompts, one of each category."""

_BUSY = 0.5
"""Load average for each core, before the run, above which a report says so."""


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
    warmups: Annotated[int, typer.Option("--warmups", help="Times that it is answered before, unmeasured.")] = 1,
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
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> int:
    """Measure time to first token and time per token, one request at a time, with all columns in turn."""
    use_utf8_output()
    peers = list(dict.fromkeys(peer or ()))
    _check(max_tokens, repeats, warmups, prompt_tokens, prompts)
    chosen = [] if prompt_tokens is not None else _read(prompts)
    from sparkgap.bench.latency import EngineColumn, check_room, measure_latency
    from sparkgap.bench.machine import READ_BUFFER_BYTES, MemoryReader, machine_facts
    from sparkgap.bench.peers import check_peers

    check_peers(peers)
    machine = machine_facts()
    config = engine.config()
    others = [
        replace(config, dtype=dtype, quantization="none", speculation=False, speculative_config=None)
        for dtype in dict.fromkeys(also_dtype or ())
    ]
    plain, speculative = _load(config)
    encoded = _encode(plain, chosen, prompts.raw, prompt_tokens)
    check_room(encoded, max_tokens, plain.info()["max_model_len"])
    columns: list[Column] = [EngineColumn(llm) for llm in (plain, speculative) if llm is not None]
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
    report = _report(plain, columns, turns, encoded, machine, settings)
    if speculative is None:
        reason = "no drafter was named, and none comes with Sparkgap for this model; give --draft DIR"
        if engine.no_speculation:
            reason = "--no-speculation"
        report.notes.append(f"speculation was not measured: {reason}")
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    return 1 if report.identical is False else 0


def _check(max_tokens: int, repeats: int, warmups: int, prompt_tokens: int | None, prompts: PromptOptions) -> None:
    check_positive("repeats", repeats)
    if max_tokens < 2:
        raise ConfigError(f"max-tokens must be at least 2 for a time between tokens, got {max_tokens}")
    if warmups < 0:
        raise ConfigError(f"warmups must not be negative, got {warmups}")
    if prompt_tokens is not None:
        check_positive("prompt-tokens", prompt_tokens)
        if prompts.prompts is not None or prompts.limit is not None:
            raise ConfigError("--prompt-tokens makes the one prompt itself; leave out --prompts and --limit")


def _read(prompts: PromptOptions) -> list[BenchPrompt]:
    return prompts.read(limit=_DEFAULT_LIMIT if prompts.prompts is None else None)


def _load(config: EngineConfig) -> "tuple[LLM, LLM | None]":
    """The engine without a drafter, and with one if there is one.

    They are two: an engine with a drafter also fills the drafter's context in plain rounds.
    """
    without = replace(config, speculation=False, speculative_config=None)
    if not config.speculation:
        return loading.load_llm(without), None
    first = loading.load_llm(config)
    if first.info()["speculation"] is None:
        return first, None
    return loading.load_llm(without), first


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


@dataclass(frozen=True)
class _Report:
    """Everything that a run found."""

    facts: Mapping[str, Any]
    column_facts: Mapping[str, Mapping[str, Any]]
    summaries: "Mapping[str, ColumnSummary]"
    floor: "Floor"
    identical: bool | None
    turns: "Sequence[Turn]"
    own_columns: frozenset[str]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            **self.facts,
            "floor": asdict(self.floor),
            "columns": {name: {**self.column_facts[name], **asdict(s)} for name, s in self.summaries.items()},
            "identical": self.identical,
            "notes": self.notes,
            "turns": [
                {
                    "prompt": turn.prompt_id,
                    "repeat": turn.repeat,
                    "read_bytes_per_s": turn.read_bytes_per_s,
                    "columns": {
                        name: {
                            "ttft_ms": answer.ttft_ms,
                            "tpot_ms": answer.tpot_ms,
                            "latency_ms": answer.latency_ms,
                            "draft_rounds": answer.draft_rounds,
                            "accepted_draft_tokens": answer.accepted_draft_tokens,
                        }
                        for name, answer in turn.generations.items()
                    },
                }
                for turn in self.turns
            ],
        }


def _report(
    plain: "LLM",
    columns: "Sequence[Column]",
    turns: "Sequence[Turn]",
    prompts: Sequence[EncodedPrompt],
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> _Report:
    from sparkgap.bench.latency import EngineColumn, floor_of, identical, summarize

    info = plain.info()
    weight_bytes = info["weight_bytes_per_token"]
    summaries = summarize(turns, weight_bytes)
    threads = {"threads": info["threads"], "instruction_set": info["instruction_set"], "device": info["device"]}
    facts = {
        "model": info["model"],
        "machine": {**machine, **threads},
        **settings,
        "prompts": [{"id": prompt.prompt.id, "tokens": len(prompt.token_ids)} for prompt in prompts],
    }
    own = frozenset(column.name for column in columns if isinstance(column, EngineColumn))
    facts_by_column = {column.name: column.facts for column in columns}
    return _Report(
        facts,
        facts_by_column,
        summaries,
        floor_of(turns, weight_bytes),
        identical(summaries),
        turns,
        own,
        _notes(machine),
    )


def _notes(machine: Mapping[str, Any]) -> list[str]:
    load, cores = machine["load_average"], machine["cores"]["total"]
    if load is None or load < _BUSY * cores:
        return []
    return [f"the machine was busy (load average {load:.1f} on {cores} cores): compare within this run only"]


def _print(report: _Report) -> None:
    from rich.console import Console
    from rich.table import Column as TableColumn
    from rich.table import Table

    console = Console(highlight=False)
    console.print(_heading(report.facts))
    names = list(report.summaries)
    table = Table("", *(f"{name}\n{_weights(report.column_facts[name])}" for name in names))
    for label, cells in _rows(list(report.summaries.values())):
        table.add_row(label, *cells)
    console.print(table)
    if len(names) > 1:
        speedups = Table(TableColumn("times as fast", no_wrap=True), "TTFT", "TPOT", "latency")
        for cells in _speedup_rows(report):
            speedups.add_row(*cells)
        console.print(speedups)
    floor = report.floor
    console.print(
        f"memory reads {_spread(floor.read_bytes_per_s, 1e-9)} GB/s; {floor.weight_bytes_per_token / 1e6:.1f} MB of "
        f"weights a token take {_number(floor.tpot_ms)} ms: the floor of plain decoding"
    )
    if report.identical is not None:
        same = "the same as" if report.identical else "DIFFERENT from"
        console.print(f"greedy tokens with speculation are {same} those without")
    for note in report.notes:
        console.print(note)


def _heading(facts: Mapping[str, Any]) -> str:
    lengths = sorted({prompt["tokens"] for prompt in facts["prompts"]})
    tokens = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    machine = facts["machine"]
    return (
        f"{facts['model']} on {machine['cpu']}. Threads: {machine['threads']}; prompts: {len(facts['prompts'])} of "
        f"{tokens} tokens; output tokens: {facts['max_tokens']}; repeats: {facts['repeats']}. Medians, with lowest to "
        "highest in parentheses."
    )


def _rows(columns: "Sequence[ColumnSummary]") -> list[tuple[str, list[str]]]:
    rows = [
        ("TTFT, ms", [_spread(column.ttft_ms) for column in columns]),
        ("TPOT, ms", [_spread(column.tpot_ms) for column in columns]),
        ("latency, ms", [_spread(column.latency_ms) for column in columns]),
        ("tokens/s", [_spread(column.output_tokens_per_s) for column in columns]),
        ("TPOT / floor", [_spread(column.times_floor) for column in columns]),
    ]
    if any(column.draft_rounds for column in columns):
        accepted = [column.accepted_per_round for column in columns]
        rows.append(("accepted / round", ["-" if number is None else f"{number:.2f}" for number in accepted]))
        rows.append(("draft rounds", [str(column.draft_rounds or "-") for column in columns]))
    leading = [column.same_leading_tokens for column in columns]
    rows.append(("same tokens first", [f"{s.median:.0f} ({s.lowest:.0f}-{s.highest:.0f})" for s in leading]))
    rows.append(("same as plain", [f"{column.same_answers} of {column.answers}" for column in columns]))
    return rows


def _speedup_rows(report: _Report) -> Iterator[list[str]]:
    """Each pair with one of the engine's own columns once: own ones over those before, and over peers."""
    summaries, own = report.summaries, report.own_columns
    for first, second in combinations(summaries, 2):
        if first in own:
            name, other = (second, first) if second in own else (first, second)
            speedup = summaries[name].speedup_over[other]
            yield [f"{name} / {other}", *(_spread(part) for part in (speedup.ttft, speedup.tpot, speedup.latency))]


def _weights(facts: Mapping[str, Any]) -> str:
    """The form of a column's weights, for its heading."""
    return str(facts.get("quantization") or facts.get("weights") or facts.get("dtype") or "")


def _spread(spread: "Spread | None", scale: float = 1) -> str:
    if spread is None:
        return "-"
    return f"{_number(spread.median * scale)} ({_number(spread.lowest * scale)}-{_number(spread.highest * scale)})"


def _number(value: float) -> str:
    """To three digits at least, without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0}f}"
