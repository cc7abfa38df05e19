"""The application: the routes, and the middleware that every request passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route

from minisgl.errors import MinisglError
from minisgl.server.access_log import Observe
from minisgl.server.auth import RequireKey
from minisgl.server.bodies import BodyBudget
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.error_responses import (
    answer_disconnect,
    answer_error,
    answer_http_exception,
    error_response,
)
from minisgl.server.faults import AnswerFaults
from minisgl.server.hosts import CheckHost, Hosts
from minisgl.server.messages_api.paths import COUNT_TOKENS, MESSAGES
from minisgl.server.metrics import Answered, Metrics
from minisgl.server.pages import page_routes
from minisgl.server.request_ids import ANTHROPIC_HEADER, HEADER, RequestIds
from minisgl.server.root_path import RootPath
from minisgl.server.routes import IGNORED_HEADER, Routes
from minisgl.server.trailing_slash import TrailingSlash


def middleware_of(
    config: ServerConfig, responses: Counter[Answered], hosts: Hosts | None
) -> list[Middleware]:
    """What every request passes, outermost first: ids, counting, and who may ask."""
    middleware = [
        Middleware(Observe, responses=responses, error_response=error_response),
        Middleware(AnswerFaults, error_response=error_response),
    ]
    if hosts is not None:
        middleware.append(Middleware(CheckHost, hosts=hosts, error_response=error_response))
    if config.api_key:
        middleware.append(
            Middleware(RequireKey, keys=config.api_key, error_response=error_response)
        )
    if config.cors_origin:
        # Outermost, because browsers send preflights without a key, and hide errors without
        # these headers from the page.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", HEADER, ANTHROPIC_HEADER, IGNORED_HEADER],
        )
        middleware.insert(0, cors)
    middleware.insert(0, Middleware(RequestIds))
    middleware.insert(0, Middleware(TrailingSlash))
    if config.root_path:
        middleware.insert(0, Middleware(RootPath, prefix=config.root_path))
    return middleware


def application(routes: Sequence[BaseRoute], middleware: Sequence[Middleware]) -> Starlette:
    """An application whose errors are answered in the form of the API that was asked."""
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            MinisglError: answer_error,
            HTTPException: answer_http_exception,
            ClientDisconnect: answer_disconnect,
        },
    )
    app.state.bodies = BodyBudget()
    return app


def create_app(state: EngineState, hosts: Hosts | None = None) -> Starlette:
    """Build the application. With `hosts` it answers only requests addressed to one of them."""
    metrics = Metrics(state)
    routes = Routes(state, metrics)
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
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health),
            Route("/version", routes.version),
            Route("/metrics", routes.metrics),
            Route("/openapi.json", routes.openapi),
        ],
        middleware,
    )
