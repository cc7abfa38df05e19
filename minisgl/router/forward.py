"""Sends requests to replicas, and their answers back.

A request whose answer has not begun when its replica ends is sent to another one; an answer that
has begun ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from minisgl.errors import MinisglError
from minisgl.router.connection import connection_of
from minisgl.router.failures import ReplicaLostError, last_events
from minisgl.router.fleet import DONE, FAILED, Fleet, Replica
from minisgl.router.keys import holder_of, route_key
from minisgl.router.upstream import END_OF_EVENT, Head, Headers, Upstream, UpstreamLostError
from minisgl.server.access_log import log_failure, request_id
from minisgl.server.auth import client_of
from minisgl.server.bodies import read_bytes
from minisgl.server.engine_state import NotReadyError
from minisgl.server.handover import PREFILL, PREFILLED, Offered
from minisgl.server.leaving import until_left
from minisgl.server.messages_api.paths import OVERLOADED
from minisgl.server.request_ids import ANTHROPIC_HEADER, HEADER
from minisgl.server.root_path import route_path

logger = logging.getLogger(__name__)

# Of one connection, not of the request or the answer; and what the router sets itself.
HOP_HEADERS = frozenset(
    (
        *(b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"),
        *(b"proxy-connection", b"expect", b"content-length", HEADER.encode()),
        *(PREFILL, PREFILLED),
    )
)
OWN_HEADERS = HOP_HEADERS - {b"content-length"} | {b"date", ANTHROPIC_HEADER.encode()}
# Codes of a replica that takes no requests: another one may.
NOT_READY_CODES = frozenset(("loading", "draining", "dead", "stalled", None))
# To send one request: one that ends its replica must not end all of them.
MAX_ATTEMPTS = 3
# For another replica to compute the prompt; then the one that answers does.
PREFILL_S = 60.0


class Forward:
    """An ASGI application: all requests that the router does not answer itself."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._fleet.check_ready()
        body, key = b"", None
        path = route_path(scope)
        if scope["method"] not in ("GET", "HEAD"):
            body = await read_bytes(Request(scope, receive))
        holder = holder_of(path, body)
        if scope["method"] == "POST" and not holder:
            key = route_key(path, body, client_of(scope))
        request = write_request(scope, body)
        leaving = asyncio.ensure_future(until_left(receive))
        try:
            await _Answer(self._fleet, scope, send, leaving).give(request, key, holder)
        finally:
            leaving.cancel()


class _Answer:
    """The answer to one request, which may take several attempts."""

    def __init__(
        self, fleet: Fleet, scope: Scope, send: Send, leaving: asyncio.Future[None]
    ) -> None:
        self._fleet = fleet
        self._scope = scope
        self._send = send
        self._leaving = leaving
        self._has_begun = False  # the head has been sent
        self._sent = b""  # the last whole events of a stream that were sent
        self._upstream: Upstream | None = None  # while it is asked
        self._refusal: tuple[Head, bytes] | None = None  # of a replica that takes no requests
        self._told: Callable[..., None]  # tells the fleet what has become of the attempt

    async def give(self, request: bytes, key: bytes | None, holder: str) -> None:
        """holder: the name of the replica that has a stored response, if the request needs one."""
        self._leaving.add_done_callback(self._stop)
        avoided = list[Replica]()
        error: MinisglError = ReplicaLostError()
        for attempt in range(MAX_ATTEMPTS):
            try:
                route = self._fleet.holding(holder, avoided) or self._fleet.choose(key, avoided)
            except NotReadyError as not_ready:
                error = not_ready
                break
            replica, prefill, _ = route
            self._told = partial(self._fleet.answered, key, route)
            self._fleet.num_resent += attempt > 0
            replica.num_open += 1
            try:
                asked = request
                if prefill is not None and (where := await self._prefill(prefill, request)):
                    asked = with_header(request, PREFILLED, where.encode())
                if self._leaving.done() or await self._ask(replica, asked):
                    return
            except UpstreamLostError:
                if self._leaving.done():
                    return
                if self._sent:
                    break
            finally:
                replica.num_open -= 1
            avoided.append(replica)
        if self._has_begun:
            await self._end_with(error)
        elif self._refusal is not None:
            await self._begin(self._refusal[0])
            await self._send({"type": "http.response.body", "body": self._refusal[1]})
        else:
            raise error

    async def _ask(self, replica: Replica, request: bytes) -> bool:
        """Ask `replica`; returns whether it has answered, or raises UpstreamLostError."""
        self._fleet.num_sent[replica.index] += 1
        try:
            upstream = await self._connect(replica)
            method = self._scope["method"]
            relays = self._scope["http_version"] == "1.1" and method != "HEAD"
            replica.unanswered.add(upstream)
            head = await upstream.ask(request, relays=relays, has_body=method != "HEAD")
            self._told(accepted=head.status < HTTPStatus.BAD_REQUEST)
            if head.is_stream:
                replica.unanswered.discard(upstream)
                await self._stream(upstream, head, relays=relays)
                return True
            body = b"".join([piece async for piece in upstream.pieces()])
            if head.status in (503, OVERLOADED) and _code(body) in NOT_READY_CODES:
                self._refusal = head, body
                return False
            if self._has_begun:  # as a stream, by a replica that has ended
                raise UpstreamLostError
            await self._begin(head)
            await self._send({"type": "http.response.body", "body": body})
            return True
        finally:
            self._give_back(replica)

    async def _prefill(self, replica: Replica, request: bytes) -> str:
        """Have `replica` compute the prompt and offer its pages; returns where, empty if not."""
        where = ""
        replica.num_open += 1
        self._fleet.num_sent[replica.index] += 1
        try:
            async with asyncio.timeout(PREFILL_S):
                upstream = await self._connect(replica)
                replica.unanswered.add(upstream)
                asked = with_header(request, PREFILL, b"1")
                head = await upstream.ask(asked, relays=False)
                body = b"".join([piece async for piece in upstream.pieces()])
                if head.status == 200:
                    offered = msgspec.json.decode(body, type=Offered)
                    where = offered.address if offered.offered else ""
        except (UpstreamLostError, TimeoutError, msgspec.MsgspecError):
            pass
        finally:
            replica.num_open -= 1
            self._give_back(replica)
        if not self._leaving.done():
            self._fleet.num_prefills[DONE if where else FAILED] += 1
        return where

    async def _connect(self, replica: Replica) -> Upstream:
        """A connection, closed when the client leaves; raises UpstreamLostError if it has left."""
        self._upstream = upstream = await replica.connect()
        if self._leaving.done():
            raise UpstreamLostError
        return upstream

    def _give_back(self, replica: Replica) -> None:
        if self._upstream is not None:
            replica.unanswered.discard(self._upstream)
            replica.give_back(self._upstream)
            self._upstream = None

    def _stop(self, leaving: asyncio.Future[None]) -> None:
        """End the request on the replica, if it is still open when the client has left."""
        if self._upstream is not None:
            self._upstream.abort()

    async def _stream(self, upstream: Upstream, head: Head, *, relays: bool) -> None:
        if not self._has_begun:
            await self._begin(head)
        if relays:
            connection = connection_of(self._scope)
            connection.upstream = upstream
            try:
                await upstream.relay(connection)
            finally:
                connection.upstream = None
                self._sent = upstream.last_relayed
        else:
            held = b""
            async for piece in upstream.pieces():
                events, end, held = (held + piece).rpartition(END_OF_EVENT)
                if end:
                    self._sent = sent = events + end
                    await self._send(
                        {"type": "http.response.body", "body": sent, "more_body": True}
                    )
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, head: Head) -> None:
        headers = [pair for pair in head.headers if pair[0] not in OWN_HEADERS]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})
        self._has_begun = True

    async def _end_with(self, error: MinisglError) -> None:
        log_failure(request_id(self._scope), 200, error)
        last = last_events(self._scope, error, self._sent)
        await self._send({"type": "http.response.body", "body": last})


def write_request(scope: Scope, body: bytes) -> bytes:
    """The request as it goes to a replica, with the id that the client sees."""
    target: bytes = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    headers: Headers = [pair for pair in scope["headers"] if pair[0] not in HOP_HEADERS]
    headers.append((HEADER.encode(), request_id(scope).encode()))
    if body or scope["method"] not in ("GET", "HEAD"):
        headers.append((b"content-length", b"%d" % len(body)))
    lines = [b"%s %s HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [b"%s: %s" % pair for pair in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def with_header(request: bytes, name: bytes, value: bytes) -> bytes:
    line, _, rest = request.partition(b"\r\n")
    return b"%s\r\n%s: %s\r\n%s" % (line, name, value, rest)


def _code(body: bytes) -> object:
    with suppress(msgspec.MsgspecError):
        answer = msgspec.json.decode(body)
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            return answer["error"].get("code")
    return ""
