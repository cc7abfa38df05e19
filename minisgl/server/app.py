"""The application: the routes, and the middleware that every request passes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from minisgl.server.config import ServerConfig
from minisgl.server.endpoint import Endpoint
from minisgl.server.endpoints import ENDPOINTS, WrongTaskError, endpoints_of
from minisgl.server.engine_state import EngineState
from minisgl.server.handlers import about
from minisgl.server.handlers.generation import IGNORED_HEADER
from minisgl.server.http.access_log import Answered, Observe, Patterns, Usage
from minisgl.server.http.auth import Keys, check_admin
from minisgl.server.http.bodies import BodyBudget, read_body
from minisgl.server.http.deadlines import TimeLimit
from minisgl.server.http.faults import HANDLERS, checked, raise_fault
from minisgl.server.http.hosts import Hosts
from minisgl.server.http.leaving import while_waited_for
from minisgl.server.http.paths import below_root, without_slash
from minisgl.server.http.request_ids import ANTHROPIC_HEADER, HEADER, with_id
from minisgl.server.http.tracing import tracing_of
from minisgl.server.pages import PAGES, page_routes
from minisgl.server.service import Asked, Service

OPEN_PATHS = frozenset((*PAGES, *(each.path for each in ENDPOINTS if each.is_open)))


def _kinds(kind: type[Struct]) -> Iterator[type[Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


# Names of fields that may be logged: our own.
FIELD_NAMES = frozenset(
    name
    for kind in _kinds(Struct)
    if kind.__module__.startswith("minisgl.")
    for name in kind.__struct_fields__
)


def application(
    routes: Sequence[BaseRoute],
    config: ServerConfig,
    responses: Counter[Answered],
    hosts: Hosts | None,
    usage: dict[str, Usage] | None = None,
) -> Starlette:
    """An application whose errors are answered in the form of the API that was asked.

    responses: counts them. usage: counts that of each key that has a name; None: another server
    does. With `hosts` it answers only requests addressed to one of them.
    """
    checks = [raise_fault]
    if hosts is not None:
        checks.append(hosts.check)
    if config.api_key:
        checks.append(Keys(config.api_key).check)
    tracing = tracing_of(os.environ)
    # What every request passes, outermost first: ids, counting, and who may ask.
    middleware = [
        Middleware(without_slash, pages=PAGES),
        Middleware(with_id),
        Middleware(Observe, responses=responses, usage=usage, tracing=tracing),
        Middleware(checked, checks=checks),
    ]
    if config.cors_origin:
        # Browsers send preflights without a key, and hide errors without these headers from the
        # page.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=sorted({each.method for each in ENDPOINTS}),
            allow_headers=["*"],
            expose_headers=["retry-after", HEADER, ANTHROPIC_HEADER, IGNORED_HEADER],
        )
        middleware.insert(2, cors)
    if config.root_path:
        middleware.insert(0, Middleware(below_root, prefix=config.root_path))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
    app.state.bodies = BodyBudget()
    app.state.field_names = FIELD_NAMES
    app.state.open_paths = OPEN_PATHS
    app.state.patterns = Patterns((*PAGES, *(each.path for each in endpoints_of(config))))
    app.state.tracing = tracing
    return app


def create_app(state: EngineState, hosts: Hosts | None = None) -> Starlette:
    """Build the application. With `hosts` it answers only requests addressed to one of them."""
    service, config = Service(state), state.config
    pages = [Route("/", about.hint)] if config.no_ui else page_routes()
    by_path: dict[str, list[Endpoint]] = {}
    for each in endpoints_of(config):
        by_path.setdefault(each.path, []).append(each)
    routes = [route(path, endpoints, service) for path, endpoints in by_path.items()]
    return application(
        [*pages, *routes], config, service.metrics.responses, hosts, service.metrics.usage
    )


def route(path: str, endpoints: Sequence[Endpoint], service: Service) -> Route:
    """The route of all methods at a path."""
    by_method = {each.method: each for each in endpoints}

    async def answer(request: Request) -> ASGIApp:
        endpoint = by_method["GET" if request.method == "HEAD" else request.method]
        if endpoint.is_for_admin:
            check_admin(request.scope, service.state.config.admin_key)
        if endpoint.body is None:
            return await endpoint.handler(service, request)
        limit = TimeLimit(request.scope, service.state.config.max_queue_seconds)
        async with while_waited_for(request) as watched:
            with endpoint.naming():
                async with limit.held():
                    asked = await read(endpoint, endpoint.body, service.state, watched)
                limit.shorten(getattr(asked.body, "timeout", None))
                async with limit.held():
                    return await endpoint.handler(service, asked)

    return Route(path, answer, methods=[*by_method])


async def read(
    endpoint: Endpoint, kind: type[Struct], state: EngineState, request: Request
) -> Asked[Any]:
    """Read a request whose body is a `kind`; raises NotReadyError, CallerError, BodiesFullError."""
    engine = state.engine()
    if endpoint.task not in ("", engine.vectors.task):
        raise WrongTaskError(endpoint, engine.vectors.task)
    body: Any = await read_body(request, kind, strict=state.config.strict_fields)
    name = state.model_name(getattr(body, "model", None))
    adapter = engine.adapters.get(name)
    return Asked(request.scope, engine, body, name, () if adapter is None else (adapter,))
