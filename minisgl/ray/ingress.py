"""The HTTP application in front of the engines: keys, limits and errors, and the way to an engine.

It does not depend on Ray: whoever runs it says how engines are asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from importlib import metadata
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from minisgl.ray.exchange import Answer, Head, HTTPRequest
from minisgl.ray.prefills import PrefillEngines, Prefills
from minisgl.router.app import RouterHealth
from minisgl.router.failures import ReplicaLostError, last_events
from minisgl.router.forward import HOP_HEADERS, MAX_ATTEMPTS, OWN_HEADERS
from minisgl.router.keys import holder_of, route_key
from minisgl.router.metrics import join_pages
from minisgl.server import schemas
from minisgl.server.access_log import log_failure, request_id
from minisgl.server.app import application, middleware_of
from minisgl.server.auth import client_of
from minisgl.server.bodies import read_bytes
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import NotReadyError
from minisgl.server.error_responses import (
    json_response,
)
from minisgl.server.hosts import Hosts
from minisgl.server.metrics import CONTENT_TYPE, Answered
from minisgl.server.pages import page_routes
from minisgl.server.request_ids import HEADER
from minisgl.server.root_path import route_path


class EngineLostError(Exception):
    """The engine that was asked has ended."""


class Engines(PrefillEngines, Protocol):
    """The way to the engines."""

    def ask(self, key: bytes | None, request: HTTPRequest) -> Answer:
        """Yield one engine's answer; raises EngineLostError. Closing it ends the request there."""
        ...

    async def count(self) -> tuple[int, int]:
        """How many engines there should be, and how many of them take requests."""
        ...

    async def metrics(self) -> Mapping[str, bytes]:
        """The pages of all engines that take requests, by their names."""
        ...


def create_ingress_app(
    engines: Engines, config: ServerConfig, hosts: Hosts | None = None
) -> Starlette:
    """Build the application. With `hosts` it answers only requests addressed to one of them."""
    responses: Counter[Answered] = Counter()

    async def health(request: Request) -> Response:
        wanted, ready = await engines.count()
        if not ready:
            raise NotReadyError("loading", f"No engine is ready (of {wanted}).")
        return json_response(RouterHealth("ready", wanted, ready))

    async def version(request: Request) -> Response:
        return json_response(schemas.Version(metadata.version("minisgl")))

    async def metrics(request: Request) -> Response:
        page = join_pages(await engines.metrics(), "replica")
        return Response(page, headers={"content-type": CONTENT_TYPE})

    return application(
        [
            Route("/health", health),
            Route("/version", version),
            Route("/metrics", metrics),
            *([] if config.no_ui else page_routes()),  # there while no engine is ready, too
            Route("/{path:path}", Forward(engines)),
        ],
        middleware_of(config, responses, hosts),
    )


class Forward:
    """An ASGI application: all requests that an engine answers."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._prefills = Prefills(engines)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_request(scope, receive)
        key = None
        if request.method == "POST" and not request.holder:
            key = route_key(request.path, request.body, client_of(scope))
        answering = asyncio.ensure_future(self._answer(scope, send, key, request))
        leaving = asyncio.ensure_future(_until_left(receive))
        leaving.add_done_callback(lambda _: answering.cancel())
        try:
            await answering
        except asyncio.CancelledError:
            if not leaving.done():
                raise
        finally:
            leaving.cancel()

    async def _answer(
        self, scope: Scope, send: Send, key: bytes | None, request: HTTPRequest
    ) -> None:
        """Relay an answer. Its head waits for what follows, so that an engine that ends before can
        be replaced by another; an answer that has begun ends with an error."""
        has_begun = False
        sent = b""
        for _ in range(MAX_ATTEMPTS):
            try:
                asked = await self._prefills.hand_over(key, request)
                async with aclosing(self._engines.ask(key, asked)) as answer:
                    async for part in answer:
                        if isinstance(part, Head):
                            head = part
                            continue
                        if not has_begun:
                            await send(_start(head))
                            has_begun = True
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                        sent = part
                if not has_begun:
                    await send(_start(head))
                await send({"type": "http.response.body", "body": b""})
                return
            except EngineLostError:
                if has_begun:
                    break
        error = ReplicaLostError()
        if not has_begun:
            raise error
        log_failure(request_id(scope), 200, error)
        await send({"type": "http.response.body", "body": last_events(scope, error, sent)})


async def read_request(scope: Scope, receive: Receive) -> HTTPRequest:
    """The request as it goes to an engine, with the id that the client sees."""
    body = b""
    if scope["method"] not in ("GET", "HEAD"):
        body = await read_bytes(Request(scope, receive))
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    headers = [pair for pair in headers if pair[0] not in HOP_HEADERS]
    headers.append((HEADER.encode(), request_id(scope).encode()))
    path = route_path(scope)
    holder = holder_of(path, body)
    return HTTPRequest(scope["method"], path, scope["query_string"], headers, body, holder)


def _start(head: Head) -> Message:
    headers = [pair for pair in head.headers if pair[0] not in OWN_HEADERS]
    return {"type": "http.response.start", "status": head.status, "headers": headers}


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
