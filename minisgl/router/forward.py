"""Forwards requests to engines, and their answers back: to replicas, or to engines on Ray.

A request whose answer has not begun when its engine ends is sent to another one; an answer that has
begun ends with an error.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from msgspec import Struct
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from minisgl.errors import DeadlineError, EngineStoppedError, MinisglError
from minisgl.router.exchange import HOP_HEADERS, EngineLostError, Head, HTTPRequest, read_request
from minisgl.router.route_keys import RESPONSES
from minisgl.server.engine_state import NotReadyError
from minisgl.server.http.access_log import note_failure
from minisgl.server.http.deadlines import TimeLimit, timeout_of
from minisgl.server.http.encoding import DONE, event, typed_event
from minisgl.server.http.error_bodies import error_body, messages_error_body
from minisgl.server.http.leaving import while_client_waits
from minisgl.server.http.paths import is_of_messages, route_path
from minisgl.server.http.request_ids import ANTHROPIC_HEADER, request_id
from minisgl.server.http.tracing import span_of

# At the end of an event of that API, where a string in JSON cannot stand; with its chunk's end.
SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)}\s*$')
MAX_NUMBER_BYTES = 64  # of such an end
OWN_HEADERS = HOP_HEADERS - {b"content-length"} | {b"date", ANTHROPIC_HEADER.encode()}
# After its deadline, until a request is given up whose engine does not say that it is late.
LATE_S = 1.0
# To send one request: one that ends its engine must not end all of them.
MAX_ATTEMPTS = 3


class ReplicaLostError(EngineStoppedError):
    """A replica ended before its answer."""

    code = "replica_lost"

    def __init__(self) -> None:
        super().__init__("The replica that answered has ended; send the request again.")


class ResponseError(Struct, tag_field="type", tag="error"):
    """The error event of the Responses API."""

    code: str | None
    message: str
    param: str | None
    sequence_number: int


def last_events(scope: Scope, error: Exception, sent: bytes) -> bytes:
    """What ends a stream that has begun to answer a request.

    sent: what the client got before, or the end of it, to the end of an event.
    """
    if is_of_messages(scope):
        return typed_event(messages_error_body(error, request_id(scope)))
    body = error_body(error)
    if f"{route_path(scope)}/".startswith(f"{RESPONSES}/"):
        details = body.error
        last = SEQUENCE_NUMBER.search(sent[-MAX_NUMBER_BYTES:])
        number = int(last[1]) + 1 if last else 0
        return typed_event(ResponseError(details.code, details.message, details.param, number))
    return event(body) + DONE


class ForwardedAnswer:
    """An answer on its way to the client, which may take several attempts."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self.has_begun = False  # the head has been sent
        self.sent = b""  # the last whole events of a stream that were sent
        self.asked: list[object] = []  # the engines that were asked before
        self.refusal: tuple[Head, bytes] | None = None  # of an engine that takes no requests
        self._send = send

    async def begin(self, head: Head) -> None:
        headers = [pair for pair in head.headers if pair[0] not in OWN_HEADERS]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})
        self.has_begun = True

    async def go_on(self, events: bytes) -> None:
        self.sent = events
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: MinisglError) -> None:
        """End an answer after `error`; raises `error` if nothing has been sent."""
        if self.has_begun:
            note_failure(self.scope, error)
            await self.end(last_events(self.scope, error, self.sent))
        elif self.refusal is not None:
            head, body = self.refusal
            await self.begin(head)
            await self.end(body)
        else:
            raise error


class Engines(Protocol):
    """What requests are forwarded to."""

    def check_ready(self) -> None:
        """Raise NotReadyError if no engine takes requests, as far as that is known."""
        ...

    async def answer(self, request: HTTPRequest, answer: ForwardedAnswer) -> bool:
        """Ask one engine; returns whether it has answered.

        Raises EngineLostError, and NotReadyError if no engine takes requests.
        """
        ...


class Forward:
    """An ASGI application: all requests that an engine answers."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._engines.check_ready()
        limit = TimeLimit(scope)
        async with limit.held():
            request = await read_request(scope, receive)
        limit.shorten(timeout_of(request.body))
        if (span := span_of(scope)) is not None:
            request = replace(request, headers=span.passed_on(request.headers))
        answer = ForwardedAnswer(scope, send)
        with suppress(ClientDisconnect):
            async with while_client_waits(receive):
                try:
                    async with limit.held(LATE_S):
                        error = await self._answer(request, limit, answer)
                except DeadlineError as late:
                    error = late
                if error is not None:
                    await answer.fail(error)

    async def _answer(
        self, request: HTTPRequest, limit: TimeLimit, answer: ForwardedAnswer
    ) -> MinisglError | None:
        """Returns why no engine has answered to the end; None: one has."""
        for _ in range(MAX_ATTEMPTS):
            try:
                if await self._engines.answer(request.within(limit.seconds_left), answer):
                    return None
            except NotReadyError as not_ready:
                return not_ready
            except EngineLostError:
                if answer.sent:
                    break
        return ReplicaLostError()
