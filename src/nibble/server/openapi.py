"""What the OpenAPI document says of answers: errors and streams, as FastAPI's `responses`, and the model's name."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

Responses = dict[int | str, dict[str, Any]]
ERRORS = {
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


class ErrorDetail(BaseModel):
    """Why a request was not served."""

    message: str = Field(description="The cause, and what would work.")
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str | None = Field(description="A word for the error, where there is one.")


class Error(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


def errors(*statuses: int) -> Responses:
    """Return what a route may fail with, for FastAPI's `responses`."""
    return {status: {"model": Error, "description": ERRORS[status]} for status in statuses}


def content(media_type: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a response's content of a media type, of any shape if there is no schema."""
    return {"content": {media_type: {"schema": schema or {}}}}


EVERY_ROUTE = errors(401, 500)
WITH_STATE = errors(503)
WITH_BODY = errors(400, 404, 408, 413, 429, 501, 503)
STREAMED: Responses = {200: content("text/event-stream"), **WITH_BODY}
METRICS: Responses = {200: content("text/plain", {"type": "string"}), **WITH_STATE}
HEALTH: Responses = {503: {"description": ERRORS[503], **content("application/json")}}


def describe(app: FastAPI, name: str) -> dict[str, Any]:
    """Return the OpenAPI document. name: the model's, the only one that requests may have."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        if schema.get("properties", {}).get("model", {}).get("type") == "string":
            schema["properties"]["model"]["enum"] = [name]
    # Malformed bodies are answered with 400, never with FastAPI's 422.
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return document
