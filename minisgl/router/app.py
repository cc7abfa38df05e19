"""The application of a router: what it answers itself, and everything else forwarded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl import __version__
from minisgl.router.adapters import FleetAdapters
from minisgl.router.exchange import EngineLostError
from minisgl.router.fleet import Fleet, Peer
from minisgl.router.forward import Engines, Forward
from minisgl.router.metrics import RouterMetrics, join_pages
from minisgl.router.relay import Relay
from minisgl.router.training import FleetTraining
from minisgl.server.apis.openai import answer_types
from minisgl.server.app import application
from minisgl.server.config import ServerConfig
from minisgl.server.handlers.adapters import LOAD, UNLOAD
from minisgl.server.history import SECONDS, MetricsHistory
from minisgl.server.http.access_log import Answered
from minisgl.server.http.encoding import json_response
from minisgl.server.http.hosts import Hosts
from minisgl.server.metrics_format import format_for
from minisgl.server.pages import page_routes

METRICS_SECONDS = 5


class RouterHealth(Struct):
    status: str
    replicas: int
    ready: int


def forwarding_app(
    engines: Engines,
    config: ServerConfig,
    hosts: Hosts | None,
    responses: Counter[Answered],
    own: Mapping[str, Callable[[Request], Awaitable[Response]]],
    others: Sequence[Route] = (),
) -> Starlette:
    """An application that forwards all requests but those to its `own` paths and its pages.

    responses: counts them. others: routes that are its own, too.
    """

    async def version(request: Request) -> Response:
        return json_response(answer_types.Version(__version__))

    routes = [Route(path, answer) for path, answer in {"/version": version, **own}.items()]
    if not config.no_ui:
        routes += page_routes()  # there while no engine is ready, too
    every = Route("/{path:path}", Forward(engines))
    return application([*routes, *others, every], config, responses, hosts)


def create_router_app(
    fleet: Fleet,
    config: ServerConfig,
    hosts: Hosts | None = None,
    *,
    index: int = 0,
    routers: Sequence[Peer] = (),
    adapters: FleetAdapters | None = None,
    training: FleetTraining | None = None,
) -> Starlette:
    """Build the application. With `hosts` it answers only requests addressed to one of them.

    index: of this among several routing processes. routers: all of them, if there are several, on
    private sockets, where each tells its own metrics alone. adapters, training: None where none is
    loaded, and where no trainer may come.
    """
    own_places = [(router.path, None) for router in routers if router.index == index]
    metrics = RouterMetrics(fleet)

    async def health(request: Request) -> Response:
        waits = fleet.refusals and not fleet.is_draining  # a trainer may come
        ready = fleet.ready if waits else fleet.check_ready()
        return json_response(RouterHealth("ready", len(fleet.replicas), len(ready)))

    async def joined_metrics(request: Request) -> Response:
        format = format_for(request.headers.get("accept", ""))
        if request.scope["server"] in own_places:
            return format.response(metrics.render(format))
        started = [replica for replica in fleet.replicas if replica.state.start]
        others = [router for router in routers if router.index != index]
        of_replicas, of_routers = await asyncio.gather(
            _documents(started, "/metrics", format.content_type),
            _documents(others, "/metrics", format.content_type),
        )
        of_routers[str(index)] = metrics.render(format)
        page = join_pages((of_replicas, "replica"), (of_routers, "router"))
        return format.response(page + format.end)

    async def history(request: Request) -> Response:
        started = [replica for replica in fleet.replicas if replica.state.start]
        found = await _documents(started, "/metrics/history")
        histories = {
            name: msgspec.json.decode(content, type=MetricsHistory)
            for name, content in found.items()
        }
        samples = {name: each.replicas[""] for name, each in histories.items()}
        return json_response(MetricsHistory(SECONDS, samples))

    own = {"/health": health, "/metrics": joined_metrics, "/metrics/history": history}
    paths = () if adapters is None else (LOAD, UNLOAD)
    others = [Route(path, adapters.change, methods=["POST"]) for path in paths if adapters]
    others += [] if training is None else training.routes()
    return forwarding_app(Relay(fleet), config, hosts, metrics.responses, own, others)


async def _documents(peers: Sequence[Peer], path: str, accept: str = "*/*") -> dict[str, bytes]:
    """What each peer that answers has at `path`, by its index."""

    async def document(peer: Peer) -> bytes | None:
        with suppress(EngineLostError, TimeoutError):
            async with asyncio.timeout(METRICS_SECONDS):
                status, content = await peer.get(path, accept)
                return content if status == 200 else None
        return None

    found = await asyncio.gather(*map(document, peers))
    return {
        str(peer.index): content
        for peer, content in zip(peers, found, strict=True)
        if content is not None
    }
