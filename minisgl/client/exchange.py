"""Requests a document, or a stream of events, within limits of time and size.

A redirect to another origin is never followed, because it would receive the key.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import urljoin

from minisgl.client.address import Address
from minisgl.client.connection import ClientConnection, Head, connect, write_request
from minisgl.client.errors import AnswerError, ServerError, one_line, unreachable

DATA = b"data:"
DONE = b"[DONE]"
EVENT_BYTES = 4 << 20  # the largest event
MEMORY_BYTES = 64  # that an event takes beside its bytes
CONNECT_S = 10.0
DOCUMENT_S = 10.0
DOCUMENT_BYTES = 4 << 20
STREAM_BYTES = 256 << 20
MAX_REDIRECTS = 3

T = TypeVar("T")


class EventCutter:
    """Takes bytes in any pieces and returns complete events; `rest` is not an event."""

    def __init__(self, max_bytes: int) -> None:
        self._rest = bytearray()
        self._max_bytes = max_bytes  # of the whole
        self._room = max_bytes

    @property
    def rest(self) -> bytes:
        return bytes(self._rest)

    def cut(self, data: bytes) -> list[bytes]:
        """The events that end in `data`. Raises AnswerError if they become too large."""
        self._count(len(data))
        if b"\r" in data:
            # JSON has none of its own, so that all of them belong to the ends of lines.
            data = data.replace(b"\r", b"")
        if self._rest:
            seam = len(self._rest) - 1
            self._rest += data
            if len(self._rest) > EVENT_BYTES + len(data):
                raise AnswerError(f"sends an event of more than {EVENT_BYTES >> 20} MiB")
            if self._rest.find(b"\n\n", seam) < 0:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        *events, rest = data.split(b"\n\n")
        if rest:
            self._rest += rest
        self._count(MEMORY_BYTES * len(events))
        return events

    def _count(self, num_bytes: int) -> None:
        self._room -= num_bytes
        if self._room < 0:
            raise AnswerError(f"sends an answer of more than {self._max_bytes:,} bytes")


def data_of(event: bytes) -> bytes:
    """The data of an event; empty for a comment, which servers send as keep-alive."""
    if b"\n" not in event:
        return event[len(DATA) :].strip() if event.startswith(DATA) else b""
    lines = [line for line in event.split(b"\n") if line.startswith(DATA)]
    return b"\n".join(line[len(DATA) :].strip() for line in lines)


async def get(
    url: str, headers: Mapping[str, str], timeout_s: float = DOCUMENT_S
) -> tuple[int, bytes]:
    """Gets status and body of a document, following redirects within the origin. Raises
    ServerError."""
    for _ in range(1 + MAX_REDIRECTS):
        async with open_stream(
            "GET", url, headers, timeout_s=timeout_s, max_bytes=DOCUMENT_BYTES
        ) as stream:
            place = stream.head.redirect
            if place is None:
                return stream.head.status, await stream.whole()
        if not _is_within_origin(url, place):
            raise ServerError(f"{url} {describe_redirect(url, place)}")
        url = urljoin(url, place)
    raise ServerError(f"{url} redirects more than {MAX_REDIRECTS} times.")


def _is_within_origin(url: str, place: str) -> bool:
    try:
        return Address.of(urljoin(url, place)).has_origin_of(Address.of(url))
    except ValueError:
        return False


def describe_redirect(url: str, place: str) -> str:
    """Describes a redirect that is not followed; the text follows the server's name."""
    try:
        shown = Address.of(urljoin(url, place)).without_query()
    except ValueError:
        shown = "what is no address"
    return (
        f"redirects to {one_line(shown)}, which is not followed; give that address with --url if "
        "it is the right one."
    )


@asynccontextmanager
async def open_stream(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    timeout_s: float,
    max_bytes: int = STREAM_BYTES,
) -> AsyncIterator[Stream]:
    """Opens an answer and reads its head; leaving the context closes the connection.

    Raises ServerError, also while the body is read.
    """
    address = Address.of(url)
    stream = Stream(url, timeout_s, max_bytes)
    request = write_request(method, address, headers, body)
    connect_s = min(CONNECT_S, timeout_s)
    try:
        async with asyncio.timeout(connect_s):
            connection = await connect(address, request, stream.take)
    except TimeoutError as error:
        reason = f"no connection within {connect_s:g} s"
        raise ServerError(f"{url} cannot be reached: {reason}.") from error
    except OSError as error:
        raise unreachable(url, error) from error
    try:
        await stream.begin(connection)
        yield stream
    finally:
        connection.close()


class Stream:
    """The answer to one request while it arrives."""

    head: Head

    def __init__(self, url: str, timeout_s: float, max_bytes: int) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._cutter = EventCutter(max_bytes)
        self._events: list[bytes] = []
        self._news = asyncio.Event()  # events, or the end

    def take(self, piece: bytes, now: float) -> None:
        if events := self._cutter.cut(piece):
            self._events += events
            self._news.set()

    async def begin(self, connection: ClientConnection) -> None:
        self._finished = connection.finished
        self._finished.add_done_callback(lambda _: self._news.set())
        self.head = await self._in_time(connection.head)

    async def whole(self) -> bytes:
        """Reads the body of an answer that is not streamed."""
        await self._in_time(self._finished)
        return b"\n\n".join([*self._events, self._cutter.rest])

    async def data(self) -> AsyncIterator[bytes]:
        """Yields the data of each event except the last, [DONE]."""
        while self._events or not self._finished.done():
            await self._in_time(self._news.wait())
            # An endless stream must leave time for Ctrl-C and for the deadline.
            await self._in_time(asyncio.sleep(0))
            self._news.clear()
            events, self._events = self._events, []
            for event in events:
                data = data_of(event)
                if data == DONE:
                    return
                if data:
                    yield data
        await self._in_time(self._finished)

    async def _in_time(self, awaited: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await awaited
        except TimeoutError as error:
            raise ServerError(
                f"{self._url} does not end its answer within {self._timeout_s:g} s."
            ) from error
        except AnswerError as error:
            raise ServerError(f"{self._url} {error}.") from error
