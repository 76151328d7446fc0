"""What stands before the routes: size of bodies, how they are read, and the key.

Owns BodyLimit, KeyGuard and JsonRoute. The first two are plain ASGI, so that a stream is never buffered. Must not know
of engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nibble.server.errors import response_of, error_response
from nibble.server.pages import PATHS as PAGE_PATHS

BODY_S = 60.0
BYTES_PER_VALUE, LEAST_VALUES, COSTLY = 8, 1 << 16, 4
"""Of a largest body, on average; what any body may have; what a list, an object or a key weighs, in numbers."""
OPEN_PATHS = ("/health",)
"""What paths begin with that need no key; the page's own files need none either."""


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
            response = error_response(413, f"the body may have {self._limit} bytes at most", Connection="close")
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


def weight_of(body: bytes) -> int:
    """How much work JSON is to read: a value stands before a comma, and lists, objects and keys cost more."""
    return body.count(b",") + COSTLY * sum(map(body.count, (b"[", b"{", b":")))


class JsonRoute(APIRoute):
    """A route whose body is read by msgspec, which is quicker and stricter: no NaN, no half of a surrogate pair. What
    its function raises is answered, whatever it is."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(JsonRequest(request.scope, request.receive))
            except (HTTPException, RequestValidationError):  # which install_handlers() answers
                raise
            except Exception as error:
                return response_of(error)

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
                said = "a valid API key is needed, as `Authorization: Bearer KEY`"
                await error_response(401, said, **{"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _open(path: str) -> bool:
    return path in PAGE_PATHS or path.startswith(OPEN_PATHS)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
