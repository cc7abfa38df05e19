"""Asks replicas, and relays their answers to the connections of clients."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

import msgspec

from minisgl.router.exchange import EngineLostError, Head, HTTPRequest, code_of
from minisgl.router.fleet import DONE, FAILED, WITHOUT_WEIGHTS, Fleet, Replica, Route
from minisgl.router.forward import ForwardedAnswer
from minisgl.router.upstream import END_OF_EVENT, Upstream
from minisgl.server.answers.handover import PREFILL, PREFILLED, offered_address
from minisgl.server.http.access_log import note
from minisgl.server.http.connection import ServerConnection

logger = logging.getLogger(__name__)

KEY = "minisgl.connection"  # in the state of a scope
# Codes of a replica that takes no requests: another one may. `queue_full` is that of /ready.
NOT_READY_CODES = frozenset(
    ("loading", "draining", "dead", "stalled", "queue_full", None, *WITHOUT_WEIGHTS)
)
# For another replica to compute the prompt; then the one that answers does.
PREFILL_S = 60.0


class RelayConnection(ServerConnection):
    """A server's connection that tells the application where to write a stream."""

    upstream: Upstream | None = None  # whose stream is relayed

    def on_headers_complete(self) -> None:
        self.scope["state"][KEY] = self
        super().on_headers_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.upstream is not None:
            self.upstream.resume()


class Relay:
    """Sends each request to a replica that `fleet` chooses."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def check_ready(self) -> None:
        self._fleet.check_ready()

    async def answer(self, request: HTTPRequest, answer: ForwardedAnswer) -> bool:
        fleet, asked = self._fleet, answer.asked
        route = fleet.holding(request.holder, asked) or fleet.choose(request.key, asked)
        replica = route.replica
        fleet.num_resent += bool(asked)
        asked.append(replica)
        note(answer.scope, replica=replica.index)
        replica.num_open += 1
        try:
            if route.prefill is not None and (where := await self._prefill(route.prefill, request)):
                request = request.with_header(PREFILLED, where.encode())
            return await self._ask(route, request, answer)
        finally:
            replica.num_open -= 1

    async def _ask(self, route: Route, request: HTTPRequest, answer: ForwardedAnswer) -> bool:
        replica, method = route.replica, request.method
        self._fleet.num_sent[replica.index] += 1
        upstream = await replica.connect()
        try:
            relays = answer.scope["http_version"] == "1.1" and method != "HEAD"
            head = await upstream.ask(request.encoded(), relays=relays, has_body=method != "HEAD")
            accepted = head.status < HTTPStatus.BAD_REQUEST
            self._fleet.answered(request.key, route, accepted=accepted)
            if head.is_stream:
                replica.unanswered.discard(upstream)
                await _relay(upstream, head, answer, as_it_is=relays)
                return True
            body = b"".join([piece async for piece in upstream.pieces()])
            if head.is_refusal and code_of(body) in NOT_READY_CODES:
                answer.refusal = head, body
                return False
            if answer.has_begun:  # as a stream, by a replica that has ended
                raise EngineLostError
            await answer.begin(head)
            await answer.end(body)
            return True
        finally:
            replica.give_back(upstream)

    async def _prefill(self, replica: Replica, request: HTTPRequest) -> str:
        """Have `replica` compute the prompt and offer its pages; returns where, empty if not."""
        where = ""
        replica.num_open += 1
        self._fleet.num_sent[replica.index] += 1
        try:
            async with asyncio.timeout(PREFILL_S):
                asked = request.with_header(PREFILL, b"1")
                where = offered_address(*await replica.whole(asked.encoded()))
        except (EngineLostError, TimeoutError, msgspec.MsgspecError) as error:
            logger.warning(
                "Replica %d has not computed a prompt (%s), which the one that answers does",
                replica.index,
                type(error).__name__,
            )
        finally:
            replica.num_open -= 1
        self._fleet.num_prefills[DONE if where else FAILED] += 1
        return where


async def _relay(
    upstream: Upstream, head: Head, answer: ForwardedAnswer, *, as_it_is: bool
) -> None:
    """Send a stream on. as_it_is: its bytes, written to the client's connection."""
    if not answer.has_begun:
        await answer.begin(head)
    if as_it_is:
        connection: RelayConnection = answer.scope["state"][KEY]
        connection.upstream = upstream
        try:
            await upstream.relay(connection)
        finally:
            connection.upstream = None
            answer.sent = upstream.last_relayed
    else:
        held = b""
        async for piece in upstream.pieces():
            events, end, held = (held + piece).rpartition(END_OF_EVENT)
            if end:
                await answer.go_on(events + end)
    await answer.end()
