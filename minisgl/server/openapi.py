"""The OpenAPI description, generated from the types of requests and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec
from msgspec import Struct
from starlette.routing import BaseRoute, Route

from minisgl.server import schemas
from minisgl.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

JSON = "application/json"
EVENTS = "text/event-stream"
SCHEMA = "#/components/schemas/{name}"

ERRORS = {
    400: "A field is wrong or not supported (`param` names it), or the body is not JSON.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    403: "The server does not answer to the name in the header Host.",
    408: "The request arrived too slowly.",
    413: "The body is too large.",
    429: "Too many requests or too much text are waiting; Retry-After says when to try again.",
    431: "The URL and the headers are too large.",
    500: "An internal error.",
    503: "Loading, draining, dead, stalled or short of memory; `code` says which.",
}
ANYWHERE = (403, 431)
READING = (400, 404, 408, 413, 429, 500, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The types of a route's request and answer; None for what is not JSON."""

    summary: str
    method: str = "get"
    body: type[Struct] | None = None
    answer: type[Struct] | None = None
    chunk: type[Struct] | None = None  # of the events, if it can stream
    errors: tuple[int, ...] = ()


OPERATIONS: Mapping[str, Operation] = {
    "/v1/chat/completions": Operation(
        summary="Answer a conversation.",
        method="post",
        body=ChatRequest,
        answer=schemas.ChatCompletion,
        chunk=schemas.ChatCompletionChunk,
        errors=READING,
    ),
    "/v1/completions": Operation(
        summary="Continue one or more prompts.",
        method="post",
        body=CompletionRequest,
        answer=schemas.Completion,
        chunk=schemas.CompletionChunk,
        errors=READING,
    ),
    "/v1/models": Operation(
        summary="The model, under each of its names.", answer=schemas.ModelList, errors=(503,)
    ),
    "/v1/models/{name}": Operation(summary="The model.", answer=schemas.Model, errors=(404, 503)),
    "/tokenize": Operation(
        summary="The token ids of a text or of a conversation.",
        method="post",
        body=TokenizeRequest,
        answer=schemas.Tokens,
        errors=READING,
    ),
    "/detokenize": Operation(
        summary="The text of token ids.",
        method="post",
        body=DetokenizeRequest,
        answer=schemas.Text,
        errors=READING,
    ),
    "/health": Operation(
        summary="Whether requests are taken.", answer=schemas.Health, errors=(503,)
    ),
    "/metrics": Operation(summary="Figures for Prometheus."),
    "/version": Operation(summary="The version of the server.", answer=schemas.Version),
    "/openapi.json": Operation(summary="This description."),
}


def describe(
    routes: Iterable[BaseRoute], *, open_paths: Iterable[str], with_key: bool, root_path: str = ""
) -> dict[str, Any]:
    """Describe `routes` in OpenAPI 3.1; raises KeyError for one without an entry in OPERATIONS.

    Pages for people, whose routes are not in the schema, are left out.
    With a key, all but `open_paths` need it. Clients see the routes below `root_path`.
    """
    described_routes = [
        route for route in routes if isinstance(route, Route) and route.include_in_schema
    ]
    paths = [route.path.replace(":path}", "}") for route in described_routes]
    locked = set(paths) - set(open_paths) if with_key else set()
    operations = {path: OPERATIONS[path] for path in paths}
    structs = [
        struct
        for found in operations.values()
        for struct in (found.body, found.answer, found.chunk)
        if struct is not None
    ]
    _, described = msgspec.json.schema_components([*structs, schemas.Error], ref_template=SCHEMA)
    components: dict[str, Any] = {"schemas": described}
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": metadata.version("minisgl")},
        "servers": [{"url": root_path or "/"}],
        "paths": {
            path: {found.method: _operation(path, found, locked=path in locked)}
            for path, found in operations.items()
        },
        "components": components,
    }


def _operation(path: str, operation: Operation, *, locked: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary}
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: _schema(operation.body)}}
    if path.endswith("{name}"):
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [name]
    success: dict[str, Any] = {"description": operation.summary}
    if operation.answer is not None:
        success["content"] = {JSON: _schema(operation.answer)}
    if operation.chunk is not None:
        success["content"][EVENTS] = {"schema": _event_schema(operation.chunk)}
    errors = (*operation.errors, *ANYWHERE, *((401,) if locked else ()))
    described["responses"] = {"200": success} | {
        str(status): {"description": ERRORS[status], "content": {JSON: _schema(schemas.Error)}}
        for status in sorted(errors)
    }
    if locked:
        described["security"] = [{"key": []}]
    return described


def _schema(struct: type[Struct]) -> dict[str, Any]:
    return {"schema": _reference(struct)}


def _reference(struct: type[Struct]) -> dict[str, Any]:
    return {"$ref": SCHEMA.format(name=struct.__name__)}


def _event_schema(chunk: type[Struct]) -> dict[str, Any]:
    """The schema of each event of a stream."""
    payload = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [_reference(chunk), _reference(schemas.Error)]},
    }
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, payload]}},
        "required": ["data"],
    }
