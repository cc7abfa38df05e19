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

from minisgl.client.address import Address
from minisgl.client.errors import AnswerError

HEAD_BYTES = 64 << 10  # of an answer, with those that announce it
LINE_BYTES = 4 << 10  # of the line in front of a chunk

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
    failure = OSError("its name leads nowhere")
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
        self._head_bytes = 0
        self._data = b""  # received and not used yet
        self._in_body = False
        self._chunked = False
        # Bytes to come of a body of a known length, or of a chunk and the end of its line.
        self._num_left: int | None = None

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._data:
            data = self._data + data
        if self.finished.done():
            return
        try:
            if not self._in_body:
                data = self._read_head(data)
            if self._in_body:
                data = self._read_body(data, now)
            self._data = data
        except AnswerError as error:
            self._fail(error)
        except ValueError:
            self._fail(AnswerError("does not answer in HTTP"))

    def connection_lost(self, error: Exception | None) -> None:
        ends_the_body = self._in_body and not self._chunked and self._num_left is None
        if ends_the_body and error is None:
            self._finish()
        if error is not None:
            self._fail(AnswerError(f"broke the connection: {error}"))
        where = "" if self._in_body else " without an answer"
        self._fail(AnswerError(f"closed the connection{where}"))

    def _read_head(self, data: bytes) -> bytes:
        """Returns the data after the head, or all data while the head is incomplete."""
        while not self._in_body:
            self._check(data.startswith(b"HTTP/"[: len(data)]))
            head, end, rest = data.partition(b"\r\n\r\n")
            if self._head_bytes + len(head) > HEAD_BYTES:
                raise AnswerError(f"sends headers of more than {HEAD_BYTES >> 10} KiB")
            if not end:
                return data
            self._head_bytes += len(head) + len(end)
            data = rest
            first, *lines = head.decode("latin-1").split("\r\n")
            _, status, *_ = (*first.split(), "")
            self._check(100 <= (number := int(status)) < 600)
            if number < 200:  # more to come: the answer itself follows
                continue
            parted = (line.partition(":") for line in lines)
            headers = {name.lower(): value.strip() for name, _, value in parted}
            self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
            if not self._chunked and "content-length" in headers:
                self._num_left = int(headers["content-length"])
                self._check(self._num_left >= 0)
            self._in_body = True
            self.head.set_result(Head(number, headers.get("location")))
        return data

    def _read_body(self, data: bytes, now: float) -> bytes:
        """Passes on complete pieces; returns the rest."""
        if self._chunked:
            return self._read_chunks(data, now)
        if self._num_left is not None:
            data = data[: self._num_left]
            self._num_left -= len(data)
        if data:
            self._take(data, now)
        if self._num_left == 0:
            self._finish()
        return b""

    def _read_chunks(self, data: bytes, now: float) -> bytes:
        start = 0
        if self._num_left:
            start = min(self._num_left, len(data))
            if self._num_left > 2:
                self._take(data[: self._num_left - 2], now)
            self._num_left -= start
        while (line_end := data.find(b"\r\n", start)) >= 0:
            first = line_end + 2
            last = first + int(data[start:line_end].partition(b";")[0], 16)
            if last <= first:
                self._check(last == first)
                self._finish()
                return b""
            if first < len(data):
                self._take(data[first:last], now)
            start = last + 2
            if start > len(data):
                self._num_left = start - len(data)
                return b""
        self._check(len(data) - start <= LINE_BYTES)
        return data[start:]

    @staticmethod
    def _check(is_http: bool) -> None:
        if not is_http:
            raise ValueError

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _fail(self, error: AnswerError) -> None:
        for future in (self.head, self.finished):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark as retrieved: there may be no waiter any more
        self.close()
