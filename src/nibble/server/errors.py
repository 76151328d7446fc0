"""Errors in OpenAI's shape: the responses of exceptions and of malformed bodies, and how OpenAPI describes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from nibble.errors import NibbleError, RequestError

log = logging.getLogger("nibble.server")
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
CODES = {401: "invalid_api_key", 408: "timeout", 413: "request_too_large", 429: "rate_limit_exceeded"}
"""Codes of errors that have none of their own, by status; clients expect a text or null."""
RETRY_AFTER = {429: "1", 503: "2"}
"""Seconds until a client may try again, by status."""
DESCRIPTIONS = {
    400: "The request is malformed, or cannot be served.",
    401: "The key is missing or wrong.",
    404: "The model is not served here.",
    408: "The answer, or the body, took longer than it may.",
    413: "The body is too large.",
    429: "Too many requests are open.",
    500: "The server made a mistake.",
    501: "A package is missing.",
    503: "The engine does not serve at the moment.",
}
Responses = dict[int | str, dict[str, Any]]
"""FastAPI's `responses` of a route."""


class ErrorDetail(BaseModel):
    """Why a request was not served."""

    message: str = Field(description="The cause, and what would work.")
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str | None = Field(description="A word for the error, where there is one.")


class Error(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


def describe_errors(*statuses: int) -> Responses:
    """Return the errors of a route."""
    return {status: {"model": Error, "description": DESCRIPTIONS[status]} for status in statuses}


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
) -> JSONResponse:
    """Return an error as a response.

    Args:
        status: of HTTP.
        message: the cause, and what would work.
        param: the field that is wrong.
        code: a word for programs; by the status where left out.
        headers: of the response.
    """
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    # A message may quote half of a surrogate pair, which cannot be sent.
    message = message.encode("utf-8", "replace").decode()
    error = {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}
    return JSONResponse({"error": error}, status, headers)


def response_of(error: Exception) -> JSONResponse:
    """Return the response of an error that was raised; one that is no error of Nibble's is logged."""
    if isinstance(error, TimeoutError):
        error = RequestError("the request was not answered within its time", 408)
    elif isinstance(error, UnicodeEncodeError):
        error = RequestError("the request has a text that is no Unicode: it holds half of a surrogate pair")
    if isinstance(error, NibbleError):
        headers = {"Retry-After": RETRY_AFTER[error.status]} if error.status in RETRY_AFTER else {}
        return error_response(error.status, str(error), code=error.code, **headers)
    log.exception("a request failed", exc_info=error)
    return error_response(500, "the server made a mistake; its log says more")


Complaint = tuple[list[Any], bool, str]
"""Keys of the body down to the wrong value, whether the value's own type is wrong, and the message."""


def describe_invalid(errors: Sequence[Any], body: Any) -> tuple[str, str]:
    """Return where a body is wrong, as `a.b`, and how: one of pydantic's errors."""
    complaints: dict[tuple[Any, ...], list[Complaint]] = {}
    for error in errors:
        keys, kind = _location(error, body)
        wrong_type = len(keys) < len(kind) and error["type"].endswith(("_type", "literal_error"))
        message = str(error["msg"]).removeprefix("Value error, ")
        complaints.setdefault(kind, []).append((keys, wrong_type, message))
    first = next(iter(complaints))
    # Of a value that may be of several kinds, each kind complains.
    rivals = [group for kind, group in complaints.items() if first and kind[:-1] == first[:-1]]

    def distance(group: list[Complaint]) -> tuple[Any, ...]:
        # The kind that was probably meant fits on the outside, complains least, and latest in a list.
        keys, wrong_type, _ = group[0]
        return wrong_type, len(group), [-key for key in keys if isinstance(key, int)]

    keys, _, message = min(rivals or [complaints[first]], key=distance)[0]
    return ".".join(map(str, keys)), message


def _location(error: Any, body: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the place of one of pydantic's errors.

    It is the keys of the body down to the wrong value, and pydantic's own path up to the first name of a kind, which is
    no key: () where there is none.
    """
    keys: list[Any] = []
    kind: tuple[Any, ...] = ()
    *_, last = loc = [part for part in error["loc"] if part != "body"] or [None]
    for i, part in enumerate(loc):
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
            keys.append(part)
        elif part is last and error["type"] == "missing":
            keys.append(part)
        elif part is not None:
            kind = kind or tuple(loc[: i + 1])
    return keys, kind


def install_handlers(app: FastAPI) -> None:
    """Let the application answer what is wrong before a route's function is called: bodies, paths and methods."""

    async def invalid(_: Request, error: Any) -> JSONResponse:
        where, message = describe_invalid(error.errors(), error.body)
        return error_response(400, f"{where}: {message}" if where else message, where or None)

    async def raised(request: Request, error: Any) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"nothing is served at {request.url.path}; /openapi.json lists what is"
        return error_response(error.status_code, message, **dict(error.headers or {}))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, raised)
