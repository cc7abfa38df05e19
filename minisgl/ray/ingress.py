"""The HTTP application in front of the engines: keys, limits and errors, and the way to an engine.

It does not depend on Ray: whoever runs it says how engines are asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from minisgl.ray.engine import Answer
from minisgl.ray.prefills import PrefillEngines, Prefills
from minisgl.router.app import RouterHealth, forwarding_app
from minisgl.router.exchange import Head, HTTPRequest
from minisgl.router.forward import ForwardedAnswer
from minisgl.router.metrics import join_pages
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import NotReadyError
from minisgl.server.http.error_responses import json_response
from minisgl.server.http.hosts import Hosts


class Engines(PrefillEngines, Protocol):
    """The way to the engines."""

    def ask(self, request: HTTPRequest) -> Answer:
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

    async def health(request: Request) -> Response:
        wanted, ready = await engines.count()
        if not ready:
            raise NotReadyError("loading", f"No engine is ready (of {wanted}).")
        return json_response(RouterHealth("ready", wanted, ready))

    async def metrics(request: Request) -> bytes:
        return join_pages(await engines.metrics(), "replica")

    return forwarding_app(IngressEngines(engines), config, hosts, Counter(), health, metrics)


class IngressEngines:
    """Sends each request to an engine, after another one has computed its prompt if it should."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._prefills = Prefills(engines)

    def check_ready(self) -> None:
        """Nothing is known here: an engine that takes no requests says so."""

    async def answer(self, request: HTTPRequest, answer: ForwardedAnswer) -> bool:
        """The head waits for what follows, so that an engine that ends before can be replaced."""
        asked = await self._prefills.hand_over(request)
        head = Head(500, [])  # there is always another one
        async with aclosing(self._engines.ask(asked)) as parts:
            async for part in parts:
                if isinstance(part, Head):
                    head = part
                    continue
                if not answer.has_begun:
                    await answer.begin(head)
                await answer.go_on(part)
        if not answer.has_begun:
            await answer.begin(head)
        await answer.end()
        return True
