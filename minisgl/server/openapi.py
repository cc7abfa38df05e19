"""The OpenAPI description, generated from the types of requests and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from minisgl import __version__
from minisgl.models.generation import FROM_CHECKPOINT
from minisgl.request import DEFAULT_LOGPROBS, SamplingParams
from minisgl.server.apis.messages.answer_types import MessageEvent
from minisgl.server.apis.responses.answer_types import AnyEvent
from minisgl.server.endpoint import Endpoint
from minisgl.server.http.error_bodies import MessagesError
from minisgl.server.http.paths import OVERLOADED
from minisgl.server.requests.described import descriptions
from minisgl.server.requests.request_types import NUM_LOGPROBS, ChatRequest

JSON = "application/json"
EVENTS = "text/event-stream"
SCHEMA = "#/components/schemas/{name}"

ERRORS = {
    400: "A field is wrong or not supported (`param` names it), or the body is not JSON.",
    401: "The key is missing or wrong.",
    404: "No such model, or no such response is stored.",
    403: "The server does not answer to the name in the header Host.",
    408: "The request arrived too slowly.",
    409: "Another adapter has this name.",
    413: "The body is too large.",
    415: "The body is compressed in a way that is not supported.",
    429: "Too many requests or too much text are waiting; Retry-After says when to try again.",
    431: "The URL and the headers are too large.",
    500: "An internal error.",
    503: "Loading, draining, dead, stalled or short of memory, or the request has waited too long; "
    "`code` says which.",
    504: "The request has taken as long as its timeout allows.",
    OVERLOADED: "Loading, draining, dead, stalled or short of memory.",
}
ANYWHERE = (403, 431)


def describe(
    endpoints: Sequence[Endpoint],
    *,
    with_key: bool,
    root_path: str = "",
    max_logprobs: int = DEFAULT_LOGPROBS,
) -> dict[str, Any]:
    """Describe `endpoints` in OpenAPI 3.1. With a key, all need it but those that are open;
    without, those for the admin do.

    Clients see them below `root_path`. max_logprobs: of the engine's options.
    """
    types = [
        type
        for each in endpoints
        for type in (each.body, each.answer, each.event, each.error)
        if type is not None
    ]
    _, described = msgspec.json.schema_components(types, ref_template=SCHEMA)
    of_chats = descriptions(SamplingParams) | descriptions(ChatRequest)
    for body in {each.body for each in endpoints if each.body is not None}:
        fields = described[body.__name__]["properties"]
        _explain(fields, descriptions(body), of_chats)
        for name in fields.keys() & {*NUM_LOGPROBS, "logprob_token_ids"}:
            for option in fields[name].get("anyOf", ()):
                for limit in option.keys() & {"maximum", "maxItems"}:
                    option[limit] = max_logprobs
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        locked = (with_key and not each.is_open) or each.is_for_admin
        operation = _operation(each, locked=locked)
        paths.setdefault(each.shown_path, {})[each.method.lower()] = operation
    components: dict[str, Any] = {"schemas": described}
    if with_key or any(each.is_for_admin for each in endpoints):
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": components,
    }


def _explain(fields: dict[str, Any], own: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Add to the schemas of the fields of a request what is said of them, there or of `others`."""
    for name, schema in fields.items():
        if name in own or "description" not in schema:
            schema |= own.get(name) or others[name]
        if name in FROM_CHECKPOINT:
            otherwise = getattr(SamplingParams(), name)
            schema["description"] += f" Default: that of the checkpoint, or {otherwise:g}."


def _operation(endpoint: Endpoint, *, locked: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": endpoint.summary}
    if endpoint.body is not None:
        content = _schema(endpoint.body)
        if endpoint.example:  # else those of the fields are shown
            content["example"] = endpoint.example
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.shown_path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in endpoint.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    success: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.answer is not None:
        success["content"] = {JSON: _schema(endpoint.answer)}
    if endpoint.event is not None:
        success["content"][EVENTS] = {"schema": _event_schema(endpoint)}
    errors = {*endpoint.errors, *ANYWHERE, *((401,) if locked else ())}
    if endpoint.error is MessagesError and 503 in errors:
        errors = errors - {503} | {OVERLOADED}
    described["responses"] = {"200": success} | {
        str(status): {"description": ERRORS[status], "content": {JSON: _schema(endpoint.error)}}
        for status in sorted(errors)
    }
    if locked:
        described["security"] = [{"key": []}, {"x-api-key": []}]
    return described


def _schema(struct: type[Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": SCHEMA.format(name=struct.__name__)}}


def _event_schema(endpoint: Endpoint) -> dict[str, Any]:
    """The schema of each event of a stream."""
    [content], _ = msgspec.json.schema_components([endpoint.event], ref_template=SCHEMA)
    if endpoint.event in (AnyEvent, MessageEvent):  # named by type; none but these marks the end
        event = {"type": "string"}
        return {
            "type": "object",
            "properties": {"event": event, "data": _json_text(content)},
            "required": ["event", "data"],
        }
    payload = _json_text({"anyOf": [content, _schema(endpoint.error)["schema"]]})
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, payload]}},
        "required": ["data"],
    }


def _json_text(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "string", "contentMediaType": JSON, "contentSchema": content}
