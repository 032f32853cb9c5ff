"""What `check` and the benches share: their prompts, and a model that speculates."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sparkgap.bench.prompts import BenchPrompt, builtin_prompts, read_prompts, spread
from sparkgap.cli import loading
from sparkgap.cli.console import stderr_console
from sparkgap.cli.options import EngineOptions
from sparkgap.config import EXECUTION_MODES, EngineConfig, SpeculativeConfig
from sparkgap.errors import ConfigError

if TYPE_CHECKING:
    from sparkgap.api import LLM


PROGRESS_LINE_S = 5.0
"""Least time between two lines of progress where there is no terminal to draw a bar on."""


def _prompts(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Prompts", **settings)


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts are used."""

    prompts: Annotated[
        Path | None,
        _prompts("--prompts", metavar="FILE", help="JSONL with prompt, id, category, or text with one prompt a line."),
    ] = None
    limit: Annotated[int | None, _prompts("--limit", help="Use only so many, spread evenly over a file.")] = None
    raw: Annotated[
        bool, _prompts("--raw", help="Continue the prompts as they are, without the model's chat template.")
    ] = False

    def read(self, builtin: Sequence[BenchPrompt] | None = None, limit: int | None = None) -> list[BenchPrompt]:
        """The prompts of the file, else the built-in ones.

        A limit takes the first of the built-in ones, which are in turn of every category, and an even spread of a
        file's, which may be sorted.

        Args:
            builtin: other built-in prompts than the usual.
            limit: how many, where `--limit` does not say.

        Raises:
            PromptError: as `read_prompts`.
            ConfigError: the limit is below 1.
        """
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")
        if self.prompts is not None:
            return spread(read_prompts(self.prompts), self.limit or limit)
        prompts = builtin_prompts() if builtin is None else list(builtin)
        return prompts[: self.limit or limit]


def check_positive(name: str, value: int) -> None:
    """Raises ConfigError unless `value` is at least 1."""
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")


def mode_configs(config: EngineConfig, modes: Sequence[str]) -> dict[str, EngineConfig]:
    """The configuration in each of some execution modes, by their names.

    Modes outside the pipeline verify all draft tokens: `prefix_scheduling` is the pipeline's alone.

    Raises:
        ConfigError: there is no such mode, one cannot run with the configuration, or that says itself how rounds are
            run.
    """
    for mode in modes:
        if mode not in EXECUTION_MODES:
            raise ConfigError(f"mode must be one of {', '.join(EXECUTION_MODES)}, got {mode!r}")
    for name in sorted({name for mode in modes for name in EXECUTION_MODES[mode]}):
        if getattr(config, name) != "auto":
            option = name.replace("_", "-")
            raise ConfigError(f"a mode sets {option} itself; leave out --{option}, or the modes")
    wanted = config.speculative_config
    if wanted is not None and wanted.adaptive_length and "pipeline" in modes:
        others = [mode for mode in EXECUTION_MODES if mode != "pipeline"]
        raise ConfigError(f"mode pipeline cannot run adaptive_length; name others of {', '.join(others)} with --mode")
    carried = config
    if wanted is not None and wanted.prefix_scheduling:
        carried = replace(config, speculative_config=replace(wanted, prefix_scheduling=None))
    return {mode: replace(config if mode == "pipeline" else carried, **EXECUTION_MODES[mode]) for mode in modes}


def speculating_config(engine: EngineOptions, num_seqs: int) -> EngineConfig:
    """The configuration of a model with its drafter, which decodes at least `num_seqs` sequences together.

    It drafts for all of them, unless it says itself when to draft: drafts are looked at also where they do not pay.

    Raises:
        ConfigError: speculation is switched off.
    """
    if engine.no_speculation:
        raise ConfigError("--no-speculation leaves nothing to measure; leave it out")
    config = engine.config()
    most = max(config.max_num_seqs, num_seqs)
    # Asking for speculation makes a missing drafter an error.
    wanted = config.speculative_config or SpeculativeConfig()
    if wanted.limits_batches:
        wanted = replace(wanted, disable_by_batch_size=most)
    return replace(config, max_num_seqs=most, speculative_config=wanted)


def load_verifying_llm(engine: EngineOptions, num_seqs: int) -> "LLM":
    """A model with its drafter, which decodes at least `num_seqs` sequences together and verifies all draft tokens.

    It verifies as many as pay if it says itself so.

    Raises:
        ConfigError: speculation is switched off, or there is no drafter, named or shipped.
        SparkgapError: the model or the drafter cannot be had.
    """
    config = speculating_config(engine, num_seqs)
    wanted = config.speculative_config
    assert wanted is not None
    if wanted.prefix_scheduling is None:
        wanted = replace(wanted, prefix_scheduling=False)
    return loading.load_llm(replace(config, speculative_config=wanted))


class Advance(Protocol):
    """Moves a progress bar on."""

    def __call__(self, number: int) -> None:
        """By `number` items."""
        ...


@contextmanager
def progress_bar(description: str, total: int, *, transient: bool = False) -> Iterator[Advance]:
    """A bar on standard error; a line every few seconds when that is not a terminal.

    Args:
        description: what is done.
        total: items.
        transient: whether the bar goes away at the end.
    """
    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=transient, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)

        done, told_s = 0, time.monotonic()

        def advance(number: int) -> None:
            nonlocal done, told_s
            bar.advance(task, number)
            done += number
            if not console.is_terminal and time.monotonic() - told_s >= PROGRESS_LINE_S:
                told_s = time.monotonic()
                console.print(f"{description}: {done} of {total}")

        yield advance
