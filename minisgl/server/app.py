"""The application: the routes, and the middleware that every request passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route

from minisgl.server.apis.messages import request_types as messages
from minisgl.server.apis.responses import request_types as responses
from minisgl.server.apis.vectors import request_types as vectors
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.http.access_log import Answered, Observe
from minisgl.server.http.auth import Keys
from minisgl.server.http.bodies import BodyBudget
from minisgl.server.http.faults import HANDLERS, Checks, raise_fault
from minisgl.server.http.hosts import Hosts
from minisgl.server.http.paths import COUNT_TOKENS, MESSAGES, RootPath, TrailingSlash
from minisgl.server.http.request_ids import ANTHROPIC_HEADER, HEADER, RequestIds
from minisgl.server.metrics import Metrics
from minisgl.server.pages import page_routes
from minisgl.server.requests import chat_messages, constraint_types, request_types, tools
from minisgl.server.routes import IGNORED_HEADER, Routes
from minisgl.server.tasks import EMBEDDINGS, RERANK, RERANK_V2, SCORE
from minisgl.server.vector_routes import VectorRoutes

# Names of fields that may be logged.
FIELD_NAMES = frozenset(
    name
    for module in (
        request_types,
        chat_messages,
        tools,
        constraint_types,
        messages,
        responses,
        vectors,
    )
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Struct)
    for name in kind.__struct_fields__
)


def middleware_of(
    config: ServerConfig, responses: Counter[Answered], hosts: Hosts | None
) -> list[Middleware]:
    """What every request passes, outermost first: ids, counting, and who may ask."""
    middleware = [Middleware(RootPath, prefix=config.root_path)] if config.root_path else []
    middleware += [Middleware(TrailingSlash), Middleware(RequestIds)]
    if config.cors_origin:
        # Browsers send preflights without a key, and hide errors without these headers from the
        # page.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", HEADER, ANTHROPIC_HEADER, IGNORED_HEADER],
        )
        middleware.append(cors)
    checks = [raise_fault]
    if hosts is not None:
        checks.append(hosts.check)
    if config.api_key:
        checks.append(Keys(config.api_key).check)
    return [
        *middleware,
        Middleware(Observe, responses=responses),
        Middleware(Checks, checks=checks),
    ]


def application(routes: Sequence[BaseRoute], middleware: Sequence[Middleware]) -> Starlette:
    """An application whose errors are answered in the form of the API that was asked."""
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=HANDLERS,
    )
    app.state.bodies = BodyBudget()
    app.state.field_names = FIELD_NAMES
    return app


def create_app(state: EngineState, hosts: Hosts | None = None) -> Starlette:
    """Build the application. With `hosts` it answers only requests addressed to one of them."""
    metrics = Metrics(state)
    routes = Routes(state, metrics)
    of_vectors = VectorRoutes(state)
    config = state.config
    middleware = middleware_of(config, metrics.responses, hosts)
    hint = Route("/", routes.hint, include_in_schema=False)
    pages = [hint] if config.no_ui else page_routes()
    return application(
        [
            *pages,
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/responses", routes.responses, methods=["POST"]),
            Route("/v1/responses/{id}", routes.stored_response, methods=["DELETE", "GET"]),
            Route(MESSAGES, routes.messages, methods=["POST"]),
            Route(COUNT_TOKENS, routes.count_tokens, methods=["POST"]),
            Route(EMBEDDINGS, of_vectors.embeddings, methods=["POST"]),
            Route(RERANK, of_vectors.rerank, methods=["POST"]),
            Route(RERANK_V2, of_vectors.rerank_v2, methods=["POST"]),
            Route(SCORE, of_vectors.score, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health),
            Route("/version", routes.version),
            Route("/metrics", routes.metrics),
            Route("/metrics/history", routes.metrics_history),
            Route("/openapi.json", routes.openapi),
        ],
        middleware,
    )
