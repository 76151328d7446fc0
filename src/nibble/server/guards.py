"""What stands before the routes: size of bodies, the key, and errors in OpenAI's shape.

Owns BodyLimit, KeyGuard and the handlers of exceptions. Plain ASGI, so that a stream is never buffered. Must not know
of engines.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nibble.errors import NibbleError, RequestError
from nibble.server.client import EngineDiedError
from nibble.server.pages import PATHS as PAGE_PATHS

log = logging.getLogger("nibble.server")
TOO_MANY = 429
OPEN_PATHS = ("/health",)
"""What paths begin with that need no key; the page's own files need none either."""
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class BodyLimit:
    """Refuses bodies of more than `limit` bytes: by what they say of themselves, else as they come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not said.isdigit() or int(said) > self._limit:
            await failure(413, f"the body may have {self._limit} bytes at most")(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise HTTPException(413, f"the body may have {self._limit} bytes at most")
            return message

        await self._app(scope, limited, send)


class KeyGuard:
    """Lets in who knows the key. Digests are compared, in constant time, whatever was sent."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._digest = app, _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _open(scope["path"]):
            sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            scheme, _, key = sent.partition(b" ")
            if not hmac.compare_digest(_digest(key.strip()), self._digest) or scheme.lower() != b"bearer":
                await failure(401, "a valid API key is needed, as `Authorization: Bearer KEY`")(
                    scope, receive, send
                )
                return
        await self._app(scope, receive, send)


def _open(path: str) -> bool:
    return path in PAGE_PATHS or path.startswith(OPEN_PATHS)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def failure(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    """An error as a response."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status, headers)


def error_of(error: Exception) -> JSONResponse:
    """The response of an error that was raised."""
    if isinstance(error, RequestError):
        again = {"Retry-After": "1"} if error.status == TOO_MANY else {}
        return failure(error.status, str(error), **again)
    if isinstance(error, EngineDiedError):
        return failure(503, str(error), **{"Retry-After": "2"})
    if isinstance(error, TimeoutError):
        return failure(408, "the request was not answered within its time")
    if isinstance(error, NibbleError):
        return failure(400, str(error))
    log.exception("a request failed", exc_info=error)
    return failure(500, "the server made a mistake; its log says more")


def install_handlers(app: FastAPI) -> None:
    """Errors of routes, in OpenAI's shape."""

    async def invalid(_: Request, error: Any) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return failure(400, f"{where}: {first['msg']}" if where else str(first["msg"]), where or None)

    async def raised(_: Request, error: Any) -> JSONResponse:
        return failure(error.status_code, str(error.detail), **dict(error.headers or {}))

    async def others(_: Request, error: Exception) -> JSONResponse:
        return error_of(error)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, raised)
    for kind in (NibbleError, TimeoutError):
        app.add_exception_handler(kind, others)
