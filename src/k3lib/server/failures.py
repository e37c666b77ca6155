"""What can go wrong with a request besides its own fault, and every error as a response in OpenAI's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from k3lib.errors import RequestError
from k3lib.server.fast_json import dump
from k3lib.server.schemas import ErrorBody, ErrorResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI, Request
    from pydantic_core import ErrorDetails

__all__ = [
    "AbortedError",
    "ClientGone",
    "EngineError",
    "NotSupportedError",
    "OverloadedError",
    "TimedOutError",
    "UnknownModelError",
    "add_error_handlers",
    "describe",
]

RETRY_AFTER = "1"
_CLIENT_GONE = 499

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "server_error",
    503: "server_error",
}


class EngineError(RuntimeError):
    """The engine could not finish a request; the client may try again."""

    status = 500


class AbortedError(EngineError):
    """Somebody ended the request: `/abort_request`, or a server that shuts down."""


class TimedOutError(EngineError):
    """The request took longer than it was given."""

    status = 503


class OverloadedError(EngineError):
    """The queue is full."""

    status = 429


class NotSupportedError(EngineError):
    """The engine behind this server cannot do it."""

    status = 501


class UnknownModelError(RequestError):
    """A model that is not served here; the one client error that is not 400."""


class ClientGone(Exception):
    """Nobody is left to answer."""


def describe(error: Exception) -> tuple[int, ErrorResponse]:
    """Status and body of an error."""
    status, param, message = 500, None, str(error)
    if isinstance(error, RequestError):
        status = 404 if isinstance(error, UnknownModelError) else 400
        param = error.param
    elif isinstance(error, RequestValidationError):
        status = 400
        param, message = _validation(error.errors())
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, EngineError):
        status = error.status
    else:
        message = "internal error; see the log of the server"
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, ErrorResponse(error=ErrorBody(message=message, type=kind, param=param, code=None))


def _validation(errors: Sequence[ErrorDetails]) -> tuple[str | None, str]:
    """Name and message of the first field that is wrong; what a union would have taken is joined by "or"."""
    places = [[str(step) for step in error["loc"] if step != "body"] for error in errors]
    if not places[0] or errors[0]["type"] == "json_invalid":
        return None, f"bad body: {errors[0]['msg']}"
    name = places[0][0]
    messages = dict.fromkeys(error["msg"] for error, where in zip(errors, places, strict=True) if where[:1] == [name])
    return name, f"{name}: {'; or '.join(list(messages)[:4])}"


def error_answer(error: Exception) -> Response:
    """The response to an error."""
    status, body = describe(error)
    headers = {"retry-after": RETRY_AFTER} if status in (429, 503) else {}
    if isinstance(error, HTTPException) and error.headers:
        headers |= dict(error.headers)
    return Response(dump(body), status, headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of the app in OpenAI's shape."""

    async def answer(http: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            where = f"{http.method} {http.url.path[:80]}"
            error = HTTPException(404, f"this server has no {where}; GET /openapi.json lists what it has")
        return error_answer(error)

    async def leave(_: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)

    for kind in (RequestError, RequestValidationError, HTTPException, EngineError, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientGone, leave)
