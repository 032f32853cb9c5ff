"""What `sparkgap trace` shows of intervals."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

if TYPE_CHECKING:
    from sparkgap.bench.trace.intervals import IntervalReport, Quartiles

_LABELS = {
    "context_graphs": "context graphs a round",
    "context_kv_writes": "context KV scatters a round",
    "projection_to_last_write_ms": "context projection to scatter, ms",
    "draft_ms": "draft envelope, ms",
    "target_ms": "target envelope, ms",
    "draft_to_target_ms": "draft launch to target launch, ms",
    "verification_to_next_ms": "verification to next launch, ms",
    "verification_to_next_share": "  share of the round",
    "round_ms": "full round, ms",
    "uncovered_ms": "  outside recorded compute, ms",
    "uncovered_share": "  share of the round",
}
"""Rows of the table, by the interval's name."""


def print_intervals(reports: "Mapping[str, IntervalReport]") -> None:
    """A table with a column for each mode: medians, and of a single mode also the quartiles of what varies."""
    spread = len(reports) == 1
    title = "steady rounds: median (quartiles)" if spread else "steady rounds: medians"
    table = Table(
        Column("", no_wrap=True),
        *(Column(name, overflow="fold") for name in reports),
        title=title,
        title_justify="left",
    )
    for cells in interval_rows(reports, spread=spread):
        table.add_row(*cells)
    Console(highlight=False).print(table)


def interval_rows(reports: "Mapping[str, IntervalReport]", *, spread: bool) -> Iterator[list[str]]:
    """A label and a cell for each mode, row by row."""
    yield ["rounds", *(str(report.rounds) for report in reports.values())]
    if any(report.other_rounds for report in reports.values()):
        yield ["  with a draft", *("yes" if report.drafted else "no" for report in reports.values())]
        yield ["  others, left out", *(str(report.other_rounds) for report in reports.values())]
    for name, label in _LABELS.items():
        yield [label, *(_cell(name, report.intervals[name], spread) for report in reports.values())]
    yield ["host calls after verification", *(f"{report.host_calls['total']:.1f}" for report in reports.values())]
    for name, label in (
        ("launches", "  launches"),
        ("waits", "  waits"),
        ("copies", "  copies"),
        ("other_operations", "  other torch operations"),
    ):
        yield [label, *(f"{report.host_calls[name]:.1f}" for report in reports.values())]


def _cell(name: str, value: "Quartiles | None", spread: bool) -> str:
    if value is None:
        return "-"
    form = ".2%" if name.endswith("_share") else ".3f" if name.endswith("_ms") else "g"
    if not spread or form == "g":
        return f"{value.median:{form}}"
    return f"{value.median:{form}} ({value.lower:{form}}-{value.upper:{form}})"
