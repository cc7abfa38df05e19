"""The application of a router: what it answers itself, and everything else forwarded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata

from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl.router.fleet import Fleet, Peer
from minisgl.router.forward import Forward
from minisgl.router.metrics import RouterMetrics, join_pages
from minisgl.router.upstream import UpstreamLostError
from minisgl.server import schemas
from minisgl.server.app import application, middleware_of
from minisgl.server.config import ServerConfig
from minisgl.server.error_responses import (
    json_response,
)
from minisgl.server.hosts import Hosts
from minisgl.server.metrics import CONTENT_TYPE
from minisgl.server.pages import page_routes

METRICS_SECONDS = 5


class RouterHealth(Struct):
    status: str
    replicas: int
    ready: int


def create_router_app(
    fleet: Fleet,
    config: ServerConfig,
    hosts: Hosts | None = None,
    *,
    index: int = 0,
    routers: Sequence[Peer] = (),
) -> Starlette:
    """Build the application. With `hosts` it answers only requests addressed to one of them.

    index: of this among several routing processes. routers: all of them, if there are several, on
    private sockets, where each tells its own metrics alone.
    """
    own_places = [(router.path, None) for router in routers if router.index == index]
    metrics = RouterMetrics(fleet)
    forward = Forward(fleet)

    async def health(request: Request) -> Response:
        ready = fleet.check_ready()
        return json_response(RouterHealth("ready", len(fleet.replicas), len(ready)))

    async def version(request: Request) -> Response:
        return json_response(schemas.Version(metadata.version("minisgl")))

    async def joined_metrics(request: Request) -> Response:
        page = await join() if request.scope["server"] not in own_places else metrics.render()
        return Response(page, headers={"content-type": CONTENT_TYPE})

    async def join() -> bytes:
        started = [replica for replica in fleet.replicas if replica.state.start]
        others = [router for router in routers if router.index != index]
        of_replicas, of_routers = await asyncio.gather(
            _metrics_pages(started), _metrics_pages(others)
        )
        of_routers[str(index)] = metrics.render()
        return join_pages(of_replicas, "replica") + join_pages(of_routers, "router")

    return application(
        [
            Route("/health", health),
            Route("/version", version),
            Route("/metrics", joined_metrics),
            *([] if config.no_ui else page_routes()),  # there while no replica is ready, too
            Route("/{path:path}", forward),
        ],
        middleware_of(config, metrics.responses, hosts),
    )


async def _metrics_pages(peers: Sequence[Peer]) -> dict[str, bytes]:
    """The metrics of each peer that answers, by its index."""

    async def page(peer: Peer) -> bytes | None:
        with suppress(UpstreamLostError, TimeoutError):
            async with asyncio.timeout(METRICS_SECONDS):
                status, content = await peer.get("/metrics")
                return content if status == 200 else None
        return None

    found = await asyncio.gather(*map(page, peers))
    return {
        str(peer.index): content
        for peer, content in zip(peers, found, strict=True)
        if content is not None
    }
