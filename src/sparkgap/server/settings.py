"""How the server serves. Imports no HTTP library, so that bad settings are told at once."""

from dataclasses import dataclass

from sparkgap.config import is_finite, is_integer
from sparkgap.errors import ConfigError

LOG_FORMATS = ("text", "json")
"""Values of `ServerSettings.log_format`."""

LOG_LEVELS = ("debug", "info", "warning", "error")
"""Values of `ServerSettings.log_level`."""


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, whom it lets in, and what one client can take of it.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        api_key: what clients must send as `Authorization: Bearer`; None lets everybody in.
        served_model_name: the model's name in requests and answers; None takes the one that it was loaded by.
        max_queued_seqs: sequences that may wait beyond the `max_num_seqs` that are decoded; more are refused (429).
        max_prompt_tokens: longest prompt; None leaves it to `max_model_len`.
        max_body_bytes: largest request body.
        max_connections: most open connections.
        request_timeout_s: longest time from a request's arrival to its last token, waiting included; None sets none.
        read_timeout_s: longest time for a client to send the head of a request, and again for its body.
        write_timeout_s: longest time for which a client may take nothing of what waits to be sent to it.
        stall_timeout_s: time without a computed token while requests are there, after which `/health` fails.
        drain_timeout_s: longest time to finish running requests after SIGTERM; None waits for all.
        cors_origins: web origins that browsers may call from; none by default.
        log_format: one of `LOG_FORMATS`.
        log_level: one of `LOG_LEVELS`.
        log_prompts: whether prompts and answers are written to the log.

    Raises:
        ConfigError: a value is out of its range; the message names the setting.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    max_queued_seqs: int = 128
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 1 << 20
    max_connections: int = 1024
    request_timeout_s: float | None = 600.0
    read_timeout_s: float = 20.0
    write_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    drain_timeout_s: float | None = None
    cors_origins: tuple[str, ...] = ()
    log_format: str = "text"
    log_level: str = "info"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        _check(bool(self.host), "host must not be empty; give an address such as 127.0.0.1 or 0.0.0.0")
        _check(is_integer(self.port) and 0 <= self.port <= 65535, f"port must be from 0 to 65535, got {self.port!r}")
        key = self.api_key
        _check(
            key is None or (bool(key) and key.isascii() and key.isprintable() and " " not in key),
            "api-key must be printable ASCII without spaces, and not empty",
        )
        _check(self.served_model_name != "", "served-model-name must not be empty")
        _check(
            is_integer(self.max_queued_seqs) and self.max_queued_seqs >= 0,
            f"max-queued-seqs must be an integer of at least 0, got {self.max_queued_seqs!r}",
        )
        for name in ("max_prompt_tokens", "max_body_bytes", "max_connections"):
            value = getattr(self, name)
            _check(
                value is None or (is_integer(value) and value >= 1),
                f"{_flag(name)} must be an integer of at least 1, got {value!r}",
            )
        for name in ("request_timeout_s", "read_timeout_s", "write_timeout_s", "stall_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            _check(
                value is None or (is_finite(value) and value > 0),
                f"{_flag(name.removesuffix('_s'))} must be a number of seconds above 0, got {value!r}",
            )
        _check(
            all(self.cors_origins), "cors-origin must not be empty; give an origin such as https://example.org, or *"
        )
        _check(self.log_format in LOG_FORMATS, f"log-format must be one of {', '.join(LOG_FORMATS)}")
        _check(self.log_level in LOG_LEVELS, f"log-level must be one of {', '.join(LOG_LEVELS)}")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
