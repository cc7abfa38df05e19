"""A client that only streams: one connection, one request, and when each of its events arrived.

What general clients do for an event costs more than the server spends on it, so that they would
measure themselves. This one cuts the bytes into events and notes the time; nothing is decoded
before the answer is complete. It takes what servers of the OpenAI API send: bodies in chunks, of a
known length or up to the end of the connection, and lines that end in LF or CRLF.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

DATA = b"data:"
DONE = b"[DONE]"

_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Answer:
    """What came back. Times are those of time.perf_counter."""

    sent: float
    status: int = 0
    events: list[bytes] = field(default_factory=list)  # without the blank line between them
    times: list[float] = field(default_factory=list)  # [len(events)], of arrival
    rest: bytes = b""  # what is no event: all of an answer that is not streamed

    def payloads(self) -> Iterator[tuple[float, bytes]]:
        """The time of each event but the last, [DONE], and the JSON that it carries."""
        for at, event in zip(self.times, self.events, strict=True):
            data = _data(event)
            if data and data != DONE:
                yield at, data

    def chunks(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The same, decoded."""
        for at, data in self.payloads():
            yield at, _decode(data)

    @property
    def done(self) -> bool:
        return any(_data(event) == DONE for event in self.events[-1:])


def _data(event: bytes) -> bytes:
    """What an event carries; nothing if it is a comment, as servers send to keep connections."""
    if b"\n" not in event:
        return event[len(DATA) :].strip() if event.startswith(DATA) else b""
    lines = [line for line in event.split(b"\n") if line.startswith(DATA)]
    return b"\n".join(line[len(DATA) :].strip() for line in lines)


@dataclass(slots=True)
class Tally:
    """What the connections of a run have received so far."""

    num_events: int = 0


async def post(
    host: str,
    port: int,
    path: str,
    body: bytes,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    tally: Tally | None = None,
) -> Answer:
    """Send JSON and wait for the whole answer. Raises OSError where the connection breaks."""
    loop = asyncio.get_running_loop()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {authority}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
    )
    transport, stream = await loop.create_connection(
        lambda: _Connection(head.encode() + body, loop, tally or Tally()), host, port, ssl=tls
    )
    try:
        return await stream.finished
    finally:
        transport.abort()


class _Connection(asyncio.Protocol):
    """Reads HTTP/1.1 with a body in chunks, of a known length, or up to the end."""

    def __init__(self, request: bytes, loop: asyncio.AbstractEventLoop, tally: Tally) -> None:
        self.finished: asyncio.Future[Answer] = loop.create_future()
        self._request = request
        self._tally = tally
        self._answer = Answer(sent=0.0)
        self._data = b""  # received and not used yet
        self._text = b""  # of the body: the beginning of an event
        self._in_body = False
        self._chunked = False
        self._num_left: int | None = None  # bytes to come of a body that is not in chunks, if known

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._answer.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._data:
            data = self._data + data
        try:
            if not self._in_body:
                data = self._read_head(data)
            if self._in_body:
                data = self._read_body(data, now)
        except ValueError as error:
            self._fail(f"not HTTP as this client reads it: {error}")
        self._data = data

    def connection_lost(self, error: Exception | None) -> None:
        ends_the_body = self._in_body and not self._chunked and self._num_left is None
        if ends_the_body and error is None:
            self._finish()
        self._fail(str(error or "the server closed the connection"))

    def _read_head(self, data: bytes) -> bytes:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            return data
        first, *lines = head.decode("latin-1").lower().split("\r\n")
        protocol, status, *_ = first.split()
        if not protocol.startswith("http/"):
            raise ValueError(f"it begins with {first[:40]!r}")
        self._answer.status = int(status)
        if 100 <= self._answer.status < 200:  # more to come: the answer itself follows
            return self._read_head(rest)
        headers = {
            name: value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self._chunked = headers.get("transfer-encoding") == "chunked"
        if "content-length" in headers:
            self._num_left = int(headers["content-length"])
        self._in_body = True
        return rest

    def _read_body(self, data: bytes, now: float) -> bytes:
        """Take what is complete; returns the rest."""
        if not self._chunked:
            self._take(data, now)
            if self._num_left is not None:
                self._num_left -= len(data)
                if self._num_left <= 0:
                    self._finish()
            return b""
        start = 0
        while (line_end := data.find(b"\r\n", start)) >= 0:
            first = line_end + 2
            last = first + int(data[start:line_end].partition(b";")[0], 16)
            if len(data) < last + 2:
                break
            if first == last:
                self._finish()
                return b""
            self._take(data[first:last], now)
            start = last + 2
        return data[start:] if start else data

    def _take(self, text: bytes, now: float) -> None:
        text = self._text + text
        if b"\r" in text:
            # JSON has none of its own, so that all of them belong to the ends of lines. A last one
            # does too, and its LF may be on the way.
            text = text.replace(b"\r", b"")
        *events, self._text = text.split(b"\n\n")
        self._answer.events += events
        self._answer.times += [now] * len(events)
        self._tally.num_events += len(events)

    def _finish(self) -> None:
        self._answer.rest = self._text
        if not self.finished.done():
            self.finished.set_result(self._answer)

    def _fail(self, reason: str) -> None:
        if not self.finished.done():
            self.finished.set_exception(ConnectionError(reason))
            self.finished.exception()  # nobody may be waiting any more, which is no fault
