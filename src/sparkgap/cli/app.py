"""The `sparkgap` program: its commands, and what becomes of errors."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from sparkgap import __version__
from sparkgap.cli.bench import bench_app
from sparkgap.cli.cache import cache
from sparkgap.cli.chat import chat
from sparkgap.cli.check import check
from sparkgap.cli.console import print_error, write_text
from sparkgap.cli.generate import generate
from sparkgap.cli.helptext import tidy_help
from sparkgap.cli.info import info
from sparkgap.cli.options import with_option_groups
from sparkgap.cli.pull import pull
from sparkgap.cli.quantize import quantize
from sparkgap.cli.serve import serve
from sparkgap.cli.serve_options import ENVIRONMENT_PREFIX
from sparkgap.cli.trace import trace
from sparkgap.cli.train import train
from sparkgap.errors import OutputError, SparkgapError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
EXIT_BROKEN_PIPE = 1
"""The reader of the output went away."""

app = typer.Typer(
    name="sparkgap",
    help="LLM inference for few users and low latency.",
    context_settings={"help_option_names": ["--help", "-h"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sparkgap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_COMMANDS: tuple[Callable[..., Any], ...] = (generate, chat, pull, cache, info, check, trace, quantize, train)
for _command in _COMMANDS:
    app.command()(with_option_groups(_command))
app.command(context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX})(with_option_groups(serve))
app.add_typer(bench_app, name="bench")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program and exit.

    Exit status: 0; 2 after one line on standard error for input that cannot be served; 130 after Ctrl-C; 1 when
    the reader of the output went away.

    Args:
        arguments: what follows the program's name; None takes the process's own.
    """
    try:
        status = _run(arguments)
    except BrokenPipeError:
        _abandon_output()
        status = EXIT_BROKEN_PIPE
    sys.exit(status)


def _abandon_output() -> None:
    """Python flushes standard output once more when it ends: give it a place where that cannot fail."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    command = typer.main.get_command(app)
    tidy_help(command)
    try:
        status = command.main(args=arguments, prog_name="sparkgap", standalone_mode=False)
        write_text("")  # flushes
        return status if isinstance(status, int) else 0
    except BrokenPipeError:
        raise
    except (OutputError, OSError) as error:
        # Files are read where their errors are told by name; what is left is help that cannot be written.
        print_error(str(error))
        _abandon_output()
        return EXIT_BAD_INPUT
    except SparkgapError as error:
        print_error(str(error))
        return EXIT_BAD_INPUT
    except typer.TyperException as error:
        print_error(_usage_message(error))
        return EXIT_BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED


def _usage_message(error: typer.TyperException) -> str:
    message = error.format_message().rstrip(".") or "no command given"
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message}; see {context.command_path} --help"
