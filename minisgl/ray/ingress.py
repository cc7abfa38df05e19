"""The HTTP application in front of the engines: keys, limits and errors, and the way to an engine.

It does not depend on Ray: whoever runs it says how engines are asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from time import monotonic
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from minisgl.ray.engine import Answer
from minisgl.router.app import RouterHealth, forwarding_app
from minisgl.router.exchange import Head, HTTPRequest
from minisgl.router.fleet import MIN_PREFILL_BYTES
from minisgl.router.forward import ForwardedAnswer
from minisgl.router.metrics import join_pages
from minisgl.router.relay import PREFILL_S
from minisgl.router.table import MAX_KEY_BYTES, RouteTable
from minisgl.server.answers.handover import PREFILL, PREFILLED, offered_address
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import NotReadyError
from minisgl.server.http.encoding import json_response
from minisgl.server.http.hosts import Hosts
from minisgl.server.metrics_format import format_for

logger = logging.getLogger(__name__)

# For an engine to take a prompt. If none does, none is asked for a while.
ACCEPT_S, PAUSE_S = 2.0, 5.0
ANSWERING = "answering"


class Engines(Protocol):
    """The way to the engines."""

    def ask(self, request: HTTPRequest) -> Answer:
        """Yield one engine's answer; raises EngineLostError. Closing it ends the request there."""

    async def count(self) -> tuple[int, int]:
        """How many engines there should be, and how many of them take requests."""

    async def metrics(self, accept: str) -> Mapping[str, bytes]:
        """The pages of all engines that take requests, by their names. accept: the format."""

    @property
    def has_prefill(self) -> bool:
        """Whether some engines compute prompts for the others."""

    def ask_prefill(self, request: HTTPRequest) -> Answer:
        """As `ask`, of an engine that computes prompts; first comes an empty part, when it has the
        request."""


class IngressEngines:
    """Sends each request to an engine, after another one has computed its prompt if it should."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        # To all engines that answer: which of them gets a request is decided later.
        self._sent = RouteTable[str]()
        self._accepts = True  # an engine took the last prompt
        self._paused_until = 0.0

    def check_ready(self) -> None:
        """Nothing is known here: an engine that takes no requests says so."""

    async def answer(self, request: HTTPRequest, answer: ForwardedAnswer) -> bool:
        """The head waits for what follows, so that an engine that ends before can be replaced."""
        asked = await self._handed_over(request)
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

    async def _handed_over(self, request: HTTPRequest) -> HTTPRequest:
        """The request for the engine that answers, after another one has computed its prompt.

        It is unchanged if none has, or if the engines that answer were sent most of it before.
        """
        key = request.key
        if key is None or not self._engines.has_prefill:
            return request
        known = self._sent.matches(key, [ANSWERING])[ANSWERING]
        self._sent.sent(key, ANSWERING)
        is_short = min(len(key), MAX_KEY_BYTES) - known < MIN_PREFILL_BYTES
        if is_short or monotonic() < self._paused_until:
            return request
        if not self._accepts:  # this request tries, and no other
            self._pause()
        try:
            address = await self._prefill(request.with_header(PREFILL, b"1"))
        except Exception as error:  # whatever it is, the engine that answers can do without
            logger.warning("A prompt is computed where it is answered: %s", type(error).__name__)
            return request
        return request.with_header(PREFILLED, address.encode()) if address else request

    async def _prefill(self, request: HTTPRequest) -> str:
        """Have an engine compute the prompt; returns where its pages are, empty if there are none.

        Raises whatever goes wrong there.
        """
        async with aclosing(self._engines.ask_prefill(request)) as answer:
            try:
                async with asyncio.timeout(ACCEPT_S):
                    await anext(answer)
            except Exception:
                self._accepts = False
                self._pause()
                raise
            self._accepts, self._paused_until = True, 0.0
            async with asyncio.timeout(PREFILL_S):
                head, *pieces = [part async for part in answer]
        assert isinstance(head, Head)
        return offered_address(
            head.status, b"".join(each for each in pieces if type(each) is bytes)
        )

    def _pause(self) -> None:
        self._paused_until = monotonic() + PAUSE_S


def create_ingress_app(
    engines: Engines, config: ServerConfig, hosts: Hosts | None = None
) -> Starlette:
    """Build the application. With `hosts` it answers only requests addressed to one of them."""

    async def health(request: Request) -> Response:
        wanted, ready = await engines.count()
        if not ready:
            raise NotReadyError("loading", f"No engine is ready (of {wanted}).")
        return json_response(RouterHealth("ready", wanted, ready))

    async def metrics(request: Request) -> Response:
        format = format_for(request.headers.get("accept", ""))
        pages = await engines.metrics(format.content_type)
        return format.response(join_pages((pages, "replica")) + format.end)

    own = {"/health": health, "/metrics": metrics}
    return forwarding_app(IngressEngines(engines), config, hosts, Counter(), own)
