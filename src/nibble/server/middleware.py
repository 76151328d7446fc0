"""What stands before and around the routes: errors in OpenAI's shape, guards, and the files of the status page.

Guards are of the size and time of bodies, how they are read, the key, and silent connections. BodyLimit, KeyGuard and
RootPath are plain ASGI, so that a stream is never buffered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from nibble.errors import NibbleError, RequestError
from nibble.server.tracing import SCOPE_KEY, HttpLog

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
ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors, by status."""
MESSAGES_PATH = "/v1/messages"
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


class ErrorResponse(JSONResponse):
    """An error as a response: in OpenAI's shape, and below /v1/messages in Anthropic's.

    It notes its cause in the request's log as it is sent.

    Args:
        error: what is told.
        status: of HTTP.
        headers: of the response.
        cause: what is logged of it.
    """

    def __init__(self, error: ErrorDetail, status: int, headers: dict[str, str], cause: str) -> None:
        self.error, self.cause = error, cause
        super().__init__({"error": error.model_dump()}, status, headers)

    def anthropic(self) -> dict[str, Any]:
        """Return the body in Anthropic's shape."""
        kind = ANTHROPIC_KINDS.get(self.status_code)
        kind = kind or ("invalid_request_error" if self.status_code < 500 else "api_error")
        details = {"details": {"error_code": self.error.code}} if self.error.code else {}
        return {"type": "error", "error": {"type": kind, "message": self.error.message, **details}}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error as the clients of the path read it: guards answer too, before any route is known."""
        note: HttpLog | None = scope.get(SCOPE_KEY)
        if note:
            note.error = self.cause
        if scope["path"].removeprefix(scope.get("root_path", "")).startswith(MESSAGES_PATH):
            self.body = self.render(self.anthropic())
            self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL)
"""What Python's repr() makes of a text, also within lists."""
FIELD = re.compile(r"[A-Za-z0-9_.]{1,80}")


def cause_of(message: str, field: str | None = None) -> str:
    """Return what may be logged of an error's message: its first clause, without what it quotes of the request.

    Messages quote values by repr(), and what other packages say follows a colon or stands in brackets.

    Args:
        message: of the error.
        field: what is wrong; a name that is not of the API's kind may be anything.
    """
    # Quoted first: a quoted text may have a colon.
    clause = QUOTED.sub("...", message).partition(": ")[0].partition(" (")[0]
    if not field:
        return clause
    return f"{field if FIELD.fullmatch(field) else 'a field'}: {clause}"


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
) -> ErrorResponse:
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
    error = ErrorDetail(message=message, type=kind, param=param, code=code or CODES.get(status))
    return ErrorResponse(error, status, headers, cause_of(message.removeprefix(f"{param}: "), param))


def response_of(error: Exception) -> ErrorResponse:
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


PLAIN_WORDS = (
    (r"^Value error, ", ""),
    (r"^Field required$", "is missing"),
    (r"^Input should be None$", "is not served"),
    (r"a valid dictionary.*$", "an object"),
    (r" an? valid (?=[aeiou])", " an "),
    (r" an? valid ", " a "),
    (r"^Input should be ", "must be "),
    (r"^String should match pattern ", "must match "),
)
"""What pydantic says, in words for who sent the request."""


def _plain(error: Any) -> str:
    """Return the message of one of pydantic's errors, in plain words."""
    message = str(error["msg"])
    for pattern, plain in PLAIN_WORDS:
        message = re.sub(pattern, plain, message)
    return message


def describe_invalid(errors: Sequence[Any], body: Any, names: Iterable[str] = ()) -> tuple[str, str]:
    """Return where a body is wrong, as `a.b`, and how.

    Args:
        errors: pydantic's.
        body: what was sent.
        names: of the body's fields.
    """
    complaints: dict[tuple[Any, ...], list[Complaint]] = {}
    for error in errors:
        keys, kind = _location(error, body)
        wrong_type = len(keys) < len(kind) and error["type"].endswith(("_type", "literal_error"))
        message = unknown_field(keys, names) if error["type"] == "extra_forbidden" else _plain(error)
        complaints.setdefault(kind, []).append((keys, wrong_type, message))
    first = next(iter(complaints))
    # Of a value that may be of several kinds, each kind complains.
    rivals = [group for kind, group in complaints.items() if first and kind[:-1] == first[:-1]]

    def distance(group: list[Complaint]) -> tuple[Any, ...]:
        # The kind that was probably meant fits on the outside, complains least, and latest in a list.
        keys, wrong_type, _ = group[0]
        return wrong_type, len(group), [-key for key in keys if isinstance(key, int)]

    keys, wrong_type, message = min(rivals or [complaints[first]], key=distance)[0]
    if wrong_type:
        # The value is of no kind that it may have, so all of them are named.
        others = [
            group[0][2].removeprefix("must be ") for group in rivals if group[0][0] == keys and group[0][1]
        ]
        message = " or ".join(
            dict.fromkeys([message, *(other for other in others if f"must be {other}" != message)])
        )
    return ".".join(map(str, keys)), message


def unknown_field(keys: Sequence[Any], names: Iterable[str]) -> str:
    """Return what is said of a field that there is not.

    Args:
        keys: of the body, down to the field.
        names: of the body's fields.
    """
    near = get_close_matches(str(keys[-1]), names, n=1) if len(keys) == 1 else []
    return f"unknown field; did you mean {near[0]!r}?" if near else "unknown field"


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

    async def invalid(request: Request, error: Any) -> JSONResponse:
        field = getattr(request.scope.get("route"), "body_field", None)
        model = getattr(getattr(field, "field_info", None), "annotation", None)
        where, message = describe_invalid(error.errors(), error.body, getattr(model, "model_fields", ()))
        # FastAPI reads JSON only where the request says that it is.
        if not where and isinstance(error.body, bytes):
            message = "the body was not read as JSON: send the header Content-Type: application/json"
        return error_response(400, f"{where}: {message}" if where else message, where or None)

    async def raised(request: Request, error: Any) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"nothing is served at {request.url.path}; /openapi.json lists what is"
        return error_response(error.status_code, message, **dict(error.headers or {}))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, raised)


BODY_S = 60.0
"""In which a body must have arrived."""
DRAIN_S, DRAIN_BYTES = 5.0, 64 << 20
"""For which, and of which, a body that is too large is read and thrown away."""
BYTES_PER_VALUE = 8
"""Of a body of the largest size, on average."""
MIN_VALUES = 1 << 16
"""That any body may have."""
CONTAINER_WEIGHT = 4
"""Of a list, an object or a key, in numbers."""
OPEN_PATHS = ("/health", "/ping")
"""Prefixes of paths that need no key; the page's own files need none either."""
KEEP_ALIVE_S = 75.0
"""For which a connection may be silent, between requests or within a head."""

PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/api.js": ("api.js", "text/javascript; charset=utf-8"),
    "/cache.js": ("cache.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = frozenset(PAGE_FILES)
"""Paths that need no key: these, and not what begins with them."""
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidate each time: names stay the same from version to version
}
STATIC_FILES = StaticFiles(directory=Path(__file__).parent / "page")


def mount_page(app: FastAPI) -> None:
    """Serve the files of the status page, which calls the API as any client does: its calls need a key, they do not."""

    async def serve(request: Request) -> Response:
        name, media_type = PAGE_FILES[request.scope["path"]]
        response = await STATIC_FILES.get_response(name, request.scope)
        # Python's table of media types differs between versions and machines.
        response.headers.update(PAGE_HEADERS | {"Content-Type": media_type})
        return response

    # Each by a route: a mount at `/` would hide the 405 of other routes.
    for path in PAGE_FILES:
        app.add_api_route(path, serve, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


class BodyLimit:
    """Middleware that refuses bodies that are too large, have too many values, or come too slowly.

    Args:
        app: the application.
        limit: bytes of a body.
        seconds: in which a body must have arrived.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float = BODY_S) -> None:
        self._app, self._limit, self._seconds = app, limit, seconds
        # JSON is decoded in the event loop: every other request waits while one body is read.
        self._max_weight = max(limit // BYTES_PER_VALUE, MIN_VALUES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; a body is refused by its Content-Length, else as it comes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        # A client that expects a 100 sends no body before.
        patient = send if headers.get("expect") else _drained(receive, send)
        if not length.isdecimal() or int(length) > self._limit:
            message = f"the body may have {self._limit} bytes at most"
            await error_response(413, message, Connection="close")(scope, receive, patient)
            return
        await self._app(scope, self._limited(receive), patient)

    def _limited(self, receive: Receive) -> Receive:
        size, weight, more = 0, 0, True
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal size, weight, more
            try:
                # After the body, receive() waits for the client's disconnection: as long as it takes.
                async with asyncio.timeout_at(deadline if more else None):
                    message = await receive()
            except TimeoutError:
                raise body_error(408, f"the body did not come within {self._seconds:g} s") from None
            body, more = message.get("body", b""), message.get("more_body", False)
            size, weight = size + len(body), weight + json_weight(body)
            if size > self._limit:
                raise body_error(413, f"the body may have {self._limit} bytes at most")
            if weight > self._max_weight:
                raise body_error(
                    413, f"the body has too many values: about {self._max_weight} numbers may be"
                )
            return message

        return limited


def _drained(receive: Receive, send: Send) -> Send:
    """Return `send` that reads on for a while after a 413, before it ends the response.

    The connection is closed then. With unread bytes that is a reset, and a client that still sends would not see why.
    """
    refused = False

    async def sender(message: Message) -> None:
        nonlocal refused
        refused = refused or message.get("status") == 413
        if not refused or message["type"] != "http.response.body" or message.get("more_body"):
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await _discard(receive)
        await send({"type": "http.response.body"})

    return sender


async def _discard(receive: Receive) -> None:
    """Read a body to its end, or DRAIN_BYTES of it."""
    size, more = 0, True
    while more and size < DRAIN_BYTES:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)


def body_error(status: int, message: str) -> HTTPException:
    """Return the error of a body that is not read to its end."""
    # What is left of the body would be taken for the next request.
    return HTTPException(status, message, {"Connection": "close"})


def json_weight(body: bytes) -> int:
    """Return how much work JSON is to read, in numbers."""
    # A value stands before a comma; lists, objects and keys cost more.
    return body.count(b",") + CONTAINER_WEIGHT * sum(map(body.count, (b"[", b"{", b":")))


class JsonRoute(APIRoute):
    """A route whose body is read by msgspec, which is quicker and stricter than Starlette: no NaN, no half of a
    surrogate pair. Errors of its function become responses."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's function of a request."""
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
    """A request whose body msgspec reads."""

    async def json(self) -> Any:
        """Return the body's value; raises HTTPException where it is no JSON."""
        body = await self.body()
        try:
            return msgspec.json.decode(body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body cannot be read: {error}") from None


class KeyGuard:
    """Middleware that refuses requests without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._digest = app, _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application if the request has the key, or its path needs none."""
        is_open = scope["type"] != "http" or scope["path"] in PAGE_PATHS
        is_open = is_open or scope["path"].startswith(OPEN_PATHS)
        # Digests have one length, so the comparison's time says nothing about the key.
        if not is_open and not hmac.compare_digest(_digest(_key_of(Headers(scope=scope))), self._digest):
            message = "a valid API key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            response = error_response(401, message, **{"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


class RootPath:
    """Middleware that takes a proxy's prefix off paths, where the proxy has left it there."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._prefix}/"):
            # In place: the outer middleware looks for the route in this scope.
            scope["path"] = scope["path"].removeprefix(self._prefix) or "/"
        await self._app(scope, receive, send)


def _key_of(headers: Headers) -> bytes:
    """Return the key as OpenAI's clients send it, or as Anthropic's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.strip().encode("latin-1")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


MAX_HEAD = 64 << 10
"""Bytes of a request's head that are read before it is refused."""
HEAD_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
_Base: Any = AutoHTTPProtocol


class HeadTimeoutProtocol(_Base):  # type: ignore[misc]
    """uvicorn's protocol, which also closes a connection that never sends a whole head (a slow loris), or a long one.

    One of uvicorn's parsers knows no limit.
    """

    timeout_s = KEEP_ALIVE_S

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to watch the connection."""
        super().connection_made(transport)
        self._head_bytes = 0
        self._timer = self.loop.call_later(self.timeout_s, self._check, None)

    def data_received(self, data: bytes) -> None:
        """Read on, while the head is not too long."""
        cycle = self.cycle
        in_body = cycle is not None and cycle.more_body
        super().data_received(data)
        # A new cycle is a request whose head is complete.
        is_head = self.cycle is cycle and not in_body and not self.transport.is_closing()
        self._head_bytes = self._head_bytes + len(data) if is_head else 0
        if self._head_bytes > MAX_HEAD:
            self.transport.write(HEAD_TOO_LONG)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End the watch."""
        self._timer.cancel()
        super().connection_lost(error)

    def _check(self, previous_cycle: Any) -> None:
        """Close the connection where no request is answered and none has begun since the last check.

        `previous_cycle` is uvicorn's last request at that time.
        """
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.cycle is previous_cycle and not answering:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(self.timeout_s, self._check, self.cycle)
