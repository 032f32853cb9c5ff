"""`sparkgap bench serve`: load on a server with OpenAI's interface, Sparkgap's or another's."""

import asyncio
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from sparkgap.cli.bench_options import PromptOptions, check_positive, progress_bar
from sparkgap.cli.console import print_json, use_utf8_output, write_text
from sparkgap.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from sparkgap.bench.serving.client import Answer, Question, ServerAddress
    from sparkgap.bench.serving.load import LoadResult
    from sparkgap.bench.serving.report import Distribution, LoadReport
    from sparkgap.bench.serving.scrape import ServedSpeculation
    from sparkgap.bench.serving.workload import LoadRequest

ENDPOINTS = ("chat", "completions")
"""Values of `--endpoint`."""


def _load(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Load", **settings)


@dataclass(frozen=True)
class LoadOptions:
    """How many requests are sent, and when."""

    num_prompts: Annotated[int, _load("--num-prompts", metavar="N", help="Requests to send.")] = 32
    max_concurrency: Annotated[
        int | None,
        _load("--max-concurrency", "-c", metavar="N", help="Most open requests; default: 1, or any with a rate."),
    ] = None
    request_rate: Annotated[
        float | None,
        _load("--request-rate", metavar="R", help="Requests a second at random (Poisson) times, whatever is open."),
    ] = None
    num_warmups: Annotated[
        int, _load("--num-warmups", metavar="N", help="Requests that are answered before, unmeasured.")
    ] = 1
    load_seed: Annotated[int, _load("--seed", help="Source of arrival times and of made-up prompts.")] = 0
    goodput: Annotated[
        list[str] | None,
        _load(
            "--goodput",
            metavar="METRIC:MS",
            help="Count requests within ttft, tpot or e2el milliseconds, such as ttft:500. May be repeated.",
        ),
    ] = None

    def check(self) -> None:
        """Raises ConfigError for a value out of its range."""
        check_positive("num-prompts", self.num_prompts)
        if self.max_concurrency is not None:
            check_positive("max-concurrency", self.max_concurrency)
        if self.num_warmups < 0:
            raise ConfigError(f"num-warmups must be at least 0, got {self.num_warmups}")
        rate = self.request_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"request-rate must be a number above 0, got {rate:g}")

    @property
    def concurrency(self) -> int | None:
        """Most open requests; None for no limit."""
        return self.max_concurrency or (1 if self.request_rate is None else None)


def serve_load(
    load: LoadOptions,
    prompts: PromptOptions,
    base_url: Annotated[
        str, typer.Option("--base-url", metavar="URL", help="The server, without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model to name; default: the first that the server names.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="OPENAI_API_KEY", show_envvar=True, help="Key to send."),
    ] = None,
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="chat or completions; default: chat, completions with --raw.")
    ] = "",
    input_len: Annotated[
        int | None,
        typer.Option("--input-len", metavar="N", help="Made-up prompts of about N tokens instead of written ones."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "--output-len", help="Most tokens of an answer.")] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length; most servers know it.")
    ] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the most probable token.")] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option("--extra-body", metavar="JSON", help="Further fields of every request.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Longest wait for the next piece of an answer.")
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Load a server with OpenAI's interface and measure its answers.

    Without --request-rate the loop is closed: --max-concurrency requests are open at any time. With it the loop is
    open: requests arrive at random times, and their clocks run from there.
    """
    use_utf8_output()
    load.check()
    check_positive("max-tokens", max_tokens)
    _check_server_options(base_url, timeout)
    asked_endpoint = _endpoint(endpoint, prompts.raw)
    extra = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {}), **_extra_body(extra_body)}
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError("sparkgap bench serve needs httpx; install it: pip install httpx")
    from sparkgap.bench.serving.client import ServerAddress
    from sparkgap.bench.serving.report import parse_objectives, summarize

    objectives_ms = parse_objectives(load.goodput or ())
    requests = _requests(load, prompts, input_len, max_tokens)
    address = ServerAddress(base_url.rstrip("/").removesuffix("/v1"), api_key, timeout)
    with progress_bar("Measuring", load.num_prompts) as advance:
        question, result, speculation = asyncio.run(
            _measure(address, model, asked_endpoint, extra, requests, load, advance)
        )
    report = summarize(result, objectives_ms)
    if not report.completed:
        kind, detail = next(iter(report.error_details.items()))
        raise ServerError(f"all {report.requests} requests failed, the first with {kind}: {detail}")
    settings = {
        "base_url": address.base_url,
        "model": question.model,
        "endpoint": asked_endpoint,
        "max_concurrency": load.concurrency,
        "request_rate": load.request_rate,
        "max_tokens": max_tokens,
        "input_len": input_len,
    }
    if as_json:
        print_json({**settings, **asdict(report), "speculation": None if speculation is None else asdict(speculation)})
    else:
        _print_report(settings, report, speculation)


async def _measure(
    address: "ServerAddress",
    model: str | None,
    endpoint: Any,
    extra: Mapping[str, Any],
    requests: "Sequence[LoadRequest]",
    load: LoadOptions,
    advance: Any,
) -> "tuple[Question, LoadResult, ServedSpeculation | None]":
    from sparkgap.bench.serving.client import Question, first_model
    from sparkgap.bench.serving.load import run_load
    from sparkgap.bench.serving.scrape import between, scrape
    from sparkgap.bench.serving.workload import LoadRequest

    async with address.client() as client:
        question = Question(model or await first_model(client), endpoint, extra)
        warmups = [LoadRequest(f"Warm-up {i}.", r.max_tokens) for i, r in enumerate(requests[: load.num_warmups])]
        if warmups:
            _check_warmups((await run_load(client, question, warmups, max_concurrency=load.concurrency)).answers)
        before = await scrape(client)
        result = await run_load(client, question, requests, max_concurrency=load.concurrency, advance=advance)
        return question, result, between(before, await scrape(client))


def _check_warmups(answers: "Sequence[Answer]") -> None:
    """A server that fails before the measurement is not measured. Raises ServerError."""
    for answer in answers:
        if answer.error is not None:
            raise ServerError(f"the server failed a warm-up request with {answer.error}: {answer.detail}")


def _requests(load: LoadOptions, prompts: PromptOptions, input_len: int | None, max_tokens: int) -> "list[LoadRequest]":
    from sparkgap.bench.serving.workload import from_prompts, synthetic, with_poisson_arrivals

    if input_len is not None:
        check_positive("input-len", input_len)
        if prompts.prompts is not None:
            raise ConfigError("--input-len makes prompts up, and --prompts names a file of them; use one of them")
        requests = synthetic(load.num_prompts, input_len, max_tokens, load.load_seed)
    else:
        requests = from_prompts(prompts.read(), load.num_prompts, max_tokens)
    if load.request_rate is None:
        return requests
    return with_poisson_arrivals(requests, load.request_rate, load.load_seed)


def _check_server_options(base_url: str, timeout_s: float) -> None:
    try:
        parts = urlsplit(base_url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(f"base-url must be a URL such as http://127.0.0.1:8000, got {base_url!r}")
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout must be a number of seconds above 0, got {timeout_s:g}")


def _endpoint(name: str, raw: bool) -> str:
    if name and name not in ENDPOINTS:
        raise ConfigError(f"endpoint must be one of {', '.join(ENDPOINTS)}, got {name!r}")
    if name == "chat" and raw:
        raise ConfigError("--raw continues the prompts as they are, which the chat endpoint does not; leave one out")
    return name or ("completions" if raw else "chat")


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"extra-body must be a JSON object, and is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"extra-body must be a JSON object, got {text}")
    return fields


def _print_report(settings: Mapping[str, Any], report: "LoadReport", speculation: "ServedSpeculation | None") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    load = f"{settings['request_rate']:g} requests/s" if settings["request_rate"] else "closed loop"
    limit = settings["max_concurrency"]
    at_once = "" if limit is None else f", at most {limit} open"
    write_text(f"{settings['model']} at {settings['base_url']} ({settings['endpoint']}), {load}{at_once}\n")
    write_text(
        f"{report.completed} of {report.requests} requests in {report.duration_s:.2f} s, {report.prompt_tokens} prompt "
        f"and {report.completion_tokens} output tokens, up to {report.peak_concurrency} requests open\n"
    )
    write_text(f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s\n")
    table = Table("ms", "mean", "p50", "p90", "p95", "p99", "max")
    rows = {
        "time to first token": report.ttft_ms,
        "time per output token": report.tpot_ms,
        "gap between pieces": report.itl_ms,
        "whole answer": report.e2el_ms,
    }
    for name, row in rows.items():
        table.add_row(name, *_cells(row))
    console.print(table)
    if not report.tokens_are_counted_by_server:
        write_text("The server did not count tokens: pieces of text are counted instead.\n")
    if report.goodput is not None:
        limits = ", ".join(f"{name} within {limit:g} ms" for name, limit in report.goodput.objectives_ms.items())
        write_text(f"{limits}: {report.goodput.share:.1%}, {report.goodput.requests_per_s:.2f} requests/s\n")
    if speculation is not None:
        each = speculation.accepted_per_round
        write_text(
            f"{speculation.acceptance_rate:.1%} of {speculation.draft_tokens} draft tokens accepted"
            + ("" if each is None else f", {each:.2f} a round")
            + "\n"
        )
    for kind, number in report.errors.items():
        write_text(f"{number} failed, {kind}: {report.error_details[kind]}\n")


def _cells(row: "Distribution") -> list[str]:
    values = (row.mean, row.p50, row.p90, row.p95, row.p99, row.max)
    return ["-" if value is None else f"{value:.1f}" for value in values]
