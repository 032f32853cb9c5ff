"""What `sparkgap bench latency` reports: JSON, tables on a terminal, tables in Markdown."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkgap.bench.prompts import EncodedPrompt
from sparkgap.cli.console import write_text

if TYPE_CHECKING:
    from sparkgap.api import LLM
    from sparkgap.bench.latency import Column, ColumnSummary, Floor, Spread, Turn

_BUSY = 0.5
"""Load average for each core, before the run, above which a report says so."""


@dataclass(frozen=True)
class Report:
    """Everything that a run found."""

    facts: dict[str, Any]
    column_facts: Mapping[str, Mapping[str, Any]]
    summaries: "dict[str, ColumnSummary]"
    floor: "Floor"
    identical: bool | None
    turns: "Sequence[Turn]"
    own_columns: frozenset[str]
    graph_counts: Mapping[str, Mapping[str, Any]]
    notes: list[str]
    phases: "dict[str, dict[str, Spread]]" = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            **self.facts,
            "floor": asdict(self.floor),
            "columns": {name: self._column(name) for name in self.summaries},
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
                            "draft_tokens": answer.draft_tokens,
                            "accepted_draft_tokens": answer.accepted_draft_tokens,
                        }
                        for name, answer in turn.generations.items()
                    },
                }
                for turn in self.turns
            ],
        }

    def _column(self, name: str) -> dict[str, Any]:
        column = {**self.column_facts[name], **asdict(self.summaries[name])}
        if name in self.graph_counts:
            column["graph_counts"] = self.graph_counts[name]
        if name in self.phases:
            column["phases_ms"] = {phase: asdict(spread) for phase, spread in self.phases[name].items()}
        return column


def make_report(
    plain: "LLM",
    columns: "Sequence[Column]",
    turns: "Sequence[Turn]",
    prompts: Sequence[EncodedPrompt],
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Report:
    """What the turns say.

    Args:
        plain: the engine without a drafter.
        columns: what was measured.
        turns: the measurements.
        prompts: what was asked.
        machine: `bench.machine.machine_facts`.
        settings: what else to tell.
    """
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
    engines = [column for column in columns if isinstance(column, EngineColumn)]
    own = frozenset(column.name for column in engines)
    speculative = [column.name for column in engines if column.info["speculation"] is not None]
    facts_by_column = {column.name: column.facts for column in columns}
    return Report(
        facts,
        facts_by_column,
        summaries,
        floor_of(turns, weight_bytes),
        identical(summaries, speculative),
        turns,
        own,
        {column.name: column.graph_counts for column in engines},
        _notes(machine),
    )


def _notes(machine: Mapping[str, Any]) -> list[str]:
    load, cores = machine["load_average"], machine["cores"]["total"]
    if load is None or load < _BUSY * cores:
        return []
    return [f"the machine was busy (load average {load:.1f} on {cores} cores): compare within this run only"]


class _Table(NamedTuple):
    """Cells with headings; the first column holds labels."""

    headings: list[str]
    rows: list[list[str]]


def print_report(report: Report, as_markdown: bool = False) -> None:
    """Tables and sentences, for a terminal or in Markdown."""
    tables = [_columns_table(report), *_phase_tables(report)]
    if len(report.summaries) > 1:
        tables.append(_Table(["times as fast", "TTFT", "TPOT", "latency"], list(_speedup_rows(report))))
    if as_markdown:
        parts = [_heading(report.facts), *map(_markdown, tables), *_sentences(report)]
        write_text("\n\n".join(parts) + "\n")
        return
    from rich.console import Console
    from rich.table import Column as TableColumn
    from rich.table import Table

    console = Console(highlight=False)
    console.print(_heading(report.facts))
    for headings, rows in tables:
        # Figures that do not fit go on in the next line; cut off they would be wrong ones.
        table = Table(TableColumn(headings[0], no_wrap=True), *(TableColumn(h, overflow="fold") for h in headings[1:]))
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    for sentence in _sentences(report):
        console.print(sentence)


def _markdown(table: _Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace(chr(10), ', ').replace('|', chr(92) + '|') for cell in cells)} |"

    rule = ["---", *["---:"] * (len(table.headings) - 1)]
    return "\n".join(map(line, [table.headings, rule, *table.rows]))


def _sentences(report: Report) -> list[str]:
    floor = report.floor
    sentences = [
        f"memory reads {_spread(floor.read_bytes_per_s, 1e-9)} GB/s; {floor.weight_bytes_per_token / 1e6:.1f} MB of "
        f"weights a token take {_number(floor.tpot_ms)} ms: the floor of plain decoding"
    ]
    if report.identical is not None:
        same = "the same as" if report.identical else "DIFFERENT from"
        sentences.append(f"greedy tokens with speculation are {same} those without")
    return sentences + report.notes


def _heading(facts: Mapping[str, Any]) -> str:
    lengths = sorted({prompt["tokens"] for prompt in facts["prompts"]})
    tokens = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    machine = facts["machine"]
    return (
        f"{facts['model']} on {machine['cpu']}. Threads: {machine['threads']}; prompts: {len(facts['prompts'])} of "
        f"{tokens} tokens; output tokens: {facts['max_tokens']}; repeats: {facts['repeats']}. Medians, with lowest to "
        "highest in parentheses."
    )


def _columns_table(report: Report) -> _Table:
    names, columns = list(report.summaries), list(report.summaries.values())
    rows = [
        ["TTFT, ms", *(_spread(column.ttft_ms) for column in columns)],
        ["TPOT, ms", *(_spread(column.tpot_ms) for column in columns)],
        ["latency, ms", *(_spread(column.latency_ms) for column in columns)],
        ["tokens/s", *(_spread(column.output_tokens_per_s) for column in columns)],
        ["TPOT / floor", *(_spread(column.times_floor) for column in columns)],
    ]
    if any(column.draft_rounds for column in columns):
        for label, count in _PER_REQUEST.items():
            rows.append([label, *(_optional((c.per_request or {}).get(count), "{:.1f}") for c in columns)])
        rows.append(["accepted / round", *(_optional(column.accepted_per_round, "{:.2f}") for column in columns)])
        rows.append(["acceptance rate", *(_optional(column.acceptance_rate, "{:.1%}") for column in columns)])
    rows.append(["graphs, of them captured late", *(_captures(report.graph_counts.get(name)) for name in names)])
    leading = [column.same_leading_tokens for column in columns]
    rows.append(["same tokens first", *(f"{s.median:.0f} ({s.lowest:.0f}-{s.highest:.0f})" for s in leading)])
    rows.append(["same as plain", *(f"{column.same_answers} of {column.answers}" for column in columns)])
    return _Table(["", *(f"{name}\n{_weights(report.column_facts[name])}" for name in names)], rows)


_PER_REQUEST = {
    "accepted draft tokens / request": "accepted_draft_tokens",
    "draft tokens / request": "draft_tokens",
    "draft rounds / request": "draft_rounds",
}
"""Label and name of each mean count."""


def _captures(counts: Mapping[str, Any] | None) -> str:
    if counts is None:
        return "-"
    late = counts["captures_since_startup"]
    return f"{counts['captures_at_startup'] + late}, {late}"


def _phase_tables(report: Report) -> Iterator[_Table]:
    """Times of a round's phases, and how many passes of one row they take; nothing where they were not measured."""
    if not report.phases:
        return
    names = list(report.phases)
    decodes = [report.phases[name]["decode"] for name in names]
    times, ratios = [], []
    for phase, label in _PHASES.items():
        spreads = [report.phases[name].get(phase) for name in names]
        times.append([f"{label}, ms", *map(_spread, spreads)])
        if phase != "decode":
            shares = [None if s is None else s.median / d.median for s, d in zip(spreads, decodes, strict=True)]
            ratios.append([label, *(_optional(share, "{:.3f}") for share in shares)])
    yield _Table([f"phase, after {report.facts['phase_context_tokens']} tokens", *names], times)
    yield _Table(["medians / 1-row decode pass", *names], ratios)


_PHASES = {
    "decode": "1-row decode pass",
    "verify": "verification pass",
    "draft": "draft",
    "context": "context update",
    "round": "whole round",
}
"""Phase and label."""


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _speedup_rows(report: Report) -> Iterator[list[str]]:
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
