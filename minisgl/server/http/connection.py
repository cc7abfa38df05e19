"""The connection of one client, with limits of size, time and buffered output.

uvicorn's parser collects the head of a request without a limit, and waits for the rest without a
timeout. Here both are limited. One sweep over all connections counts the seconds that each has
spent in its phase; seconds in which the event loop was blocked or nothing was read do not count.
It also counts the seconds in which a client took nothing of what is written to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import socket
import termios
from dataclasses import dataclass
from enum import Enum, auto
from struct import Struct
from typing import Any, Protocol, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from minisgl.server.http.access_log import LEFT
from minisgl.server.http.faults import KEY, HTTPError

logger = logging.getLogger(__name__)

# Bytes buffered in this process, and as many in the kernel, before `send` waits for the reader.
# Tokens that the engine produces meanwhile are merged, at a few bytes per token.
MAX_UNSENT_BYTES = 16 << 10
WANTED_FILES = 1 << 16
OWN_FILES = 100  # assumed open besides connections, if they cannot be counted
SPARE_FILES = 64  # reserve for files opened while serving

MAX_HEAD_BYTES = 64 << 10  # of the URL, the headers and the trailers of a request
MAX_HEADERS = 100
MAX_PIPELINED = 32  # requests that wait for the answer to an earlier one on their connection
# A body may have this many chunks, and one more for each MEAN_CHUNK_BYTES of it: each costs some
# microseconds, however small it is.
MAX_SMALL_CHUNKS = 4096
MEAN_CHUNK_BYTES = 64
# Read of a body after the answer to its request. If more is to come, or nobody knows how much, the
# connection is closed, and the answer says so.
MAX_UNREAD_BYTES = 64 << 10
# The parser is fed in pieces of this size, which bounds what it collects between two checks.
PIECE_BYTES = 16 << 10

HEAD_SECONDS = 10
BODY_SECONDS = 20  # the window over which the minimum rate of a body is measured
BODY_BYTES_PER_SECOND = 1 << 10
# Longer than client pools keep a connection, so that none is closed while a request is sent.
KEEP_ALIVE_SECONDS = 75
LINGER_SECONDS = 5
READ_SECONDS = 30  # without any progress, until an answer that is being written is given up
STUCK_SECONDS = 5  # without any progress, until the connection may be closed to make room

PROBE_SECONDS = 0.01
INT = Struct("@i")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Phase(Enum):
    """What the server waits for; SECONDS has the maximum duration of each phase."""

    HEAD = auto()  # of the first request, or the rest of the head of a later one
    BODY = auto()
    ANSWER = auto()  # nothing: the client waits for the server
    IDLE = auto()
    LINGER = auto()  # for the client to read the last answer and to close


SECONDS = {
    Phase.HEAD: HEAD_SECONDS,
    Phase.BODY: BODY_SECONDS,
    Phase.IDLE: KEEP_ALIVE_SECONDS,
    Phase.LINGER: LINGER_SECONDS,
}


class Closable(Protocol):
    """What `Connections` asks of a connection."""

    def count_second(self) -> None: ...

    def abort(self) -> None: ...


class Connections(ServerState):
    """All open connections of a server. If there are too many, the least useful are closed."""

    def __init__(self, max_open: int) -> None:
        super().__init__()
        self.max_open = max_open
        # Ordered by age. All other connections have a request in flight.
        self.new: dict[Closable, None] = {}  # have not sent a complete head yet
        self.idle: dict[ServerConnection, None] = {}  # all their requests are answered
        self.stuck: dict[ServerConnection, None] = {}  # have taken nothing for STUCK_SECONDS
        self._num_shed = 0

    def sweep(self) -> None:
        """Count one second for every connection, and close those that exceed their limit."""
        for connection in tuple(self.connections):
            cast(Closable, connection).count_second()
        if self._num_shed:
            logger.warning(
                "Closed %d connections without a request, or whose client reads nothing: more than "
                "%d at once would exceed the limit of open files (ulimit -n).",
                self._num_shed,
                self.max_open,
            )
            self._num_shed = 0

    def add(self, newcomer: Closable) -> None:
        """Count `newcomer`; close the least useful connection if there are too many."""
        self._all.add(newcomer)
        self.new[newcomer] = None
        if len(self._all) <= self.max_open:
            return
        closed = self._least_useful(newcomer)
        self.remove(closed)
        closed.abort()
        self._num_shed += 1

    def remove(self, connection: Closable) -> None:
        self._all.discard(connection)
        for group in (self.new, self.idle, self.stuck):
            cast(dict[Closable, None], group).pop(connection, None)

    def _least_useful(self, newcomer: Closable) -> Closable:
        # A newcomer is honest more often than a reader that does not read.
        for stuck in self.stuck:
            return stuck
        oldest = next(iter(self.new))
        if oldest is not newcomer:
            return oldest
        return next((idle for idle in self.idle if idle.has_sent_all), newcomer)

    @property
    def _all(self) -> set[Closable]:
        return cast(set[Closable], self.connections)


@dataclass(slots=True)
class Arrived:
    """What has arrived of a request. Its methods raise HTTPError beyond the limits."""

    num_head_bytes: int = 0
    num_headers: int = 0
    num_body_bytes: int = 0  # in this window
    num_content_bytes: int = 0  # of the body so far
    num_chunks: int = 0
    num_unparsed: int = 0  # bytes in the parser that it has not reported yet

    def count_head(self, num_bytes: int) -> None:
        self.num_unparsed = 0
        self.num_head_bytes += num_bytes
        if self.num_headers > MAX_HEADERS or self.num_head_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()

    def count_chunk(self) -> None:
        self.num_chunks += 1
        if self.num_chunks > MAX_SMALL_CHUNKS + self.num_content_bytes // MEAN_CHUNK_BYTES:
            message = (
                f"The body comes in too many small chunks; allowed: {MAX_SMALL_CHUNKS}, or chunks "
                f"of {MEAN_CHUNK_BYTES} bytes on average."
            )
            raise HTTPError(400, message, "invalid_http_request")

    def count_body(self, num_bytes: int) -> None:
        self.num_unparsed = 0
        self.num_body_bytes += num_bytes
        self.num_content_bytes += num_bytes


@dataclass(slots=True)
class Unread:
    """Counts the seconds in which a client takes nothing of what is written to it."""

    seconds: int = 0
    has_taken: bool = False  # within this second, so much that more may be written
    num_untaken: int = 0  # bytes that its system had not taken a second ago

    def count_second(self, transport: asyncio.Transport, *, is_all: bool) -> int:
        """Returns the seconds so far. is_all: no more is written until the client has read."""
        unsent = transport.get_write_buffer_size()
        untaken = unsent + _num_unacknowledged(transport) if unsent else 0
        # Unless it is all, more may have been written in between than was read.
        takes = not unsent or not is_all or self.has_taken or untaken < self.num_untaken
        self.seconds = 0 if takes else self.seconds + 1
        self.num_untaken, self.has_taken = untaken, False
        return self.seconds


class ServerConnection(HttpToolsProtocol):
    """uvicorn's HTTP connection, with limits of size and time, and a small output buffer."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = cast(Connections, server_state)
        self._phase = Phase.HEAD
        self._seconds = 0  # in this phase
        self._arrived = Arrived()
        self._unread = Unread()
        self._is_silent = True  # nothing has arrived since it was opened
        self._is_deaf = False  # further input is ignored
        self._is_upgrade = False  # the request asks for another protocol, which we ignore
        self._answering: RequestResponseCycle | None = None  # the cycle that has a task
        self.handshake: Closable | None = None  # counted until this is

    # -- called by the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if self.handshake is not None:
            self._all.remove(self.handshake)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self.pipeline.clear()
        # uvicorn knows of the newest request alone, and this may be an earlier one.
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            cycle.scope["state"][LEFT] = True
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to leave the connection open for the answers to come."""
        # A client in the middle of an answer has left, as far as we know. The transport would close
        # only after sending its buffer, and the engine work on until then.
        if self.flow.write_paused and not self._has_answered:
            self.transport.abort()
        if self._phase is not Phase.ANSWER or not self._probe(PROBE_SECONDS):
            return False
        self.cycle.keep_alive = False
        return True

    def resume_writing(self) -> None:
        self._unread.has_taken = True
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        self._is_silent = False
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            fault = self._feed(piece)
            if fault is not None:
                self._refuse(fault)
                return

    # -- called by the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._arrived = Arrived()
        self._enter(Phase.HEAD)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._arrived.count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._arrived.num_headers += 1
        self._arrived.count_head(len(name) + len(value))
        # A trailer must not be added to the headers, which the app already has.
        if self._phase is Phase.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":  # the parser takes what follows for a tunnel
                message = "CONNECT is for proxies, which this server is not."
                raise HTTPError(405, message, "method_not_allowed")
            self._is_upgrade = True
            return
        if len(self.pipeline) >= MAX_PIPELINED and not self._is_deaf:
            message = f"More than {MAX_PIPELINED} requests wait on this connection."
            raise HTTPError(429, message, "too_many_pipelined")
        super().on_headers_complete()
        self._all.new.pop(self, None)
        self._all.idle.pop(self, None)
        self._enter(Phase.BODY)

    def on_chunk_header(self) -> None:
        self._arrived.count_chunk()

    def on_body(self, body: bytes) -> None:
        self._arrived.count_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._arrived.num_unparsed = 0
        super().on_message_complete()
        self._enter(Phase.IDLE if self.cycle.response_complete else Phase.ANSWER)

    # -- called by uvicorn and by the sweep --------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._all.idle[self] = None
            if self._phase is Phase.ANSWER:
                self._enter(Phase.IDLE)

    def count_second(self) -> None:
        """Count a second, and act if the phase has reached its limit."""
        is_all = self.flow.write_paused or self._has_answered
        unread_seconds = self._unread.count_second(self.transport, is_all=is_all)
        if not unread_seconds:
            self._all.stuck.pop(self, None)
        elif unread_seconds >= READ_SECONDS:
            self.transport.abort()
        elif unread_seconds == STUCK_SECONDS:
            self._all.stuck[self] = None
        if self._phase is Phase.ANSWER or self.flow.read_paused:
            return
        # While the client reads what it was sent, it does not idle, and has its time to read.
        if self._phase in (Phase.IDLE, Phase.LINGER) and not self.has_sent_all:
            return
        self._seconds += 1
        if self._seconds < SECONDS[self._phase]:
            return
        self._seconds = 0
        if self._phase is Phase.LINGER or self.transport.is_closing():
            self.transport.abort()
        elif self._phase is Phase.IDLE or self._is_silent:
            self.transport.close()
        elif self._phase is Phase.HEAD:
            message = f"The head of a request must arrive within {HEAD_SECONDS} seconds."
            self._refuse(HTTPError(408, message, "request_timeout"))
        elif self._arrived.num_body_bytes >= BODY_SECONDS * BODY_BYTES_PER_SECOND:
            self._arrived.num_body_bytes = 0
        else:
            message = f"The body arrived at less than {BODY_BYTES_PER_SECOND} bytes per second."
            self._refuse(HTTPError(408, message, "request_timeout"))

    def abort(self) -> None:
        self.transport.abort()

    def linger(self) -> None:
        """Send EOF, and give the client time to read before closing.

        Closing at once, with unread input, would reset the connection and lose the last answer.
        """
        self._is_deaf = True
        self._enter(Phase.LINGER)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    @property
    def _has_answered(self) -> bool:
        """Whether nothing more is written until the next request."""
        is_ending = self._phase is Phase.LINGER or self.transport.is_closing()
        return is_ending or self.cycle is None or self.cycle.response_complete

    @property
    def has_sent_all(self) -> bool:
        return not self.transport.get_write_buffer_size()

    # -- the rest ----------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._seconds = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] < "1.1":
            app = _ended_by_closing(app, cycle)
        app = _closing_if_unread(app, self, cycle)
        super()._start_asgi_task(cycle, app)

    def leaves_unread(self, cycle: RequestResponseCycle) -> bool:
        """Whether more may come of the body of a request than is read after its answer."""
        if self._phase is not Phase.BODY or cycle is not self.cycle:
            return False
        length = dict(cycle.scope["headers"]).get(b"content-length")
        return length is None or int(length) - self._arrived.num_content_bytes > MAX_UNREAD_BYTES

    def _probe(self, pause_s: float) -> bool:
        """Find out whether a client that sends no more still reads; False if that is not allowed.

        One that has left looks the same, until its system rejects what it is sent: an interim
        answer, at growing intervals. Writing fails after that. TLS does not stay open one way.
        """
        cycle = self._answering
        may_probe = (
            self.scheme == "http"
            and cycle is not None
            and cycle.scope["http_version"] == "1.1"
            and not cycle.response_started
            and not self.transport.is_closing()
        )
        if may_probe:
            self.transport.write(CONTINUE)
            self.loop.call_later(pause_s, self._probe, 2 * pause_s)
        return may_probe

    def _feed(self, piece: bytes) -> HTTPError | None:
        """Parse `piece`; returns its fault, if any."""
        self._arrived.num_unparsed += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # Parse the request again without its Upgrade header. The parser would treat the body
            # as the other protocol. Java's client offers HTTP/2 so.
            self._is_upgrade = False
            version = self.parser.get_http_version().encode()
            lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
            lines += [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.parser = _new_parser(self)
            rest = piece[upgrade.args[0] :]
            return self._feed(b"\r\n".join(lines) + b"\r\n\r\n" + rest)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, HTTPError):  # of a callback
                return error.__context__
            return HTTPError(400, "Invalid HTTP request received.", "invalid_http_request")
        too_much = self._arrived.num_head_bytes + self._arrived.num_unparsed > MAX_HEAD_BYTES
        return _head_too_large() if too_much else None

    def _refuse(self, fault: HTTPError) -> None:
        """Answer `fault`, after earlier requests, and close. Further input is ignored."""
        self._is_deaf = True
        if self._phase is not Phase.BODY:
            # No request is open; make one for the answer to belong to.
            self.parser = _new_parser(self)
            self.parser.feed_data(b"GET / HTTP/1.1\r\n\r\n")
        elif self.cycle.response_started:
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.linger()
            return
        cycle = self.cycle
        cycle.scope["state"][KEY] = fault
        cycle.keep_alive = False
        cycle.transport = LingeringTransport(self)
        cycle.more_body = False
        cycle.message_event.set()
        self._enter(Phase.ANSWER)
        self.flow.resume_reading()  # to notice when the client leaves


def _new_parser(connection: ServerConnection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
    return parser


class LingeringTransport(asyncio.Transport):
    """The transport of the last answer of a connection whose client may still be sending."""

    def __init__(self, connection: ServerConnection) -> None:
        super().__init__()
        self._connection = connection

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.linger()


def _ended_by_closing(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app` for a client of HTTP/1.0: its answer has no length, and ends where the server closes.

    uvicorn expects a length unless it sends chunks, so it is told of each piece before it is sent.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_piece(message: Message) -> None:
            cycle.chunked_encoding = False
            cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_piece)

    return answer


def _closing_if_unread(
    app: ASGIApp, connection: ServerConnection, cycle: RequestResponseCycle
) -> ASGIApp:
    """`app` with answers that say so where the connection closes because of what is left unread:
    else a client might send its next request before it sees that."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_piece(message: Message) -> None:
            if message["type"] == "http.response.start" and connection.leaves_unread(cycle):
                cycle.transport = LingeringTransport(connection)
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_piece)

    return answer


def _head_too_large() -> HTTPError:
    message = (
        f"URL, headers and trailers of a request, or the extensions of a chunk, are larger than "
        f"{MAX_HEAD_BYTES >> 10} KiB or more than {MAX_HEADERS} headers."
    )
    return HTTPError(431, message, "head_too_large")


def _num_unacknowledged(transport: asyncio.BaseTransport) -> int:
    """Number of bytes sent that the client's system has not acknowledged; 0 if not known.

    What a slow client takes shows here early: our buffer moves on in pieces of some KiB.
    """
    with contextlib.suppress(OSError, ValueError):  # of another kind, or closed
        answer = fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, INT.pack(0))
        return int(INT.unpack(answer)[0])
    return 0


def limit_unsent(listener: socket.socket) -> None:
    """Limit the unsent bytes that the kernel buffers; accepted connections inherit the limit."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def raise_file_limit() -> int:
    """Raise the limit of open files as far as the system allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = WANTED_FILES if hard == unlimited else min(WANTED_FILES, hard)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return WANTED_FILES if soft == unlimited else soft


def room_for_connections(num_open: int) -> int:
    """Number of connections that this process may have, given that `num_open` are open now."""
    try:
        others = len(os.listdir("/dev/fd")) - num_open
    except OSError:
        others = OWN_FILES
    return max(1, raise_file_limit() - others - SPARE_FILES)
