"""Sends one request over its own connection, and reads the answer in pieces.

It takes what servers of the OpenAI API send by HTTP/1.1: bodies in chunks, of a known length or up
to the end of the connection. What general clients do for an event costs more than a server spends
on it, so that a benchmark would measure them.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

import httptools

from minisgl.client.address import Address
from minisgl.client.errors import AnswerError

HEAD_BYTES = 64 << 10  # of an answer, with those that announce it
LINE_BYTES = 4 << 10  # of the line in front of a chunk
# Headers of bodies that end before the connection does.
BOUNDED = frozenset((b"content-length", b"transfer-encoding"))

Take = Callable[[bytes, float], None]


@dataclass(frozen=True, slots=True)
class Head:
    """The status line and the headers of an answer, as far as they are used."""

    status: int
    location: str | None = None

    @property
    def redirect(self) -> str | None:
        """The Location of a redirect, unresolved; None for other answers."""
        return self.location if self.status in (301, 302, 303, 307, 308) else None


@functools.cache
def _tls() -> ssl.SSLContext:
    """The context of all connections, since loading the certificates takes milliseconds."""
    return ssl.create_default_context()


def write_request(
    method: str, address: Address, headers: Mapping[str, str], body: bytes = b""
) -> bytes:
    fixed = {"connection": "close", "content-length": str(len(body))}
    lines = [f"{method} {address.target} HTTP/1.1", f"host: {address.authority}"]
    lines += [f"{name}: {value}" for name, value in {**headers, **fixed}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def connect(address: Address, request: bytes, take: Take) -> ClientConnection:
    """Connects and sends a request. Raises OSError.

    `take` gets every piece of the body and its time; an AnswerError that it raises ends it all.
    """
    loop = asyncio.get_running_loop()
    connection = ClientConnection(request, take)
    failure = OSError("its host name has no address")
    for place in await _places(address):
        try:
            await loop.create_connection(
                lambda: connection,
                place,
                address.port,
                ssl=_tls() if address.secure else None,
                server_hostname=address.host if address.secure else None,
            )
            return connection
        except OSError as error:
            failure = error
    raise failure


async def _places(address: Address) -> list[str]:
    """The IP addresses of a host.

    A look-up cannot be cancelled and may take long. It runs in a daemon thread, which, unlike one
    of asyncio's, does not delay the exit after Ctrl-C.
    """
    try:
        return [str(ipaddress.ip_address(address.host))]
    except ValueError:
        found: Future[list[str]] = Future()

    def look_up() -> None:
        found.set_running_or_notify_cancel()
        try:
            infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            found.set_result([*dict.fromkeys(str(info[4][0]) for info in infos)])
        except Exception as error:
            found.set_exception(error)

    Thread(target=look_up, daemon=True).start()
    return await asyncio.wrap_future(found)


class ClientConnection(asyncio.Protocol):
    """Reads an answer. `head` and `finished` are set as it arrives, or fail with an AnswerError."""

    def __init__(self, request: bytes, take: Take) -> None:
        loop = asyncio.get_running_loop()
        self.sent = 0.0  # by time.perf_counter
        self.head: asyncio.Future[Head] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self._request = request
        self._take = take
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._num_unused = 0  # bytes of heads, or between the pieces of a body
        self._pieces: list[bytes] = []
        self._is_complete = self._is_wrong = False

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.finished.done():
            return
        try:
            while data and not (self.head.done() or self._is_wrong):
                head, end, data = data.partition(b"\r\n\r\n")
                self._feed(head + end)
                if self._num_unused > HEAD_BYTES:
                    raise AnswerError(f"sends headers of more than {HEAD_BYTES >> 10} KiB")
            self._feed(data)
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                self._take(piece, now)
            if self._is_complete:
                self.finished.set_result(None)
            elif self._is_wrong or (self.head.done() and self._num_unused > LINE_BYTES):
                raise AnswerError("does not answer in HTTP")
        except AnswerError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        in_body = self.head.done() and not self.finished.done()
        if in_body and error is None and not BOUNDED & self._headers.keys():
            self.finished.set_result(None)
        if error is not None:
            self._fail(AnswerError(f"broke the connection: {error}"))
        where = "" if self.head.done() else " without an answer"
        self._fail(AnswerError(f"closed the connection{where}"))

    # -- called by the parser ----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # more to come: the answer itself follows
            self._headers = {}
        else:
            location = self._headers.get(b"location")
            shown = None if location is None else location.decode("latin-1")
            self.head.set_result(Head(status, shown))

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._num_unused = 0

    def on_message_complete(self) -> None:
        self._is_complete = self.head.done()

    # -- the rest ----------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        begins_body = self.head.done()
        self._num_unused += len(data)
        try:
            if not self._is_complete:
                self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._is_wrong = not self._is_complete  # what follows the answer is not read
        if self.head.done() and not begins_body:
            self._num_unused = 0

    def _fail(self, error: AnswerError) -> None:
        for future in (self.head, self.finished):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark as retrieved: there may be no waiter any more
        self.close()
