"""Requests whose prompt one engine computes and whose tokens another generates.

The router sends such a request twice, as the client sent it but for a header: first with PREFILL to
an engine that computes the prompt and offers its pages, and then with PREFILLED, which says where
that engine exchanges pages, to the one that answers. Clients cannot set the headers: the router
drops theirs, and only it reaches the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.server.answers.jobs import GenerationJob
from minisgl.server.answers.reply import Reply
from minisgl.server.http.deadlines import limit_of
from minisgl.server.http.encoding import json_response
from minisgl.server.http.leaving import while_client_waits
from minisgl.server.http.request_ids import request_id

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

PREFILL, PREFILLED = b"x-minisgl-prefill", b"x-minisgl-prefilled"


class Offered(Struct):
    """The answer to a request with PREFILL."""

    offered: int  # prompts
    address: str  # where their pages are


def offered_address(status: int, body: bytes) -> str:
    """Where the pages of an answer to a request with PREFILL are; empty if none are offered.

    Raises msgspec.MsgspecError.
    """
    if status != 200:
        return ""  # the engine that answers says what is wrong with it
    offered = msgspec.json.decode(body, type=Offered)
    return offered.address if offered.offered else ""


class Handover:
    """What is done for a request before it is answered, or instead."""

    def __init__(self, engine: AsyncEngine, address: str) -> None:
        """address: where `engine` exchanges pages."""
        self._engine = engine
        self._address = address

    def around(self, scope: Scope, reply: Reply, answer: ASGIApp) -> ASGIApp:
        """The application that handles the request of `reply`; `answer` answers it."""
        headers = dict(scope["headers"])
        # One job for each prompt of which cached pages are used.
        jobs = [choice.job for choice in reply.choices]
        jobs = [job for job in jobs if job.k == 0 and not job.params.computes_prompt]
        if PREFILL in headers:
            return partial(self._offer, jobs)
        if PREFILLED in headers:
            return partial(self._go_on, jobs, headers[PREFILLED].decode(), answer)
        return answer

    async def _offer(
        self, jobs: Sequence[GenerationJob], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer as the engine that computes prompts, and offer all of them at once."""
        id = f"{request_id(scope)}-prefill"
        offers = (
            self._engine.pages.offer(
                job.submitted,
                request_id=f"{id}-{index}",
                cache_salt=job.cache_salt,
                tenant=job.tenant,
                extras=job.prompt_extras,
            )
            for index, job in enumerate(jobs)
        )
        with suppress(ClientDisconnect):
            async with while_client_waits(receive), limit_of(scope).held():
                offered = Offered(sum(await asyncio.gather(*offers)), self._address)
                await json_response(offered)(scope, receive, send)

    async def _go_on(
        self,
        jobs: Sequence[GenerationJob],
        address: str,
        answer: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer as the engine that generates tokens, after it has fetched their prompts."""
        fetches = (
            self._engine.pages.fetch(
                address,
                job.submitted,
                cache_salt=job.cache_salt,
                tenant=job.tenant,
                extras=job.prompt_extras,
            )
            for job in jobs
        )
        async with limit_of(scope).held():
            await asyncio.gather(*fetches)
        await answer(scope, receive, send)
