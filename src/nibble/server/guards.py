"""What stands before the routes: size of bodies, the key, and errors in OpenAI's shape.

Owns BodyLimit, KeyGuard and the handlers of exceptions. Plain ASGI, so that a stream is never buffered. Must not know
of engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nibble.errors import NibbleError, RequestError
from nibble.server.client import EngineDiedError
from nibble.server.pages import PATHS as PAGE_PATHS

log = logging.getLogger("nibble.server")
TOO_MANY = 429
BODY_S = 60.0
BYTES_PER_VALUE, LEAST_VALUES, COSTLY = 8, 1 << 16, 4
"""Of a largest body, on average; what any body may have; what a list, an object or a key weighs, in numbers."""
OPEN_PATHS = ("/health",)
"""What paths begin with that need no key; the page's own files need none either."""
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
CODES = {401: "invalid_api_key", 408: "timeout", 413: "request_too_large", 429: "rate_limit_exceeded"}
"""The word for an error, of its status, where the error has none of its own; clients expect a text or null."""


class BodyLimit:
    """Refuses bodies of more than `limit` bytes: by what they say of themselves, else as they come. So it does with
    bodies of very many values, or that take longer than `seconds` to come: all others wait while one is read."""

    def __init__(self, app: ASGIApp, limit: int, seconds: float = BODY_S) -> None:
        self._app, self._limit, self._seconds = app, limit, seconds
        self._weight = max(limit // BYTES_PER_VALUE, LEAST_VALUES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not said.isdigit() or int(said) > self._limit:
            response = failure(413, f"the body may have {self._limit} bytes at most", Connection="close")
            await response(scope, receive, send)
            return
        seen, weight, more = 0, 0, True
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal seen, weight, more
            try:
                async with asyncio.timeout_at(deadline if more else None):
                    message = await receive()
            except TimeoutError:
                raise refused(408, f"the body did not come within {self._seconds:g} s") from None
            body, more = message.get("body", b""), message.get("more_body", False)
            seen, weight = seen + len(body), weight + weight_of(body)
            if seen > self._limit:
                raise refused(413, f"the body may have {self._limit} bytes at most")
            if weight > self._weight:
                raise refused(413, f"the body has too many values: about {self._weight} numbers may be")
            return message

        await self._app(scope, limited, send)


def refused(status: int, message: str) -> HTTPException:
    """Of a body that is not read to its end: nothing can follow it."""
    return HTTPException(status, message, {"Connection": "close"})


def too_long(tokens: int, most: int) -> RequestError:
    """Of a prompt that cannot fit, in words that clients know."""
    said = f"it has {tokens} tokens at least, and this model's maximum context length is {most} tokens"
    return RequestError(f"the prompt is too long: {said}", code="context_length_exceeded")


def weight_of(body: bytes) -> int:
    """How much work JSON is to read: a value stands before a comma, and lists, objects and keys cost more."""
    return body.count(b",") + COSTLY * sum(map(body.count, (b"[", b"{", b":")))


class JsonRoute(APIRoute):
    """A route whose body is read by msgspec, which is quicker and stricter: no NaN, no half of a surrogate pair."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


class JsonRequest(Request):
    """A request that reads its own body."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return msgspec.json.decode(body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body cannot be read: {error}") from None


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


def failure(
    status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
) -> JSONResponse:
    """An error as a response."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = message.encode("utf-8", "replace").decode()
    error = {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}
    return JSONResponse({"error": error}, status, headers)


def error_of(error: Exception) -> JSONResponse:
    """The response of an error that was raised."""
    if isinstance(error, RequestError):
        again = {"Retry-After": "1"} if error.status == TOO_MANY else {}
        return failure(error.status, str(error), code=error.code, **again)
    if isinstance(error, EngineDiedError):
        return failure(503, str(error), **{"Retry-After": "2"})
    if isinstance(error, TimeoutError):
        return failure(408, "the request was not answered within its time")
    if isinstance(error, NibbleError):
        return failure(400, str(error))
    if isinstance(error, UnicodeEncodeError):
        return failure(400, "the request has a text that is no Unicode: it holds half of a surrogate pair")
    log.exception("a request failed", exc_info=error)
    return failure(500, "the server made a mistake; its log says more")


def complaint(errors: Sequence[Any], body: Any) -> tuple[str, str]:
    """Where a body is wrong, and how: one error of pydantic's. Of a value that may be of several kinds each kind
    complains; the one that was probably meant fits on the outside, has least to say, and says it latest."""
    kinds: dict[tuple[Any, ...], list[tuple[list[Any], bool, str]]] = {}
    for error in errors:
        where, kind = _walked(error, body)
        outside = len(where) < len(kind) and error["type"].endswith(("_type", "literal_error"))
        kinds.setdefault(kind, []).append((where, outside, str(error["msg"])))
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
    """Errors of routes, in OpenAI's shape."""

    async def invalid(_: Request, error: Any) -> JSONResponse:
        where, said = complaint(error.errors(), error.body)
        return failure(400, f"{where}: {said}" if where else said, where or None)

    async def raised(request: Request, error: Any) -> JSONResponse:
        said = str(error.detail)
        if error.status_code == 404:
            said = f"nothing is served at {request.url.path}; /openapi.json lists what is"
        return failure(error.status_code, said, **dict(error.headers or {}))

    async def others(_: Request, error: Exception) -> JSONResponse:
        return error_of(error)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, raised)
    for kind in (NibbleError, TimeoutError, UnicodeEncodeError):
        app.add_exception_handler(kind, others)
