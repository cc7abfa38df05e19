"""The OpenAPI description, generated from the types of requests and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec
from msgspec import Struct
from starlette.routing import BaseRoute, Route

from minisgl.models.generation import FROM_CHECKPOINT
from minisgl.request import SamplingParams
from minisgl.server.apis.messages.answer_types import MessageAnswer, MessageEvent, TokenCount
from minisgl.server.apis.messages.request_types import CountTokensRequest, MessagesRequest
from minisgl.server.apis.openai import answer_types as openai
from minisgl.server.apis.responses.answer_types import AnyEvent, DeletedResponse, Response
from minisgl.server.apis.responses.request_types import ResponsesRequest
from minisgl.server.apis.vectors.answer_types import EmbeddingList, RankedList, ScoreList
from minisgl.server.apis.vectors.request_types import EmbeddingRequest, RerankRequest, ScoreRequest
from minisgl.server.history import MetricsHistory
from minisgl.server.http.error_bodies import Error, MessagesError
from minisgl.server.http.paths import COUNT_TOKENS, MESSAGES, OVERLOADED
from minisgl.server.requests.described import descriptions
from minisgl.server.requests.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from minisgl.server.tasks import EMBEDDINGS, RERANK, RERANK_V2, SCORE

JSON = "application/json"
EVENTS = "text/event-stream"
SCHEMA = "#/components/schemas/{name}"

ERRORS = {
    400: "A field is wrong or not supported (`param` names it), or the body is not JSON.",
    401: "The API key is missing or wrong.",
    404: "No such model, or no such response is stored.",
    403: "The server does not answer to the name in the header Host.",
    408: "The request arrived too slowly.",
    413: "The body is too large.",
    415: "The body is compressed in a way that is not supported.",
    429: "Too many requests or too much text are waiting; Retry-After says when to try again.",
    431: "The URL and the headers are too large.",
    500: "An internal error.",
    503: "Loading, draining, dead, stalled or short of memory; `code` says which.",
    OVERLOADED: "Loading, draining, dead, stalled or short of memory.",
}
ANYWHERE = (403, 431)
READING = (400, 404, 408, 413, 415, 429, 500, 503)
AS_ANTHROPIC = (*READING[:-1], OVERLOADED)


@dataclass(frozen=True, slots=True)
class Operation:
    """The types of a route's request and answer; None for what is not JSON."""

    summary: str
    body: type[Struct] | None = None
    answer: type[Struct] | None = None
    chunk: Any = None  # the type of the events, if it can stream
    errors: tuple[int, ...] = READING
    error: type[Struct] = Error
    is_deletion: bool = False

    @property
    def method(self) -> str:
        return "delete" if self.is_deletion else "get" if self.body is None else "post"


OPERATIONS: Mapping[str, Operation] = {
    "/v1/chat/completions": Operation(
        "Answer a conversation.", ChatRequest, openai.ChatCompletion, openai.ChatCompletionChunk
    ),
    "/v1/completions": Operation(
        "Continue one or more prompts.",
        CompletionRequest,
        openai.Completion,
        openai.CompletionChunk,
    ),
    "/v1/responses": Operation(
        "Answer a conversation, as the Responses API has it.", ResponsesRequest, Response, AnyEvent
    ),
    "/v1/responses/{id}": Operation(
        "A response that is stored.", answer=Response, errors=(400, 404)
    ),
    MESSAGES: Operation(
        "Answer a conversation, as Anthropic's API does.",
        MessagesRequest,
        MessageAnswer,
        MessageEvent,
        errors=AS_ANTHROPIC,
        error=MessagesError,
    ),
    COUNT_TOKENS: Operation(
        "The number of tokens of a conversation.",
        CountTokensRequest,
        TokenCount,
        errors=AS_ANTHROPIC,
        error=MessagesError,
    ),
    EMBEDDINGS: Operation("Vectors of texts.", EmbeddingRequest, EmbeddingList),
    RERANK: Operation("Documents by how well they answer a query.", RerankRequest, RankedList),
    RERANK_V2: Operation(
        "Documents by how well they answer a query, as Cohere's second version has it.",
        RerankRequest,
        RankedList,
    ),
    SCORE: Operation("Scores of pairs of texts.", ScoreRequest, ScoreList),
    "/v1/models": Operation(
        "The model, under each of its names.", answer=openai.ModelList, errors=(503,)
    ),
    "/v1/models/{name}": Operation("The model.", answer=openai.Model, errors=(404, 503)),
    "/tokenize": Operation(
        "The token ids of a text or of a conversation.", TokenizeRequest, openai.Tokens
    ),
    "/detokenize": Operation("The text of token ids.", DetokenizeRequest, openai.Text),
    "/health": Operation("Whether requests are taken.", answer=openai.Health, errors=(503,)),
    "/metrics": Operation("Figures for Prometheus.", errors=()),
    "/metrics/history": Operation(
        "The last hour of the figures that the page draws.", answer=MetricsHistory, errors=()
    ),
    "/version": Operation("The version of the server.", answer=openai.Version, errors=()),
    "/openapi.json": Operation("This description.", errors=()),
}
HELLO = [{"role": "user", "content": "Hello!"}]
RANKED = {"query": "What purrs?", "documents": ["It rains.", "A cat does."]}
# A body to begin with, for each path.
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 100},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 30},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 100},
    MESSAGES: {"messages": HELLO, "max_tokens": 100},
    COUNT_TOKENS: {"messages": HELLO},
    "/tokenize": {"prompt": "Hello!", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    EMBEDDINGS: {"input": ["a text", "another"]},
    RERANK: RANKED,
    RERANK_V2: RANKED,
    SCORE: {"text_1": "What purrs?", "text_2": ["It rains.", "A cat does."]},
}
# Further ones on the same paths.
DELETIONS: Mapping[str, Operation] = {
    "/v1/responses/{id}": Operation(
        "Delete a response that is stored.",
        answer=DeletedResponse,
        errors=(404,),
        is_deletion=True,
    ),
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
    operations = [
        (path, found[path])
        for path in paths
        for found in (OPERATIONS, DELETIONS)
        if found is OPERATIONS or path in found
    ]
    types = [
        type
        for _, found in operations
        for type in (found.body, found.answer, found.chunk, found.error)
        if type is not None
    ]
    _, described = msgspec.json.schema_components(types, ref_template=SCHEMA)
    of_chats = descriptions(SamplingParams) | descriptions(ChatRequest)
    for body in {found.body for _, found in operations if found.body is not None}:
        _explain(described[body.__name__]["properties"], descriptions(body), of_chats)
    by_path: dict[str, dict[str, Any]] = {}
    for path, found in operations:
        described_operation = _operation(path, found, locked=path in locked)
        by_path.setdefault(path, {})[found.method] = described_operation
    components: dict[str, Any] = {"schemas": described}
    if with_key:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": metadata.version("minisgl")},
        "servers": [{"url": root_path or "/"}],
        "paths": by_path,
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


def _operation(path: str, operation: Operation, *, locked: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary}
    if operation.body is not None:
        content = {**_schema(operation.body), "example": BODIES[path]}
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    if path.endswith("}"):
        name = path.rpartition("{")[2].removesuffix("}")
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
    success: dict[str, Any] = {"description": operation.summary}
    if operation.answer is not None:
        success["content"] = {JSON: _schema(operation.answer)}
    if operation.chunk is not None:
        success["content"][EVENTS] = {"schema": _event_schema(operation)}
    errors = (*operation.errors, *ANYWHERE, *((401,) if locked else ()))
    described["responses"] = {"200": success} | {
        str(status): {"description": ERRORS[status], "content": {JSON: _schema(operation.error)}}
        for status in sorted(errors)
    }
    if locked:
        described["security"] = [{"key": []}, {"x-api-key": []}]
    return described


def _schema(struct: type[Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": SCHEMA.format(name=struct.__name__)}}


def _event_schema(operation: Operation) -> dict[str, Any]:
    """The schema of each event of a stream."""
    [content], _ = msgspec.json.schema_components([operation.chunk], ref_template=SCHEMA)
    if operation.chunk in (AnyEvent, MessageEvent):  # named by type; none but these marks the end
        event = {"type": "string"}
        return {
            "type": "object",
            "properties": {"event": event, "data": _json_text(content)},
            "required": ["event", "data"],
        }
    payload = _json_text({"anyOf": [content, _schema(operation.error)["schema"]]})
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, payload]}},
        "required": ["data"],
    }


def _json_text(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "string", "contentMediaType": JSON, "contentSchema": content}
