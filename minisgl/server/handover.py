"""Requests whose prompt one engine computes and whose tokens another generates.

The router sends such a request twice, as the client sent it but for a header: first with PREFILL to
an engine that computes the prompt and offers its pages, and then with PREFILLED, which says where
that engine exchanges pages, to the one that answers. Clients cannot set the headers: the router
drops theirs, and only it reaches the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.request import EVERYONE, Tenant
from minisgl.server.access_log import request_id
from minisgl.server.error_responses import json_response
from minisgl.server.jobs import GenerationJob
from minisgl.server.leaving import until_left
from minisgl.server.replies import Reply

PREFILL, PREFILLED = b"x-minisgl-prefill", b"x-minisgl-prefilled"


class Offered(Struct):
    """The answer to a request with PREFILL."""

    offered: int  # prompts
    address: str  # where their pages are


class SharingEngine(Protocol):
    """An engine that exchanges KV pages with others; see AsyncEngine."""

    async def share_pages(self, address: str, *, always_load: bool) -> str: ...
    async def offer_pages(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> bool: ...
    async def fetch_pages(
        self,
        address: str,
        prompt_token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> bool: ...


class Handover:
    """What is done for a request before it is answered, or instead."""

    def __init__(self, engine: SharingEngine, address: str) -> None:
        """address: where `engine` exchanges pages."""
        self._engine = engine
        self._address = address

    def around(self, scope: Scope, reply: Reply, answer: ASGIApp) -> ASGIApp:
        """The application that handles the request of `reply`; `answer` answers it."""
        headers = dict(scope["headers"])
        jobs = _prompts(reply)
        if PREFILL in headers:
            return _Prefilled(self._engine, jobs, self._address)
        if PREFILLED in headers:
            return _Continued(self._engine, jobs, headers[PREFILLED].decode(), answer)
        return answer


def _prompts(reply: Reply) -> list[GenerationJob]:
    """One job for each prompt of which cached pages are used."""
    jobs = [choice.job for choice in reply.choices]
    return [job for job in jobs if job.k == 0 and job.params.prompt_logprobs is None]


class _Prefilled:
    """The answer of the engine that computes prompts."""

    def __init__(self, engine: SharingEngine, jobs: Sequence[GenerationJob], address: str) -> None:
        self._engine = engine
        self._jobs = jobs
        self._address = address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        offering = asyncio.ensure_future(self._offer(f"{request_id(scope)}-prefill"))
        leaving = asyncio.ensure_future(until_left(receive))
        try:
            await asyncio.wait((offering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if offering.done():
                offered = Offered(offering.result(), self._address)
                await json_response(offered)(scope, receive, send)
        finally:
            offering.cancel()
            leaving.cancel()

    async def _offer(self, id: str) -> int:
        """Offer all prompts at once; returns how many there are."""
        offers = (
            self._engine.offer_pages(
                job.prompt_token_ids,
                request_id=f"{id}-{index}",
                cache_salt=job.cache_salt,
                tenant=job.tenant,
            )
            for index, job in enumerate(self._jobs)
        )
        return sum(await asyncio.gather(*offers))


class _Continued:
    """The answer of the engine that generates tokens, after it has fetched their prompts."""

    def __init__(
        self, engine: SharingEngine, jobs: Sequence[GenerationJob], address: str, answer: ASGIApp
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._address = address
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fetches = (
            self._engine.fetch_pages(
                self._address, job.prompt_token_ids, cache_salt=job.cache_salt, tenant=job.tenant
            )
            for job in self._jobs
        )
        await asyncio.gather(*fetches)
        await self._answer(scope, receive, send)
