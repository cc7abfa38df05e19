"""Responses that go on without their clients: asked for by their ids while they are generated,
cancelled, and streamed again from any event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import InvalidRequestError, QueueFullError
from minisgl.server.answers.delivery import StreamedResponse
from minisgl.server.apis.responses import answer_types as answers
from minisgl.server.apis.responses.reply import ResponsesReply
from minisgl.server.http.access_log import (
    count_usage,
    note,
    note_failure,
    with_own_record,
    write_record,
)
from minisgl.server.http.encoding import encode
from minisgl.server.http.leaving import while_client_waits

END_OF_EVENT = b"\n\n"  # and nothing else, because JSON escapes line breaks
MAX_DIGITS = 9  # of a sequence number

Headers = Sequence[tuple[bytes, bytes]]


def events_after(events: bytes, number: int) -> bytes:
    """The events of a stream behind the one with this sequence number; -1: all. O(events)."""
    *before, rest = events.split(END_OF_EVENT, number + 1)
    return rest if len(before) == number + 1 else b""


async def at_once(events: bytes) -> AsyncIterator[bytes]:
    """All that is there of a stream that has ended."""
    if events:
        yield events


def starting_after(query: Mapping[str, str]) -> int | None:
    """Behind which event the stream begins that a query asks for, -1: before the first one; None if
    it asks for no stream. Raises InvalidRequestError."""
    streams, number = query.get("stream") == "true", query.get("starting_after")
    if number is None:
        return -1 if streams else None
    if not streams:
        raise InvalidRequestError("starting_after", "is only allowed with stream=true.")
    if not (number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS):
        raise InvalidRequestError("starting_after", "must be the sequence_number of an event.")
    return int(number)


class RunningResponse:
    """A response that is generated in the background."""

    def __init__(
        self,
        reply: ResponsesReply,
        keep: Callable[[answers.Response, bytes], None],
        *,
        has_events: bool,
    ) -> None:
        """keep: stores the response and its events. has_events: clients may ask for these."""
        self.id = reply.response_id
        self.has_events = has_events
        self.num_bytes = 0  # that its events take
        self._reply = reply
        self._keep = keep
        self._events: list[bytes] = []
        self._changed = asyncio.Event()  # another one after each change
        self._cancelled = asyncio.Event()
        self._has_ended = False
        self._begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def body(self) -> bytes:
        """The response as far as it has come, as JSON."""
        return encode(self._reply.so_far())

    async def start(self, app: ASGIApp, scope: Scope, ended: Callable[[], object]) -> bytes:
        """Let `app` generate the events; returns the response before them, as JSON.

        Raises what `app` raises before its first event. ended: called at the end, in any case.
        """
        self._task = asyncio.create_task(self._run(app, scope, ended))
        return await asyncio.shield(self._begun)

    async def cancel(self) -> None:
        """End it, unless it has ended, and wait until it is stored."""
        self._cancelled.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def events_after(self, number: int) -> AsyncIterator[bytes]:
        """The events behind the one with this sequence number, as they come; -1: all."""
        place = number + 1
        while True:
            changed = self._changed
            if place < len(self._events):
                new, place = self._events[place:], len(self._events)
                yield b"".join(new)
            elif self._has_ended:
                return
            else:
                await changed.wait()

    async def _run(self, app: ASGIApp, scope: Scope, ended: Callable[[], object]) -> None:
        scope = with_own_record(scope)
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            if not self._begun.done():
                self._begun.set_exception(error)
                return
            note_failure(scope, error)
        finally:
            if self._begun.done() and self._begun.exception() is None:
                response = self._reply.ended()
                self._keep(response, b"".join(self._events))
                note(scope, background=response.status)
                write_record(scope, 200)
                count_usage(scope, num_requests=0)  # its request has been counted
            self._has_ended = True
            self._notify()
            ended()

    async def _receive(self) -> Message:
        """Tell `app` that its client has left when the response is cancelled."""
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not self._begun.done():
                self._begun.set_result(self.body)
        elif self.has_events:
            self.num_bytes += len(message["body"])
            *events, _ = message["body"].split(END_OF_EVENT)
            self._events += [event + END_OF_EVENT for event in events]
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class RunningResponses:
    """Those of all clients."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: from which on no further response begins."""
        self._max_bytes = max_bytes
        self._running: dict[tuple[str, str], RunningResponse] = {}  # by client and id

    def check_room(self) -> None:
        """Raise QueueFullError if the events of those that run take too much memory."""
        if sum(each.num_bytes for each in self._running.values()) >= self._max_bytes:
            raise QueueFullError(
                "The responses in the background take all memory of --response-store; try again "
                "when some of them have ended."
            )

    def find(self, client: str, id: str) -> RunningResponse | None:
        return self._running.get((client, id))

    async def start(
        self, client: str, response: RunningResponse, app: ASGIApp, scope: Scope
    ) -> bytes:
        """See RunningResponse."""
        key = client, response.id
        self._running[key] = response
        return await response.start(app, scope, partial(self._running.pop, key))


class BackgroundAnswer:
    """An ASGI response that begins a response in the background, and shows it or streams it."""

    def __init__(
        self,
        running: RunningResponses,
        client: str,
        response: RunningResponse,
        app: ASGIApp,
        headers: Headers,
    ) -> None:
        """app: generates the events."""
        self._running = running
        self._client = client
        self._response = response
        self._app = app
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._running.start(self._client, self._response, self._app, scope)
        if self._response.has_events:
            answer: ASGIApp = EventStream(self._response.events_after(-1), self._headers)
        else:
            headers = {name.decode(): value.decode() for name, value in self._headers}
            answer = Response(body, headers=headers, media_type="application/json")
        await answer(scope, receive, send)


class EventStream:
    """An ASGI response with events that come from elsewhere."""

    def __init__(self, events: AsyncIterator[bytes], headers: Headers = ()) -> None:
        """headers: besides the usual ones."""
        self._events = events
        self._headers = [*StreamedResponse.HEADERS, *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self._headers}
        with suppress(ClientDisconnect):
            async with while_client_waits(receive):
                await send(start)
                async for events in self._events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
