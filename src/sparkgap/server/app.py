"""The ASGI application: routes, and what surrounds them."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from sparkgap import __version__
from sparkgap.errors import SparkgapError
from sparkgap.server.errors import ApiError, from_sparkgap, from_validation, internal_error, is_failure
from sparkgap.server.gate import Gate, allowed_origins
from sparkgap.server.logs import write_failure
from sparkgap.server.metrics import ServerMetrics
from sparkgap.server.requests import ChatBody, CompletionBody
from sparkgap.server.routes import open_router, router
from sparkgap.server.state import ServerState

_FIELDS = (*ChatBody.model_fields, *CompletionBody.model_fields)


def create_app(state: ServerState) -> ASGIApp:
    """The application that serves `state`'s model."""
    # The pages that show the OpenAPI document load their scripts from elsewhere.
    app = FastAPI(title="Sparkgap", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = state
    app.state.metrics = metrics = ServerMetrics(state)
    app.include_router(router)
    app.include_router(open_router)
    app.exception_handler(ApiError)(_on_api_error)
    app.exception_handler(SparkgapError)(_on_sparkgap_error)
    app.exception_handler(RequestValidationError)(_on_invalid_body)
    app.exception_handler(HTTPException)(_on_http_error)
    app.exception_handler(Exception)(_on_unforeseen_error)
    gate = Gate(app, state, metrics)
    if not state.settings.cors_origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=allowed_origins(state.settings.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )


async def _on_api_error(request: Request, error: Any) -> Response:
    response: Response = error.response()
    _note(request, error)
    return response


async def _on_sparkgap_error(request: Request, error: Any) -> Response:
    if is_failure(error):
        write_failure("a request failed", error, request_id=request.scope["sparkgap.log"].request_id)
    told = from_sparkgap(error, _FIELDS)
    _note(request, told)
    return told.response()


async def _on_invalid_body(request: Request, error: Any) -> Response:
    told = from_validation(error.errors())
    # The route was found, though its function is not reached.
    request.scope["sparkgap.log"].handler = request.scope["route"].path
    _note(request, told)
    return told.response()


async def _on_http_error(request: Request, error: Any) -> Response:
    """What the framework itself refuses: unknown paths and methods, bodies that cannot be read."""
    text = {
        404: f"there is no {request.method} {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
        400: "the request body is not valid JSON",
    }.get(error.status_code, str(error.detail))
    codes = {404: "not_found", 405: "method_not_allowed", 400: "invalid_json"}
    code = codes.get(error.status_code, "invalid_request")
    told = ApiError(error.status_code, text, code=code, headers=error.headers)
    _note(request, told)
    return told.response()


async def _on_unforeseen_error(request: Request, error: Any) -> Response:
    """The framework raises `error` again after this response, so that the gate writes it to the log."""
    told = internal_error()
    _note(request, told)
    return told.response()


def _note(request: Request, error: ApiError) -> None:
    request.scope["sparkgap.log"].refused(error)
