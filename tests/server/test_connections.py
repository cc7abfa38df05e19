"""Limits on one connection's bytes and time, and on the number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from support.fake_engine import LETTERS, FakeEngine
from support.http_server import (
    FAKE_SERVER,
    HELLO,
    running,
    serving_process,
    wait_for_health,
)
from support.quick_server import QuickServer
from support.tls import CERTIFICATE, KEY
from support.waiting import until

from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.http.bodies import SMALL_BODY_BYTES, BodyBudget
from minisgl.server.http.connection import (
    BODY_BYTES_PER_SECOND,
    BODY_SECONDS,
    HEAD_SECONDS,
    KEEP_ALIVE_SECONDS,
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_SMALL_CHUNKS,
    MAX_UNREAD_BYTES,
    MAX_UNSENT_BYTES,
    MEAN_CHUNK_BYTES,
    PIECE_BYTES,
    READ_SECONDS,
    STUCK_SECONDS,
    Connections,
    Phase,
    ServerConnection,
    _num_unacknowledged,
    raise_file_limit,
)
from minisgl.server.process import Server, bind, http_settings

CHAT = "/v1/chat/completions"
GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"
POST = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
QUESTION = json.dumps({"messages": HELLO, "max_tokens": 3, "seed": 0}).encode()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


class Client:
    """One connection, of which every byte is ours."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *pieces: bytes) -> None:
        self.writer.write(b"".join(pieces))

    def post(self, body: bytes = QUESTION, *headers: bytes, sent: int | None = None) -> None:
        """A request with this body, of which so much is sent."""
        length = b"content-length: %d\r\n" % len(body)
        self.send(POST, length, *(header + b"\r\n" for header in headers), b"\r\n", body[:sent])

    async def answer(self) -> Answer:
        head = await self.reader.readuntil(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100 "):
            head = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body = await self._chunks()
        else:
            body = await self.reader.read()
        return Answer(int(status.split()[1]), headers, body)

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()
        return body

    async def close(self) -> None:
        """Leave at once, without what is still to be sent: the server may never read it, and the
        transport would outlive the event loop, and a later test would be blamed for it."""
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def is_closed(self) -> bool:
        """Whether the server has closed it; waits for that."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


class HeldConnections(Connections):
    """Connections for which no second passes by itself: a test says when one has passed."""

    def sweep(self) -> None:
        """Called by the server, by the clock."""

    def pass_second(self) -> None:
        super().sweep()


@dataclass(frozen=True)
class Site:
    server: Server
    connections: HeldConnections
    app: Starlette
    engine: FakeEngine
    port: int

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        client = Client(reader, writer)
        try:
            yield client
        finally:
            await client.close()

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.connections.pass_second()

    async def only(self, phase: Phase) -> ServerConnection:
        """The one connection that there is, when it is in this phase."""
        connections = self.connections.connections

        def found() -> bool:
            return [connection._phase for connection in connections] == [phase]

        await until(found)
        [connection] = connections
        assert isinstance(connection, ServerConnection)
        return connection


@contextlib.asynccontextmanager
async def site(
    engine: FakeEngine | None = None, max_open: int = 100, **options: Any
) -> AsyncIterator[Site]:
    engine = engine or FakeEngine()
    state = EngineState(ServerConfig(port=0, **options), engine)
    app = create_app(state)
    with bind(state.config) as listener:
        server = QuickServer(http_settings(app), state)
        server.server_state = connections = HeldConnections(max_open)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        yield Site(server, connections, app, engine, listener.getsockname()[1])
        server.should_exit = True
        await task


# -- size -----------------------------------------------------------------------------------------

HUGE = b"x" * (MAX_HEAD_BYTES + PIECE_BYTES + 1)
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"x-large: " + HUGE,  # and no end
        GET + HUGE,
        GET + b"".join(b"x-%d: %s\r\n" % (i, HUGE[: 4 << 10]) for i in range(17)),
        GET + b"x: y\r\n" * MAX_HEADERS + b"\r\n",
        b"GET /" + HUGE,
        b"GET /version?" + HUGE + b" HTTP/1.1\r\n\r\n",
        b"\r\n" * len(HUGE),
        CHUNKED + b"1;" + HUGE,
        CHUNKED + b"0\r\n" + b"x-trailer: " + HUGE,
        CHUNKED + b"0\r\n" + b"x: y\r\n" * MAX_HEADERS + b"\r\n",
    ],
    ids=["value", "name", "large", "many", "url", "query", "lines", "chunk", "trailer", "trailers"],
)
async def test_a_head_that_is_too_large_is_refused_while_it_arrives(sent: bytes) -> None:
    async with site() as here, here.client() as client:
        client.send(sent)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (431, "head_too_large")
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"] and answer.headers["connection"] == "close"
        assert await client.is_closed()
        metrics = httpx.AsyncClient(base_url=f"http://127.0.0.1:{here.port}")
        async with metrics:
            text = (await metrics.get("/metrics")).text
        assert 'status="431"} 1.0' in text


async def test_a_head_within_the_limits_is_accepted_in_small_pieces() -> None:
    async with site() as here, here.client() as client:
        most = b"".join(b"x-%d: y\r\n" % i for i in range(MAX_HEADERS - 1))
        client.send(GET, most, b"\r\n")
        assert (await client.answer()).status == 200
        client.send(GET, b"x: " + b"y" * (MAX_HEAD_BYTES - 100), b"\r\n\r\n")
        assert (await client.answer()).status == 200
        # Many heads on one connection are not one large one.
        for _ in range(3):
            client.send(GET, b"x: " + b"y" * (MAX_HEAD_BYTES // 2), b"\r\n\r\n")
            assert (await client.answer()).status == 200
        for start in range(0, len(GET), 7):
            client.send(GET[start : start + 7])
            await client.writer.drain()
        client.send(b"\r\n")
        assert (await client.answer()).status == 200


def test_an_endless_header_is_not_buffered_and_gets_an_answer() -> None:
    """In a process of its own, which has another event loop."""

    async def flood(port: int) -> list[int]:
        async def one() -> int:
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            # Read as it comes: the server resets a connection that has not ended after a while.
            answering = asyncio.ensure_future(client.answer())
            with contextlib.suppress(ConnectionError):
                client.send(GET + b"x-large: ")
                for _ in range(64):
                    client.send(b"x" * (256 << 10))
                    await client.writer.drain()
            status = (await answering).status
            await client.close()
            return status

        return [await one() for _ in range(8)]

    with serving_process({}) as (process, url):
        wait_for_health(process, url, 200)
        before = resident(process.pid)
        assert asyncio.run(flood(httpx.URL(url).port or 0)) == [431] * 8
        assert resident(process.pid) - before < 32 << 20


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def test_trailers_do_not_count_as_headers() -> None:
    body = b"%x\r\n%s\r\n" % (len(QUESTION), QUESTION)
    async with site(api_key=("secret",)) as here, here.client() as client:
        client.send(CHUNKED, body, b"0\r\nauthorization: Bearer secret\r\n\r\n")
        assert (await client.answer()).status == 401


async def test_an_error_of_a_pipelined_request_is_sent_after_the_running_answer() -> None:
    """A fault behind a request is told when that has its answer."""
    engine = FakeEngine(answer_length=5)
    engine.gate.clear()
    async with site(engine) as here, here.client() as client:
        client.post(json.dumps({"messages": HELLO, "stream": True}).encode())
        await until(lambda: len(engine.running) == 1)
        client.send(b"NONSENSE\r\n\r\n")
        await until(lambda: bool(here.connections.connections))
        [connection] = here.connections.connections
        assert isinstance(connection, ServerConnection)
        await until(lambda: connection._is_deaf)
        engine.gate.set()
        streamed = await client.answer()
        assert streamed.status == 200 and streamed.body.endswith(b"data: [DONE]\n\n")
        invalid = await client.answer()
        assert (invalid.status, invalid.error["code"]) == (400, "invalid_http_request")
        assert await client.is_closed()


async def test_a_client_that_pipelines_too_much_gets_the_allowed_answers_in_order() -> None:
    async with site() as here, here.client() as client:
        client.send((GET + b"\r\n") * 1000)
        answers = [await client.answer() for _ in range(MAX_PIPELINED + 2)]
        assert [answer.status for answer in answers] == [200] * (MAX_PIPELINED + 1) + [429]
        assert await client.is_closed()


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


TINY = b"1\r\n \r\n"  # a chunk


async def test_a_body_of_many_tiny_chunks_is_refused() -> None:
    async with site() as here, here.client() as client:
        client.send(CHUNKED, TINY * (MAX_SMALL_CHUNKS - 1), chunk(QUESTION))
        client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200
        client.send(CHUNKED, TINY * (2 * MAX_SMALL_CHUNKS))
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (400, "invalid_http_request")
        assert "chunks" in answer.error["message"]
        assert await client.is_closed()


async def test_a_body_of_many_usual_chunks_is_accepted() -> None:
    size = 2 * MEAN_CHUNK_BYTES
    padding = chunk(b" " * size) * (2 * MAX_SMALL_CHUNKS)
    async with site() as here, here.client() as client:
        client.send(CHUNKED, chunk(QUESTION), padding, b"0\r\n\r\n")
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("head", [CHUNKED, POST + b"content-length: 99999999999\r\n\r\n"])
async def test_little_is_parsed_of_a_body_that_arrives_after_the_answer(head: bytes) -> None:
    async with site(api_key=("secret",)) as here, here.client() as client:
        client.send(head)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        assert await client.is_closed()
        connection = await here.only(Phase.LINGER)
        client.send(TINY * MAX_UNREAD_BYTES)
        await client.writer.drain()
        assert connection._arrived.num_content_bytes == 0
        here.pass_seconds(LINGER_SECONDS)
        await until(lambda: not here.connections.connections)


async def test_a_large_request_may_come_with_the_end_of_a_body_that_was_not_waited_for() -> None:
    """As of clients that have their answer before they have sent all of their body."""
    async with site() as here, here.client() as client:
        client.send(b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
        assert (await client.answer()).status == 404
        connection = await here.only(Phase.BODY)
        client.send(b"{")
        await until(lambda: connection._arrived.num_content_bytes == 1)
        body = QUESTION + b" " * (4 * MAX_UNREAD_BYTES)
        client.send(b"}" + POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert (await client.answer()).status == 200


# -- time -----------------------------------------------------------------------------------------


async def test_a_silent_connection_is_closed_without_an_answer() -> None:
    async with site() as here, here.client() as client:
        await here.only(Phase.HEAD)
        here.pass_seconds(HEAD_SECONDS - 1)
        await here.only(Phase.HEAD)
        here.pass_seconds(1)
        assert await client.is_closed()


@pytest.mark.parametrize("answered", [0, 2])
@pytest.mark.parametrize("sent", [b"G", GET, b"\r\n"])
async def test_a_head_that_takes_too_long_is_refused(sent: bytes, answered: int) -> None:
    async with site() as here, here.client() as client:
        for _ in range(answered):
            client.send(GET, b"\r\n")
            await client.answer()
        if answered:
            await here.only(Phase.IDLE)
            here.pass_seconds(KEEP_ALIVE_SECONDS - 1)
        client.send(sent)
        connection = await here.only(Phase.HEAD)
        await until(lambda: not connection._is_silent)
        here.pass_seconds(HEAD_SECONDS - 1)
        assert connection._phase is Phase.HEAD
        here.pass_seconds(1)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert await client.is_closed()


async def test_an_idle_connection_is_kept_for_the_keep_alive_time() -> None:
    async with site() as here, here.client() as client:
        client.send(GET, b"\r\n")
        await client.answer()
        await here.only(Phase.IDLE)
        here.pass_seconds(KEEP_ALIVE_SECONDS - 1)
        client.send(GET, b"\r\n")
        assert (await client.answer()).status == 200
        await here.only(Phase.IDLE)
        here.pass_seconds(KEEP_ALIVE_SECONDS)
        assert await client.is_closed()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_stops_arriving_ends_its_request(chunked: bool) -> None:
    async with site() as here, here.client() as client:
        if chunked:
            client.send(CHUNKED, b"4\r\n{   \r\n")
        else:
            client.post(sent=4)
        await here.only(Phase.BODY)
        here.pass_seconds(BODY_SECONDS - 1)
        await here.only(Phase.BODY)
        here.pass_seconds(1)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.headers["x-request-id"]
        assert await client.is_closed()
        assert not here.engine.submitted


def has_arrived(connection: ServerConnection, num_bytes: int) -> bool:
    return connection._arrived.num_body_bytes >= num_bytes


async def test_a_body_that_arrives_slowly_but_steadily_is_accepted() -> None:
    window = BODY_SECONDS * BODY_BYTES_PER_SECOND
    body = QUESTION + b" " * (4 * window - len(QUESTION))
    async with site() as here, here.client() as client:
        client.post(body, sent=1)
        connection = await here.only(Phase.BODY)
        for start in range(1, len(body), window):
            part = body[start : start + window]
            arrived = connection._arrived.num_body_bytes + len(part)
            client.send(part)
            if start + window < len(body):
                await until(partial(has_arrived, connection, arrived))
                here.pass_seconds(BODY_SECONDS)
        assert (await client.answer()).status == 200


async def test_a_connection_waiting_for_its_answer_has_no_time_limit() -> None:
    """No timeout applies before the answer, nor while the server reads no pipelined request."""
    engine = FakeEngine()
    engine.gate.clear()
    async with site(engine) as here, here.client() as client:
        client.post()
        await here.only(Phase.ANSWER)
        here.pass_seconds(1000)
        client.post(sent=4)
        connection = await here.only(Phase.BODY)
        assert connection.flow.read_paused
        here.pass_seconds(1000)
        client.send(QUESTION[4:])
        engine.gate.set()
        for _ in range(2):
            assert (await client.answer()).status == 200


async def test_little_is_read_of_a_body_that_the_handler_ignores() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with site(engine) as here, here.client() as client:
        client.post()
        await here.only(Phase.ANSWER)
        client.post(QUESTION + b" " * (8 << 20))
        connection = await here.only(Phase.BODY)
        await until(lambda: connection.flow.read_paused)
        engine.gate.set()
        assert len(connection.cycle.body) < 1 << 20
        for _ in range(2):
            assert (await client.answer()).status == 200


async def test_the_rest_of_a_refused_body_must_arrive_in_time() -> None:
    async with site(api_key=("secret",)) as here, here.client() as client:
        client.post(sent=4)
        assert (await client.answer()).status == 401
        await here.only(Phase.BODY)
        here.pass_seconds(2 * BODY_SECONDS)
        assert await client.is_closed()


async def test_a_refused_client_that_stays_connected_is_disconnected() -> None:
    async with site() as here, here.client() as client:
        client.send(GET, HUGE)
        assert (await client.answer()).status == 431
        assert await client.is_closed()
        await here.only(Phase.LINGER)
        client.send(b"x")
        here.pass_seconds(LINGER_SECONDS)
        await until(lambda: not here.connections.connections)


# -- readers -------------------------------------------------------------------------------------


LARGE_GET = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n"
LAST = b"connection: close\r\n"


@contextlib.contextmanager
def reader_that_sends(port: int, sent: bytes) -> Iterator[socket.socket]:
    """A client with a small buffer that reads nothing by itself."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(sent)
        client.setblocking(False)
        yield client


def reader_of(
    port: int, num_requests: int = MAX_PIPELINED
) -> contextlib.AbstractContextManager[socket.socket]:
    """A client that has asked for much."""
    return reader_that_sends(port, (LARGE_GET + b"\r\n") * num_requests)


async def read_slowly(here: Site, client: socket.socket) -> list[Answer]:
    """All answers until the server closes.

    Before each piece almost the time passes after which a client that reads nothing is left. A
    piece is as much as it takes for the server to notice.
    """
    [connection] = here.connections.connections
    assert isinstance(connection, ServerConnection)
    transport = connection.transport

    def num_untaken() -> int:
        return transport.get_write_buffer_size() + _num_unacknowledged(transport)

    reader = asyncio.StreamReader()
    piece = b"not the end"
    while piece:
        here.pass_seconds(READ_SECONDS - 1)
        before = num_untaken()
        while piece and num_untaken() == before:
            piece = await asyncio.get_running_loop().sock_recv(client, 1024)
            reader.feed_data(piece)
    reader.feed_eof()
    answers = []
    slow = Client(reader, cast(asyncio.StreamWriter, None))
    while not reader.at_eof():
        answers.append(await slow.answer())
    return answers


async def test_a_client_that_reads_slowly_gets_a_long_stream() -> None:
    engine = FakeEngine(answer_length=50, repeat=2000)
    body = json.dumps({"messages": HELLO, "stream": True, "seed": 0}).encode()
    async with site(engine) as here:
        head = POST + LAST + b"content-length: %d\r\n\r\n" % len(body)
        with reader_that_sends(here.port, head + body) as client:
            connection = await here.only(Phase.ANSWER)
            await until(lambda: connection.flow.write_paused)
            [answer] = await read_slowly(here, client)
    *events, end = answer.body.split(b"\n\n")[:-1]
    deltas = [json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"] for event in events]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == "".join(letter * 2000 for letter in (LETTERS * 2)[:50])
    assert end == b"data: [DONE]"


@pytest.mark.parametrize(
    ("last", "status"), [(LARGE_GET + LAST + b"\r\n", 200), (b"NONSENSE\r\n\r\n", 400)]
)
async def test_a_client_that_reads_slowly_gets_all_answers_to_pipelined_requests(
    last: bytes, status: int
) -> None:
    """Also the end, after which the server has no reason to wait for the client."""
    num_others = 7
    async with site() as here:
        asked = (LARGE_GET + b"\r\n") * num_others + last
        with reader_that_sends(here.port, asked) as client:
            connection = await here.only(Phase.ANSWER)
            await until(lambda: connection.flow.write_paused)
            answers = await read_slowly(here, client)
    assert [answer.status for answer in answers] == [200] * num_others + [status]
    assert len({answer.body for answer in answers[:-1]}) == 1


async def test_a_client_that_has_its_answers_and_sends_no_more_may_read_slowly() -> None:
    async with site() as here:
        with reader_of(here.port, 1) as client:
            connection = await here.only(Phase.IDLE)
            assert connection.flow.write_paused
            client.shutdown(socket.SHUT_WR)
            [answer] = await read_slowly(here, client)
    assert answer.status == 200 and json.loads(answer.body)["paths"]


class SlowTransport(asyncio.Transport):
    """A transport whose client takes what the test says. Pauses the writer as asyncio does."""

    def __init__(self, connection: ServerConnection, kernel: socket.socket) -> None:
        super().__init__({"socket": kernel})
        self.connection = connection
        self.num_unsent = 0
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == MAX_UNSENT_BYTES

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def put(self, num: int) -> None:
        self.num_unsent += num
        if self.num_unsent > MAX_UNSENT_BYTES:
            self.connection.pause_writing()

    def take(self, num: int) -> None:
        self.num_unsent = max(0, self.num_unsent - num)
        if self.num_unsent <= MAX_UNSENT_BYTES // 4:
            self.connection.resume_writing()


NUM_BYTES = st.integers(1, 4 * MAX_UNSENT_BYTES)


@given(st.lists(st.tuples(st.integers(1, READ_SECONDS + 1), NUM_BYTES, NUM_BYTES), max_size=40))
def test_only_a_reader_that_takes_nothing_for_so_long_is_left(
    pauses: list[tuple[int, int, int]],
) -> None:
    """However much is written as soon as it may be. Before each reading pass some seconds."""
    connections = Connections(2)
    loop = asyncio.new_event_loop()
    config = http_settings(Starlette())
    config.load()
    connection = ServerConnection(config, connections, {}, loop)
    with contextlib.closing(loop), socket.socket() as kernel:
        transport = SlowTransport(connection, kernel)
        connection.connection_made(transport)
        connection._enter(Phase.ANSWER)
        transport.put(MAX_UNSENT_BYTES + 1)
        num_quiet = 0
        for seconds, num_taken, num_put in pauses:
            for _ in range(seconds):
                connections.sweep()
                num_quiet += 1
                assert (connection in connections.stuck) == (num_quiet >= STUCK_SECONDS)
                assert transport.is_aborted == (num_quiet >= READ_SECONDS)
                if transport.is_aborted:
                    return
            transport.take(num_taken)
            num_quiet = -1  # in the next second something was taken
            while not connection.flow.write_paused:
                transport.put(num_put)


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async with site() as here:
        with reader_of(here.port):
            connection = await here.only(Phase.ANSWER)
            await until(lambda: connection.flow.write_paused)
            # Its system may still be taking what it has room for, and the count begins anew.
            while not connection.transport.is_closing():
                num_quiet = connection._unread.seconds
                here.pass_seconds(1)
            assert num_quiet == READ_SECONDS - 1
            await until(lambda: not here.connections.connections)


async def test_clients_that_read_nothing_are_disconnected_to_make_room() -> None:
    engine = FakeEngine(answer_length=5)
    engine.gate.clear()
    async with site(engine, max_open=3) as here, here.client() as busy:
        busy.post(json.dumps({"messages": HELLO, "stream": True}).encode())
        await until(lambda: len(engine.running) == 1)
        # The second one has all its requests answered, in the buffer.
        with reader_of(here.port), reader_of(here.port, 1):
            await until(lambda: len(here.connections.connections) == 3)
            await until(lambda: num_unread(here) == 2)
            # Until the last answers are written, and taken as far as there is room for them.
            await until(lambda: here.pass_seconds(1) or len(here.connections.stuck) == 2)
            for _ in range(4):
                async with here.client() as new:
                    new.send(GET, b"\r\n")
                    assert (await new.answer()).status == 200
        engine.gate.set()
        assert (await busy.answer()).status == 200


def num_unread(here: Site) -> int:
    connections = here.connections.connections
    return sum(
        cast(ServerConnection, one).transport.get_write_buffer_size() > 0 for one in connections
    )


def test_a_client_that_leaves_answers_unread_logs_no_error() -> None:
    """In a process of its own, which has another event loop."""
    with serving_process({}) as (process, url):
        wait_for_health(process, url, 200)
        port = httpx.URL(url).port or 0
        pause_s = 0.01
        while 'status="499"' not in httpx.get(f"{url}/metrics").text:
            with reader_of(port):
                time.sleep(pause_s)  # until it is stuck
            pause_s *= 2
            assert pause_s < 20
        process.terminate()
        assert process.stderr is not None
        log = process.stderr.read()
    assert "ERROR" not in log and "Traceback" not in log and "ASGI" not in log


async def test_a_half_closed_client_gets_its_answer() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with site(engine) as here, here.client() as client, here.client() as other:
        client.post()
        client.writer.write_eof()
        await until(lambda: len(engine.running) == 1)
        other.send(GET, b"\r\n")
        other.writer.write_eof()
        assert (await other.answer()).status == 200
        assert await other.is_closed()
        engine.gate.set()
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.is_closed()


async def test_a_disconnect_is_distinguished_from_a_half_close() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with site(engine) as here:
        async with here.client() as client:
            client.post()
            await until(lambda: len(engine.running) == 1)
        await until(lambda: not engine.running)
        await until(lambda: not here.connections.connections)


def test_a_server_process_answers_half_closed_clients() -> None:
    """In a process of its own, which has another event loop."""
    with serving_process({}) as (process, url):
        wait_for_health(process, url, 200)
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as client:
            length = b"content-length: %d\r\n\r\n" % len(QUESTION)
            client.sendall(POST + length + QUESTION)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while part := client.recv(1 << 16):
                answer += part
    assert b"HTTP/1.1 200 OK\r\n" in answer and answer.endswith(b"}")


# -- before the body ------------------------------------------------------------------------------


async def test_the_key_is_checked_before_the_body_is_read() -> None:
    async with site(api_key=("secret",)) as here, here.client() as client:
        client.post(b" " * 1000, b"expect: 100-continue", sent=0)
        assert (await client.answer()).status == 401  # and no 100 before it
    async with site(api_key=("secret",)) as here, here.client() as client:
        client.post(b" " * 1000, b"expect: 100-continue", b"authorization: Bearer secret", sent=0)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b" " * 1000)
        assert (await client.answer()).status == 400


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_upgrade_is_ignored_and_its_body_read(at_once: bool) -> None:
    """Java's client offers HTTP/2 with its first request."""
    offer = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAEAAE")
    async with site() as here, here.client() as client:
        client.post(QUESTION, *offer, sent=None if at_once else 0)
        if not at_once:
            await here.only(Phase.BODY)
            client.send(QUESTION)
        answer = await client.answer()
        assert answer.status == 200
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == LETTERS[:3]
        client.post()
        assert (await client.answer()).status == 200


async def test_connect_is_refused_once_and_closes_the_connection() -> None:
    """More answers than requests would be taken for those of others on a router's connection."""
    async with site() as here, here.client() as client:
        client.send(GET, b"\r\n", b"CONNECT /version HTTP/1.1\r\nhost: localhost\r\n\r\n", GET)
        assert (await client.answer()).status == 200
        refused = await client.answer()
        assert (refused.status, refused.error["code"]) == (405, "method_not_allowed")
        assert await client.is_closed()


# -- all bodies together --------------------------------------------------------------------------

LARGE = QUESTION + b" " * (4 * SMALL_BODY_BYTES - len(QUESTION))


async def test_announced_bodies_reserve_no_memory_and_small_ones_are_accepted() -> None:
    async with site() as here, contextlib.AsyncExitStack() as stack:
        here.app.state.bodies = budget = BodyBudget(len(LARGE))
        for _ in range(3):
            waiting = await stack.enter_async_context(here.client())
            waiting.post(LARGE, sent=10)
        await until(lambda: len(here.connections.connections) == 3)
        async with here.client() as client:
            client.post(LARGE)
            assert (await client.answer()).status == 200
            client.post()
            assert (await client.answer()).status == 200
        assert budget.num_free == len(LARGE)


async def test_the_slowest_body_is_dropped_to_make_room_for_faster_ones() -> None:
    now = 0.0
    half = chunk(LARGE[: len(LARGE) // 2])
    async with site() as here, here.client() as slow, here.client() as fast:
        here.app.state.bodies = budget = BodyBudget(len(LARGE), lambda: now)
        slow.send(CHUNKED, half)
        await until(lambda: budget.num_free == len(LARGE) // 2)
        now = 60.0
        async with here.client() as small:
            small.post()
            assert (await small.answer()).status == 200
        fast.post(LARGE)
        assert (await fast.answer()).status == 200
        refused = await slow.answer()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.error["code"] == "too_many_large_bodies"
        assert refused.error["type"] == "rate_limit_error"
        assert budget.num_free == len(LARGE)
        # A newcomer that is slower than those that are there is refused itself.
        async with here.client() as first, here.client() as second:
            now = 100.0
            first.send(CHUNKED, half)
            await until(lambda: budget.num_free == len(LARGE) // 2)
            second.post(LARGE, sent=SMALL_BODY_BYTES + 1)
            await until(lambda: budget.num_free < len(LARGE) // 2)
            now = 101.0
            second.send(LARGE[SMALL_BODY_BYTES + 1 :])
            assert (await first.answer()).status == 429
            assert (await second.answer()).status == 200
        await until(lambda: budget.num_free == len(LARGE))


async def test_the_body_of_a_disconnected_client_is_not_counted() -> None:
    async with site() as here:
        here.app.state.bodies = budget = BodyBudget(len(LARGE))
        async with here.client() as other:
            other.send(CHUNKED, chunk(LARGE))
            await until(lambda: budget.num_free == 0)
        await until(lambda: budget.num_free == len(LARGE))


# -- all connections together ---------------------------------------------------------------------


async def test_silent_connections_are_closed_to_make_room_and_busy_ones_stay() -> None:
    engine = FakeEngine(answer_length=5)
    engine.gate.clear()
    async with site(engine, max_open=4) as here, contextlib.AsyncExitStack() as stack:
        connections = here.connections.connections

        async def opened() -> Client:
            before = set(connections)
            client = await stack.enter_async_context(here.client())
            await until(lambda: bool(set(connections) - before))
            return client

        busy = [await opened() for _ in range(2)]
        for client in busy:
            client.post(json.dumps({"messages": HELLO, "stream": True}).encode())
        await until(lambda: len(engine.running) == 2)
        idle = await opened()
        idle.send(GET, b"\r\n")
        await idle.answer()
        silent = await opened()

        new = [await opened()]
        assert await silent.is_closed()
        new[0].send(GET, b"\r\n")
        assert (await new[0].answer()).status == 200
        new.append(await opened())
        assert await idle.is_closed()
        for client in new:
            client.post()
        await until(lambda: len(engine.running) == 4)

        late = await stack.enter_async_context(here.client())
        assert await late.is_closed()
        engine.gate.set()
        for client in (*busy, *new):
            assert (await client.answer()).status == 200


FEW_FILES = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_silent_connections_beyond_the_file_limit_do_not_lock_others_out(
    scheme: str, port: int
) -> None:
    raise_file_limit()
    certificate = {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY} if scheme == "https" else {}
    options = json.dumps({"port": port, **certificate})
    with (
        running("-c", FEW_FILES, str(FAKE_SERVER), "{}", options) as process,
        httpx.Client(
            base_url=f"{scheme}://127.0.0.1:{port}",
            verify=ssl.create_default_context(cafile=CERTIFICATE),
        ) as http,
    ):
        wait_for_serving(process)
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert http.get("/version").status_code == 200
            assert process.stderr is not None
            line = next(line for line in process.stderr if "Closed " in line)
    assert "connections without a request" in line and "ulimit -n" in line


def wait_for_serving(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    next(line for line in process.stderr if "Serving" in line)


# -- HTTP/1.0 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_answers_are_not_chunked(stream: bool) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 3, "stream": stream, "seed": 0}).encode()
    async with site() as here, here.client() as client:
        client.send(
            f"POST {CHAT} HTTP/1.0\r\ncontent-type: application/json\r\n".encode(),
            b"content-length: %d\r\n\r\n" % len(body),
            body,
        )
        answer = await client.answer()
        assert answer.status == 200
        assert "transfer-encoding" not in answer.headers
        assert answer.headers["connection"] == "close"
        if stream:
            events = answer.body.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            assert all(event.startswith("data: ") for event in events[:-1])
        else:
            assert json.loads(answer.body)["choices"][0]["message"]["content"] == LETTERS[:3]
        assert await client.is_closed()


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/metrics"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_http_1_0_is_answered_by_every_endpoint(path: str, method: str) -> None:
    async with site() as here:
        answers = []
        for version in ("1.0", "1.1"):
            async with here.client() as client:
                client.send(f"{method} {path} HTTP/{version}\r\nconnection: close\r\n\r\n".encode())
                head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
                answers.append((head.split()[1], bool(body)))
        assert answers[0] == answers[1]
