"""Structured logs: one line an event, as `key=value` pairs or as a JSON object."""

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from sparkgap.server.errors import ApiError
from sparkgap.server.settings import ServerSettings

_logger = logging.getLogger("sparkgap.server")


@dataclass
class RequestLog:
    """What is written about one HTTP request when it is over.

    Attributes:
        request_id: also in the response's `X-Request-Id`.
        started_s: arrival, as `time.perf_counter` gives it.
        handler: path of the route that served it, for metrics; names no part that a client chose.
        fields: what the route adds.
    """

    request_id: str
    started_s: float = field(default_factory=time.perf_counter)
    handler: str = "none"
    fields: dict[str, Any] = field(default_factory=dict)

    def refused(self, error: ApiError) -> None:
        """Say in the line what the client was told: the word for programs, nothing that the client wrote."""
        self.fields["error"] = error.code

    def write(self, *, method: str, path: str, status: int, client: str) -> None:
        """Write the line."""
        took_ms = (time.perf_counter() - self.started_s) * 1000
        facts = {"request_id": self.request_id, "client": client, "method": method, "path": path, "status": status}
        write_event(logging.INFO, "request", **facts, duration_ms=round(took_ms, 1), **self.fields)


def write_event(level: int, event: str, **fields: Any) -> None:
    """Write an event with its fields; values are JSON's types."""
    if _logger.isEnabledFor(level):
        _logger.log(level, event, extra={"fields": fields})


def write_failure(event: str, error: BaseException, **fields: Any) -> None:
    """Write an event with the traceback of what caused it."""
    _logger.error(event, exc_info=error, extra={"fields": fields})


def configure_logging(settings: ServerSettings) -> None:
    """Send all logs of this process to standard error, in the settings' format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if settings.log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("sparkgap").setLevel(settings.log_level.upper())
    # What clients do wrong on the wire is nothing to be told for each of them.
    logging.getLogger("uvicorn").setLevel("DEBUG" if settings.log_level == "debug" else "ERROR")


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return {
        "time": f"{created}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "event": record.getMessage(),
        **getattr(record, "fields", {}),
    }


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = _facts(record)
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = _facts(record)
        line = f"{facts.pop('time')} {facts.pop('level'):<7} {_word(facts.pop('event'), spaces=True)}"
        line += "".join(f" {name}={_word(value)}" for name, value in facts.items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _word(value: Any, spaces: bool = False) -> str:
    """A value on one line; quoted, as JSON, where it would not read as one word."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = text.isascii() and text.isprintable() and text != ""
    if plain and (spaces or not isinstance(value, str) or not set(text) & set(' "=\\')):
        return text
    return json.dumps(text)
