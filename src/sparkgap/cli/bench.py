"""`sparkgap bench`: measurements."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from sparkgap.bench.prompts import encode_prompts
from sparkgap.cli.bench_options import PromptOptions, check_positive, load_verifying_llm, progress_bar
from sparkgap.cli.bench_serve import serve_load
from sparkgap.cli.console import print_json, use_utf8_output
from sparkgap.cli.latency import latency
from sparkgap.cli.options import EngineOptions, with_option_groups
from sparkgap.cli.quality import quality
from sparkgap.config import SamplingParams

if TYPE_CHECKING:
    from sparkgap.bench.acceptance import Acceptance

bench_app = typer.Typer(help="Measure latency, acceptance, quality, and servers under load.", no_args_is_help=True)


def acceptance(
    engine: EngineOptions,
    prompts: PromptOptions,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 takes the most probable token (greedy).")
    ] = 0.0,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts decoded together.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Measure how many draft tokens the target accepts, by category of prompts and overall.

    All are verified, also where fewer would pay, unless the configuration asks for prefix_scheduling.
    """
    use_utf8_output()
    check_positive("batch-size", batch_size)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    chosen = prompts.read()
    llm = load_verifying_llm(engine, batch_size)
    from sparkgap.bench.acceptance import by_category, measure_acceptance, summarize

    encoded = encode_prompts(llm, chosen, raw=prompts.raw)
    with progress_bar("Measuring", len(encoded)) as advance:
        measured = measure_acceptance(llm, encoded, params, batch_size=batch_size, advance=advance)
    overall = summarize([metrics for _, metrics in measured])
    categories = by_category(measured)
    if as_json:
        print_json(
            {
                "max_tokens": max_tokens,
                "temperature": temperature,
                "batch_size": batch_size,
                "speculation": llm.info()["speculation"],
                "overall": asdict(overall),
                "categories": {name: asdict(category) for name, category in categories.items()},
            }
        )
    else:
        _print_tables({**categories, "all": overall})


def _print_tables(groups: "Mapping[str, Acceptance]") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("", "prompts", "tokens", "rounds", "accepted / round", "tokens / round", "acceptance rate")
    for name, group in groups.items():
        table.add_row(
            name,
            str(group.num_prompts),
            str(group.completion_tokens),
            str(group.draft_rounds),
            _number(group.accepted_per_round, "{:.2f}"),
            _number(group.tokens_per_round, "{:.2f}"),
            _number(group.acceptance_rate, "{:.1%}"),
        )
    console.print(table)
    places = range(max(len(group.acceptance_by_position) for group in groups.values()))
    positions = Table("accepted at draft position", *(str(place + 1) for place in places))
    for name, group in groups.items():
        positions.add_row(name, *(_number(share, "{:.1%}") for share in group.acceptance_by_position))
        given = "given all before" if len(groups) == 1 else f"{name}, given all before"
        positions.add_row(given, *(_number(share, "{:.1%}") for share in group.conditional_acceptance))
    if places:
        console.print(positions)
    for reason, number in groups["all"].not_speculated.items():
        console.print(f"{number} rounds without speculation: {reason}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


bench_app.command()(with_option_groups(acceptance))
bench_app.command()(with_option_groups(latency))
bench_app.command()(with_option_groups(quality))
bench_app.command("serve")(with_option_groups(serve_load))
