"""A request that has been read, with the engine that it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from minisgl.server.apis.messages.request_types import CountTokensRequest, MessagesRequest
from minisgl.server.apis.responses.request_types import ResponsesRequest
from minisgl.server.apis.vectors.request_types import EmbeddingRequest, RerankRequest, ScoreRequest
from minisgl.server.engine_state import EngineState
from minisgl.server.http.auth import client_of
from minisgl.server.http.bodies import read_body
from minisgl.server.http.paths import route_path
from minisgl.server.http.request_ids import request_id
from minisgl.server.requests.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from minisgl.server.served_engine import ServedEngine
from minisgl.server.tasks import check_endpoint

Body = TypeVar(
    "Body",
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


@dataclass(frozen=True, slots=True)
class Asked(Generic[Body]):
    """A request whose body has been read, and the engine that it is for."""

    scope: Scope
    engine: ServedEngine
    body: Body
    model: str  # by the name that the answer has

    @property
    def id(self) -> str:
        """The id in the log."""
        return request_id(self.scope)

    @property
    def client(self) -> str:
        return client_of(self.scope)


async def read_asked(state: EngineState, request: Request, kind: type[Body]) -> Asked[Body]:
    """Read a request; raises NotReadyError, CallerError or BodiesFullError."""
    engine = state.engine()
    check_endpoint(route_path(request.scope), engine.vectors.task)
    body = await read_body(request, kind, strict=state.config.strict_fields)
    return Asked(request.scope, engine, body, state.model_name(body.model))
