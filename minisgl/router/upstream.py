"""A connection from the router to a replica, which answers one request at a time.

Replicas are this project's own servers, so a stream of theirs consists of chunks that each end with
the end of an event. Such bytes go to the client as they are: one write for each read, and nothing
is parsed but the last bytes of it. Only whole events are passed on, so that an event can follow if
the replica ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.router.exchange import EngineLostError, Head, Headers

END_OF_EVENT = b"\n\n"
# What a chunk of events ends with, and what follows the last one.
END_OF_EVENTS = END_OF_EVENT + b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"
EVENT_STREAM = b"text/event-stream"
# Received and not read yet, before reading is paused.
MAX_UNREAD_BYTES = 64 << 10


class Upstream(asyncio.Protocol):
    """`ask` sends a request; then either `relay` or `pieces` takes its body, to the end."""

    def __init__(self) -> None:
        self.last_relayed = b""  # the events of this answer that went to the client in one write
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._client: HttpToolsProtocol | None = None  # of a relayed stream
        self._held = bytearray()  # of a stream: the beginning of an event, or what waits for relay
        self._relays = False  # the body is a stream to be relayed
        self._paused = False
        self._pieces: list[bytes] = []
        self._news = asyncio.Event()
        self._complete = True  # no answer is open
        self._keep_alive = True

    @property
    def is_free(self) -> bool:
        """Whether it may be asked again."""
        return self._complete and self._keep_alive and not self._closed

    def ask(self, request: bytes, *, relays: bool, has_body: bool = True) -> asyncio.Future[Head]:
        """Send a request; the head of the answer fails with EngineLostError.

        relays: a stream of events will be taken by `relay`. has_body: false for HEAD.
        """
        self._complete = False
        self.last_relayed = b""
        self._pieces = []
        self._may_relay = relays
        self._has_body = has_body
        self._is_head = True
        self._headers: Headers = []
        self._head_bytes = b""
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[Head] = self._loop.create_future()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._transport.write(request)
        if self._closed:
            self._fail()
        return self._head

    def relay(self, client: HttpToolsProtocol) -> asyncio.Future[None]:
        """Write the stream to `client`; ends with it, or fails with EngineLostError.

        Everything but the last chunk is written, which is the caller's.
        """
        self._client = client
        first, self._held = bytes(self._held), bytearray()
        if first:
            self._take(first)
        if not client.flow.write_paused:
            self.resume()
        return self._end

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body; raises EngineLostError."""
        while True:
            self._news.clear()
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            self.resume()
            if self._end.done() and not self._pieces:
                self._end.result()
                return
            await self._news.wait()

    def resume(self) -> None:
        """Read on: the client has taken what it was sent."""
        if self._paused and not self._closed:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection, which ends the request if one is open."""
        self._transport.abort()

    # -- called by the transport -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        client = self._client
        if client is not None and not self._held and data.endswith(END_OF_EVENTS):
            self._write(client, data)
            if client.flow.write_paused:
                self._pause()
        elif self._relays:
            self._take(data)
        elif not self._complete:
            self._parse(data)
        else:
            self.abort()  # nobody has asked

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        if not self._complete:
            self._fail()

    # -- called by the parser ----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # another head follows
            self._headers = []
            return
        headers = dict(self._headers)
        is_stream = (
            headers.get(b"content-type", b"").startswith(EVENT_STREAM)
            and headers.get(b"transfer-encoding") == b"chunked"
        )
        self._relays = is_stream and self._may_relay
        self._keep_alive = self._parser.should_keep_alive()
        self._is_head = False
        if not self._head.done():  # cancelled, where the client has left
            self._head.set_result(Head(status, self._headers, is_stream))
        if not self._has_body:
            self._keep_alive = False  # the parser would wait for the body
            self._finish()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._news.set()
        if len(body) > MAX_UNREAD_BYTES or len(self._pieces) > 1:
            self._pause()

    def on_message_complete(self) -> None:
        if not self._is_head:
            self._finish()

    # -- the rest ----------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        if self._is_head and self._may_relay:
            # The parser must not see what follows the head, if it is relayed.
            data = self._head_bytes + data
            head, end, rest = data.partition(b"\r\n\r\n")
            if not end:
                self._head_bytes = data
                return
            self._head_bytes = b""
            self._feed(head + end)
            if rest:
                self.data_received(rest)
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.abort()

    def _take(self, data: bytes) -> None:
        """Pass on what is complete of the stream, and hold the rest."""
        held, client = self._held, self._client
        start = max(0, len(held) - len(END_OF_EVENTS) + 1)
        held += data
        if client is None:
            if len(held) > MAX_UNREAD_BYTES:
                self._pause()
            return
        is_last = held.endswith(END_OF_EVENTS + LAST_CHUNK) or held == LAST_CHUNK
        cut = len(held) - len(LAST_CHUNK) if is_last else held.rfind(END_OF_EVENTS, start)
        if not is_last:
            cut = cut + len(END_OF_EVENTS) if cut >= 0 else 0
        if cut:
            self._write(client, bytes(held[:cut]))
            del held[:cut]
        if is_last:
            self._finish()
        elif client.flow.write_paused:
            self._pause()

    def _write(self, client: HttpToolsProtocol, data: bytes) -> None:
        if not client.transport.is_closing():  # uvloop raises an error for one that has gone
            client.transport.write(data)
        self.last_relayed = data

    def _pause(self) -> None:
        if not self._paused and not self._closed:
            self._paused = True
            self._transport.pause_reading()

    def _finish(self) -> None:
        self.last_relayed = b""  # idle connections hold no memory
        self._release()
        self.resume()
        if not self._end.done():
            self._end.set_result(None)

    def _fail(self) -> None:
        self._release()
        for future in (self._head, self._end):
            if not future.done():
                future.set_exception(EngineLostError())
                future.exception()  # mark as retrieved: there may be no waiter

    def _release(self) -> None:
        self._complete = True
        self._relays = False
        self._client = None
        self._held = bytearray()
        self._news.set()
