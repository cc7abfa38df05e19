"""A connection to a replica that writes what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.waiting import until

from minisgl.router.exchange import EngineLostError
from minisgl.router.forward import ReplicaLostError, last_events
from minisgl.router.upstream import Upstream

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b"b\r\ndata: {1}\n\n\r\n", b"b\r\ndata: {2}\n\n\r\n"
END = b"0\r\n\r\n"


@dataclass
class Written:
    """A client's connection, with all that is written to it."""

    pieces: list[bytes] = field(default_factory=list)
    write_paused: bool = False
    has_gone: bool = False

    def is_closing(self) -> bool:
        return self.has_gone

    @property
    def transport(self) -> Written:
        return self

    @property
    def flow(self) -> Written:
        return self

    def write(self, data: bytes) -> None:
        if self.has_gone:
            raise RuntimeError("unable to perform operation; the handler is closed")  # as uvloop
        self.pieces.append(data)


@contextlib.asynccontextmanager
async def asked(folder: Path) -> AsyncIterator[tuple[Upstream, asyncio.StreamWriter]]:
    """A connection, and what the replica at its other end writes to."""
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    path = str(folder / "replica.sock")
    server = await asyncio.start_unix_server(lambda _, writer: accepted.set_result(writer), path)
    _, upstream = await asyncio.get_running_loop().create_unix_connection(Upstream, path)
    writer = await accepted
    yield upstream, writer
    upstream.abort()
    writer.close()
    server.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("size", [1, 3, 7, 16, 17, 1000])
async def test_a_stream_in_pieces_of_any_size_is_passed_on_in_whole_events(
    size: int, tmp_path: Path
) -> None:
    client: Written = Written()
    async with asked(tmp_path) as (upstream, replica):
        head = upstream.ask(b"GET", relays=True)
        stream = HEAD + b"".join(EVENTS) + END
        for start in range(0, len(stream), size):
            replica.write(stream[start : start + size])
            await asyncio.sleep(0.001)
        assert (await head).is_stream
        await upstream.relay(client)  # type: ignore[arg-type]
        assert b"".join(client.pieces) == b"".join(EVENTS)
        assert upstream.is_free
        # The connection takes another request.
        head = upstream.ask(b"GET", relays=True)
        replica.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 4\r\n\r\nwhy?")
        assert (await head).status == 400
        assert [piece async for piece in upstream.pieces()] == [b"why?"]


async def test_events_read_together_are_one_write_and_half_an_event_is_never_written(
    tmp_path: Path,
) -> None:
    client: Written = Written()
    async with asked(tmp_path) as (upstream, replica):
        head = upstream.ask(b"GET", relays=True)
        replica.write(HEAD)
        await head
        ended = upstream.relay(client)  # type: ignore[arg-type]
        replica.write(EVENTS[0] + EVENTS[1])
        await asyncio.sleep(0.01)
        replica.write(EVENTS[0] + EVENTS[1][:-4])
        await asyncio.sleep(0.01)
        replica.transport.abort()
        with pytest.raises(EngineLostError):
            await ended
    assert client.pieces == [EVENTS[0] + EVENTS[1], EVENTS[0]]
    assert upstream.last_relayed == EVENTS[0] and not upstream.is_free


async def test_reading_stops_while_the_client_takes_nothing(tmp_path: Path) -> None:
    client: Written = Written(write_paused=True)
    async with asked(tmp_path) as (upstream, replica):
        head = upstream.ask(b"GET", relays=True)
        replica.write(HEAD)
        await head
        ended = upstream.relay(client)  # type: ignore[arg-type]
        replica.write(EVENTS[0])
        await asyncio.sleep(0.01)
        replica.write(EVENTS[1] + END)
        await asyncio.sleep(0.01)
        assert client.pieces == [EVENTS[0]]
        client.write_paused = False
        upstream.resume()
        await ended
    assert client.pieces == [*EVENTS]


async def test_nothing_is_written_to_a_client_that_has_gone(tmp_path: Path) -> None:
    client: Written = Written()
    async with asked(tmp_path) as (upstream, replica):
        head = upstream.ask(b"GET", relays=True)
        replica.write(HEAD)
        await head
        ended = upstream.relay(client)  # type: ignore[arg-type]
        replica.write(EVENTS[0])
        await until(lambda: client.pieces)
        client.has_gone = True
        replica.write(EVENTS[1] + EVENTS[0][:5])
        replica.write(EVENTS[0][5:] + END)
        await ended
        assert client.pieces == [EVENTS[0]] and upstream.is_free


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n", b"hello\r\n\r\n"])
async def test_a_replica_that_ends_or_speaks_no_http_is_lost(said: bytes, tmp_path: Path) -> None:
    async with asked(tmp_path) as (upstream, replica):
        head = upstream.ask(b"GET", relays=True)
        replica.write(said)
        await asyncio.sleep(0.01)
        replica.close()
        with pytest.raises(EngineLostError):
            await head


@pytest.mark.parametrize(
    ("path", "events"),
    [
        ("/v1/chat/completions", (b'data: {"error":{"message":"', b"data: [DONE]\n\n")),
        (
            "/v1/messages",
            (b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"',),
        ),
        ("/v1/responses", (b'event: error\ndata: {"type":"error","code":"replica_lost"',)),
    ],
)
def test_a_broken_stream_ends_in_the_form_of_its_api(path: str, events: tuple[bytes, ...]) -> None:
    scope = {"path": path, "state": {"request_id": "id"}}
    last = last_events(scope, ReplicaLostError(), b"")
    assert last.startswith(events[0]) and last.endswith(b"\n\n")
    assert last.endswith(events[-1]) or len(events) == 1


@pytest.mark.parametrize(
    ("sent", "number"),
    [
        (b"", 0),
        (b'data: {"delta":"x","sequence_number":9}\n\n', 10),
        (b'data: {"sequence_number":1}\n\n\r\n29\r\ndata: {"sequence_number":12}\n\n\r\n', 13),
        (b'data: {"sequence_number":3,"delta":"\\"sequence_number\\":7}"}\n\n', 0),  # not ours
    ],
)
def test_the_error_of_a_response_has_the_number_that_follows(sent: bytes, number: int) -> None:
    for path in ("/v1/responses", "/v1/responses/resp_1"):
        scope = {"path": path, "state": {"request_id": "id"}}
        last = last_events(scope, ReplicaLostError(), sent)
        assert json.loads(last.partition(b"data: ")[2])["sequence_number"] == number
