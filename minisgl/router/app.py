"""The application of a router: what it answers itself, and everything else forwarded."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from importlib import metadata

from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minisgl.errors import MinisglError
from minisgl.router.failures import error_response
from minisgl.router.fleet import Fleet, Replica
from minisgl.router.forward import Forward
from minisgl.router.metrics import RouterMetrics, join_pages
from minisgl.router.upstream import UpstreamLostError
from minisgl.server import schemas
from minisgl.server.access_log import log_failure, request_id
from minisgl.server.app import middleware_of
from minisgl.server.auth import OPEN_PATHS
from minisgl.server.bodies import BodyBudget
from minisgl.server.config import ServerConfig
from minisgl.server.error_responses import answer_disconnect, answer_http_exception, json_response
from minisgl.server.hosts import Hosts
from minisgl.server.metrics import CONTENT_TYPE
from minisgl.server.root_path import route_path

METRICS_SECONDS = 5


class RouterHealth(Struct):
    status: str
    replicas: int
    ready: int


def create_router_app(fleet: Fleet, config: ServerConfig, hosts: Hosts | None = None) -> Starlette:
    """Build the application. With `hosts` it answers only requests addressed to one of them."""
    metrics = RouterMetrics(fleet)
    forward = Forward(fleet)

    async def health(request: Request) -> Response:
        ready = fleet.check_ready()
        return json_response(RouterHealth("ready", len(fleet.replicas), len(ready)))

    async def version(request: Request) -> Response:
        return json_response(schemas.Version(metadata.version("minisgl")))

    async def joined_metrics(request: Request) -> Response:
        started = [replica for replica in fleet.replicas if replica.state.start]
        pages = await asyncio.gather(*map(_metrics_page, started))
        found = {
            str(replica.index): page
            for replica, page in zip(started, pages, strict=True)
            if page is not None
        }
        content = join_pages(found) + metrics.render()
        return Response(content, headers={"content-type": CONTENT_TYPE})

    async def answer_error(request: Request, error: Exception) -> ASGIApp:
        assert isinstance(error, MinisglError)
        if route_path(request.scope) not in OPEN_PATHS:
            log_failure(request_id(request.scope), error.http_status, error)
        return error_response(error, {"retry-after": "1"} if error.http_status == 429 else None)

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/version", version),
            Route("/metrics", joined_metrics),
            Route("/{path:path}", forward),
        ],
        middleware=middleware_of(config, metrics.responses, hosts, error_response),
        exception_handlers={
            MinisglError: answer_error,  # type: ignore[dict-item]
            HTTPException: answer_http_exception,
            ClientDisconnect: answer_disconnect,
        },
    )
    app.state.bodies = BodyBudget()
    return app


async def _metrics_page(replica: Replica) -> bytes | None:
    """The metrics of a replica; None if it does not answer."""
    with suppress(UpstreamLostError, TimeoutError):
        async with asyncio.timeout(METRICS_SECONDS):
            return await replica.get("/metrics")
    return None
