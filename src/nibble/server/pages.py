"""The page at `/`: its files, as they lie in the package, and the headers that keep it to itself.

Owns PATHS and mount(). The page calls the API as any client does, so its files need no key and its calls do. Must not
know what the files say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/api.js": ("api.js", "text/javascript; charset=utf-8"),
    "/cache.js": ("cache.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
PATHS = frozenset(FILES)
"""Paths that need no key: these, and not what begins with them."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked about each time: names stay the same from version to version
}


def mount(app: FastAPI) -> None:
    """Serves the page's files."""
    folder = files("nibble.server") / "page"
    for path, (name, kind) in FILES.items():
        route = _route((folder / name).read_bytes(), kind)
        app.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _route(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    """A route that serves `body`, unless the browser has it."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if tag in (each.strip().removeprefix("W/") for each in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    return serve
