"""Errors in OpenAI's shape: of whatever was raised, and of bodies that are not what a route takes.

Owns failure(), error_of() and the handlers of exceptions. Must not know of engines, nor of what any route does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nibble.errors import NibbleError
from nibble.server.engine_client import EngineDiedError
from nibble.server.messages import status_of

log = logging.getLogger("nibble.server")
TOO_MANY = 429
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
CODES = {401: "invalid_api_key", 408: "timeout", 413: "request_too_large", 429: "rate_limit_exceeded"}
"""The word for an error, of its status, where the error has none of its own; clients expect a text or null."""


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
) -> JSONResponse:
    """An error as a response."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = message.encode("utf-8", "replace").decode()
    error = {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}
    return JSONResponse({"error": error}, status, headers)


def response_of(error: Exception) -> JSONResponse:
    """The response of an error that was raised."""
    if isinstance(error, EngineDiedError):
        return error_response(503, str(error), **{"Retry-After": "2"})
    if isinstance(error, TimeoutError):
        return error_response(408, "the request was not answered within its time")
    if isinstance(error, NibbleError):
        status, said, code = status_of(error)
        return error_response(status, said, code=code, **({"Retry-After": "1"} if status == TOO_MANY else {}))
    if isinstance(error, UnicodeEncodeError):
        return error_response(400, "the request has a text that is no Unicode: it holds half of a surrogate pair")
    log.exception("a request failed", exc_info=error)
    return error_response(500, "the server made a mistake; its log says more")


def describe_invalid(errors: Sequence[Any], body: Any) -> tuple[str, str]:
    """Where a body is wrong, and how: one error of pydantic's. Of a value that may be of several kinds each kind
    complains; the one that was probably meant fits on the outside, has least to say, and says it latest."""
    kinds: dict[tuple[Any, ...], list[tuple[list[Any], bool, str]]] = {}
    for error in errors:
        where, kind = _walked(error, body)
        outside = len(where) < len(kind) and error["type"].endswith(("_type", "literal_error"))
        kinds.setdefault(kind, []).append((where, outside, str(error["msg"]).removeprefix("Value error, ")))
    first = next(iter(kinds))
    rivals = [found for kind, found in kinds.items() if first and kind[:-1] == first[:-1]] or [kinds[first]]

    def likely(found: list[tuple[list[Any], bool, str]]) -> tuple[Any, ...]:
        where, outside, _ = found[0]
        return outside, len(found), [-part for part in where if isinstance(part, int)]

    where, _, said = min(rivals, key=likely)[0]
    return ".".join(map(str, where)), said


def _walked(error: Any, body: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """The parts of an error's place that are keys of the body; and the parts up to the name of a kind, which is no key,
    () where there is none."""
    where: list[Any] = []
    kind: tuple[Any, ...] = ()
    *_, last = loc = [part for part in error["loc"] if part != "body"] or [None]
    for i, part in enumerate(loc):
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
            where.append(part)
        elif part is last and error["type"] == "missing":
            where.append(part)
        elif part is not None:
            kind = kind or tuple(loc[: i + 1])
    return where, kind


def install_handlers(app: FastAPI) -> None:
    """What is wrong before a route's function is called: bodies, paths and methods. What that raises is JsonRoute's."""

    async def invalid(_: Request, error: Any) -> JSONResponse:
        where, said = describe_invalid(error.errors(), error.body)
        return error_response(400, f"{where}: {said}" if where else said, where or None)

    async def raised(request: Request, error: Any) -> JSONResponse:
        said = str(error.detail)
        if error.status_code == 404:
            said = f"nothing is served at {request.url.path}; /openapi.json lists what is"
        return error_response(error.status_code, said, **dict(error.headers or {}))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, raised)
