"""Options of `sparkgap serve`, and the three places that they come from beside their defaults."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sparkgap.cli.options import EngineOptions, parse_bytes
from sparkgap.config import EngineConfig
from sparkgap.config.checks import is_unicode
from sparkgap.errors import ConfigError
from sparkgap.server.settings import LOG_FORMATS, LOG_LEVELS, ServerSettings

ENVIRONMENT_PREFIX = "SPARKGAP"
"""`--max-num-seqs` is `SPARKGAP_MAX_NUM_SEQS` in the environment."""

SECRETS = ("api_key",)
"""Options whose values are never shown."""

MODEL_ARGUMENT = "model_argument"
"""Parameter of the command that names the model without `--model`."""

_UNSAVED = ("config", "dry_run", "help", MODEL_ARGUMENT)


def _server(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Server", **settings)


def _limit(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Limits", **settings)


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take a TOML file's values as defaults of the command's options. Called by typer before other options are read.

    Raises:
        ConfigError: the file cannot be read, or has a key that is no option.
    """
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from error
    options = {parameter.name or "": parameter for parameter in context.command.params}
    known = [name for name in options if name not in _UNSAVED]
    names: dict[str, str] = {}
    for key in values:
        if (other := names.setdefault(_known(key, known, path), key)) != key:
            raise ConfigError(
                f"configuration file {path} has both {other} and {key}, which are the same; leave one out"
            )
    context.default_map = {
        name: _as_text(key, values[key], path, is_list=bool(getattr(options[name], "multiple", False)))
        for name, key in names.items()
    }
    return path


def _known(key: str, known: list[str], path: Path) -> str:
    name = key.replace("-", "_")
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        flags = [flag.replace("_", "-") for flag in (close or sorted(known))]
        hint = f"did you mean {flags[0]}?" if close else f"there are {', '.join(flags)}"
        raise ConfigError(f"configuration file {path} has an unknown key {key!r}; {hint}")
    return name


def _as_text(key: str, value: Any, path: Path, *, is_list: bool) -> Any:
    """A value as the command line would give it, so that it is checked in the same way."""
    if is_list:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
        raise ConfigError(f"configuration file {path}: {key} must be a list of texts, got {value!r}")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping) and key.replace("-", "_") == "speculative_config":
        try:
            return json.dumps(value)
        except TypeError as error:
            raise ConfigError(f"configuration file {path}: {key} has a date, which is no setting's value") from error
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"configuration file {path}: {key} must be text, a number, true or false, got {value!r}")


@dataclass(frozen=True)
class ServeOptions:
    """Where the server listens, and what it allows."""

    host: Annotated[str, _server("--host", help="Address to listen on; 0.0.0.0 is all of this machine's.")] = (
        ServerSettings.host
    )
    port: Annotated[int, _server("--port", help="TCP port; 0 takes a free one.")] = ServerSettings.port
    api_key: Annotated[
        str | None,
        _server("--api-key", metavar="KEY", help="Key that clients must send; better in the environment or the file."),
    ] = None
    served_model_name: Annotated[
        str | None, _server("--served-model-name", metavar="NAME", help="Model name for clients; default: --model.")
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _server("--cors-origin", metavar="ORIGIN", help="Web origin that browsers may call from. May be repeated."),
    ] = None
    log_format: Annotated[str, _server("--log-format", help=f"One of {', '.join(LOG_FORMATS)}.")] = (
        ServerSettings.log_format
    )
    log_level: Annotated[str, _server("--log-level", help=f"One of {', '.join(LOG_LEVELS)}.")] = (
        ServerSettings.log_level
    )
    log_prompts: Annotated[bool, _server("--log-prompts", help="Write prompts and answers to the log.")] = False
    max_queued_seqs: Annotated[
        int, _limit("--max-queued-seqs", help="Most sequences that wait; more are refused with status 429.")
    ] = ServerSettings.max_queued_seqs
    max_prompt_tokens: Annotated[
        int | None, _limit("--max-prompt-tokens", help="Longest prompt; default: --max-model-len.")
    ] = None
    max_body_size: Annotated[str, _limit("--max-body-size", metavar="SIZE", help="Largest request body.")] = "1M"
    max_connections: Annotated[int, _limit("--max-connections", help="Most open connections.")] = (
        ServerSettings.max_connections
    )
    max_num_batched_tokens: Annotated[
        int, _limit("--max-num-batched-tokens", help="Most prompt tokens that are computed at once.")
    ] = EngineConfig.max_num_batched_tokens
    max_decode_stretch: Annotated[
        float,
        _limit(
            "--max-decode-stretch",
            metavar="FACTOR",
            help="How many times as long as one that only decodes a step may take that also reads prompts.",
        ),
    ] = EngineConfig.max_decode_stretch
    no_enable_prefix_caching: Annotated[
        bool, _limit("--no-enable-prefix-caching", help="Compute all of a prompt, also where its KV is there already.")
    ] = False
    request_timeout: Annotated[
        float,
        _limit("--request-timeout", metavar="SECONDS", help="Longest time for a request, waiting included; 0: none."),
    ] = 600.0
    read_timeout: Annotated[
        float, _limit("--read-timeout", metavar="SECONDS", help="Longest time to send a request's head, or its body.")
    ] = ServerSettings.read_timeout_s
    write_timeout: Annotated[
        float, _limit("--write-timeout", metavar="SECONDS", help="Longest time for which a client may read nothing.")
    ] = ServerSettings.write_timeout_s
    stall_timeout: Annotated[
        float,
        _limit("--stall-timeout", metavar="SECONDS", help="Time without a token after which /health fails."),
    ] = ServerSettings.stall_timeout_s
    drain_timeout: Annotated[
        float,
        _limit("--drain-timeout", metavar="SECONDS", help="Longest time to finish requests after SIGTERM; 0: no end."),
    ] = 0.0

    def engine_config(self, engine: EngineOptions) -> EngineConfig:
        """The engine's configuration. Raises ConfigError."""
        return replace(
            engine.config(),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_decode_stretch=self.max_decode_stretch,
            enable_prefix_caching=not self.no_enable_prefix_caching,
        )

    def settings(self) -> ServerSettings:
        """The server's settings. Raises ConfigError."""
        return ServerSettings(
            host=self.host,
            port=self.port,
            api_key=self.api_key,
            served_model_name=self.served_model_name,
            max_queued_seqs=self.max_queued_seqs,
            max_prompt_tokens=self.max_prompt_tokens,
            max_body_bytes=parse_bytes(self.max_body_size, "max-body-size"),
            max_connections=self.max_connections,
            request_timeout_s=None if self.request_timeout == 0 else self.request_timeout,
            read_timeout_s=self.read_timeout,
            write_timeout_s=self.write_timeout,
            stall_timeout_s=self.stall_timeout,
            drain_timeout_s=None if self.drain_timeout == 0 else self.drain_timeout,
            cors_origins=tuple(self.cors_origin or ()),
            log_format=self.log_format,
            log_level=self.log_level,
            log_prompts=self.log_prompts,
        )


def configuration_text(context: typer.Context) -> str:
    """The options in effect as a TOML file that `--config` takes, each with the place that it came from."""
    lines = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _UNSAVED:
            continue
        flag, value = name.replace("_", "-"), context.params[name]
        source = _source(context, name)
        if name == "model" and context.params[MODEL_ARGUMENT] is not None:
            value, source = context.params[MODEL_ARGUMENT], "from the command line"
        if value is None or value in ([], ()):
            lines.append((f"# {flag} is not set", source))
        elif name in SECRETS:
            lines.append((f"# {flag} is set and not shown", source))
        elif isinstance(value, str) and not is_unicode(value):
            lines.append((f"# {flag} is set and no text that TOML can hold", source))
        else:
            lines.append((f"{flag} = {_toml(value)}", source))
    width = max(len(line) for line, _ in lines)
    return "".join(f"{line:<{width}}  # {source}\n" for line, source in lines)


def _toml(value: Any) -> str:
    """A value as TOML, whose strings are those of JSON but for characters that must, or must not, be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    kind = "DEFAULT" if source is None else source.name
    return {
        "COMMANDLINE": f"from --{name.replace('_', '-')}",
        "ENVIRONMENT": f"from {ENVIRONMENT_PREFIX}_{name.upper()}",
        "DEFAULT_MAP": "from the file",
    }.get(kind, "default")
