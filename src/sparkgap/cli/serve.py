"""`sparkgap serve`: an OpenAI-compatible server."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from sparkgap.cli import loading
from sparkgap.cli.console import use_utf8_output, write_text
from sparkgap.cli.interrupts import ending_at_once
from sparkgap.cli.options import EngineOptions, ModelArgument, with_model_argument
from sparkgap.cli.serve_options import ServeOptions, configuration_text, read_config
from sparkgap.errors import ConfigError
from sparkgap.server.listener import bind

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    context: typer.Context,
    server: ServeOptions,
    engine: EngineOptions,
    model_argument: ModelArgument = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", is_eager=True, callback=read_config, help="TOML file with any of these options."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the options in effect, as TOML with their origins, and exit.")
    ] = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's interface.

    An option is taken from the command line, else from the environment (--max-num-seqs is SPARKGAP_MAX_NUM_SEQS), else
    from the --config file, else it has its default. SIGTERM and Ctrl-C finish the running requests and stop; a second
    one stops at once.
    """
    use_utf8_output()
    settings = server.settings()
    engine = with_model_argument(context, engine, model_argument)
    engine_config = server.engine_config(engine)
    if dry_run:
        write_text(configuration_text(context))
        return
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"sparkgap serve needs {', '.join(missing)}; install the extra: pip install 'sparkgap[server]'"
        )
    listener = bind(settings)
    with ending_at_once():
        from sparkgap.server import run

    run.serve(settings, listener, lambda: loading.load_llm(engine_config))
