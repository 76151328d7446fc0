"""The OpenAPI document: what FastAPI finds, and what it cannot know: the errors, streams, and what the model is called.

Owns described(). Must not know of engines.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

ERROR = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "The cause, and what would work."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {
                    "type": ["string", "null"],
                    "description": "A word for the error, where there is one.",
                },
            },
        }
    },
}
EVERYWHERE = {"401": "The key is missing or wrong.", "500": "The server made a mistake."}
WITH_BODY = {
    "400": "The request is malformed, or cannot be served.",
    "404": "The model is not served here.",
    "408": "The answer, or the body, took longer than it may.",
    "413": "The body is too large.",
    "429": "Too many requests are open.",
    "501": "A package is missing.",
    "503": "The engine does not serve at the moment.",
}
WITH_NAME = {"404": WITH_BODY["404"]}
OF_STATE = {"503": WITH_BODY["503"]}
EVENTS = "text/event-stream"
OTHER_KINDS = {"/metrics": "text/plain", "/v1/completions": EVENTS, "/v1/chat/completions": EVENTS}
INSTEAD = {"/metrics"}
"""Paths whose answers are of the other kind only."""


def described(app: FastAPI, name: str) -> dict[str, Any]:
    """The document. name: what the model is called here."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = found["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for schema in schemas.values():
            if schema.get("properties", {}).get("model", {}).get("type") == "string":
                schema["properties"]["model"]["enum"] = [name]
        schemas["Error"] = ERROR
        for path, operations in found["paths"].items():
            for operation in operations.values():
                _complete(path, operation)
        app.openapi_schema = found
    return app.openapi_schema


def _complete(path: str, operation: dict[str, Any]) -> None:
    """What an operation may be answered with."""
    answers = operation["responses"]
    answers.pop("422", None)
    own = WITH_BODY if "requestBody" in operation else WITH_NAME if "parameters" in operation else OF_STATE
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, said in {**EVERYWHERE, **own}.items():
        answers[status] = {"description": said, "content": error}
    if path.startswith("/health"):
        answers["503"] = {"description": OF_STATE["503"], "content": {"application/json": {"schema": {}}}}
    if kind := OTHER_KINDS.get(path):
        content = {} if path in INSTEAD else answers["200"].get("content", {})
        answers["200"]["content"] = {
            **content,
            kind: {"schema": {} if kind == EVENTS else {"type": "string"}},
        }
