"""The status page: its files, their paths and the headers that keep the page to itself.

The page calls the API as any client does, so its files need no key and its calls do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles

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
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidate each time: names stay the same from version to version
}
STATIC_FILES = StaticFiles(directory=Path(__file__).parent)


def mount(app: FastAPI) -> None:
    """Serve the page's files, each by a route: a mount at `/` would hide the 405 of other routes."""
    for path, (name, media_type) in FILES.items():
        route = _route(name, media_type)
        app.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _route(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        response = await STATIC_FILES.get_response(name, request.scope)
        # Python's table of media types differs between versions and machines.
        response.headers.update(HEADERS | {"Content-Type": media_type})
        return response

    return serve
