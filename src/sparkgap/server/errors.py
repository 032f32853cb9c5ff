"""Errors as OpenAI's clients expect them: a status, and a body with `message`, `type`, `param` and `code`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from sparkgap.errors import EngineClosedError, EngineError, QueueFullError, SparkgapError

_LINE_ENDS = re.compile("[\u0085\u2028\u2029]")
_TELLING = ("json_invalid", "literal_error", "extra_forbidden", "unsupported_parameter")


class ApiError(Exception):
    """A request that is refused or has failed.

    Attributes:
        status: HTTP status.
        message: one line for people.
        code: a word for programs.
        type: OpenAI's kind of error.
        param: the request's field that is at fault, None when it is none.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The response."""
        return json_response(self.body(), self.status, self.headers)


def encode_json(value: Any) -> bytes:
    """JSON as UTF-8. Lone surrogates, which names in a client's request can have, stay the escapes they came as.

    Characters that some clients split a stream's lines at are escaped, too.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not text.isascii():
        text = _LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return text.encode("utf-8", "backslashreplace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response that is one JSON object."""
    return Response(encode_json(value), status, dict(headers or {}), "application/json")


def is_failure(error: SparkgapError) -> bool:
    """Whether computing went wrong, which is for the log; a refusal, also by a server that ends, is not."""
    return isinstance(error, EngineError) and not isinstance(error, EngineClosedError)


def from_sparkgap(error: SparkgapError, fields: Sequence[str] = ()) -> ApiError:
    """What a client is told of an error of the engine's.

    Args:
        error: of a request, or of computing it.
        fields: names of the request's fields; one that begins the message is named as `param`.
    """
    message = " ".join(str(error).split())
    if isinstance(error, EngineClosedError):
        return unavailable(message, "shutting_down")
    if isinstance(error, QueueFullError):
        return queue_full(message, 1)
    if isinstance(error, EngineError):
        return ApiError(500, message, type="server_error", code="engine_error")
    first = message.split(" ", 1)[0]
    return ApiError(400, message, param=first if first in fields else None, code="invalid_value")


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """What a client is told of a body that does not have the declared form: its first fault.

    Args:
        problems: pydantic's list of errors.
    """
    problem = max(problems, key=_how_telling)
    place = [part for part in problem["loc"] if part != "body"]
    kind = problem["type"]
    if kind == "json_invalid":
        why = problem.get("ctx", {}).get("error", "")
        return ApiError(400, f"the request body is not valid JSON: {why}", code="invalid_json")
    param = _path(place)
    if kind == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    if kind == "unsupported_parameter":
        return ApiError(400, f"{param}: {problem['msg']}", param=param, code="unsupported_parameter")
    if kind == "missing":
        what = "the request body is missing" if param is None else f"{param} is required"
        return ApiError(400, what, param=param, code="missing_required_parameter")
    return ApiError(400, f"{param or 'the request body'}: {problem['msg']}", param=param, code="invalid_value")


def _how_telling(problem: Mapping[str, Any]) -> tuple[Any, ...]:
    """Orders the faults of a union, which has one for each of its members: the one that came furthest tells most."""
    kind, place = problem["type"], problem["loc"]
    indices = [part for part in place if isinstance(part, int)]
    # A fault that is not about the type is of the member whose type was sent.
    return kind in _TELLING, len(place), indices, not kind.endswith("_type")


def _path(place: Sequence[str | int]) -> str | None:
    """`messages[0].content` of its parts. Names of a union's members, which pydantic adds, are left out."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
        elif not path:
            path = part
    return path or None


def internal_error() -> ApiError:
    """Something happened that should not; what it was is for the log."""
    return ApiError(500, "internal error; the server's log has more", type="server_error", code="internal_error")


def queue_full(message: str, retry_after_s: int) -> ApiError:
    """More requests wait than may (429)."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)


def unavailable(message: str, code: str, retry_after_s: int | None = None) -> ApiError:
    """The server cannot serve now (503)."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, type="server_error", code=code, headers=headers)
