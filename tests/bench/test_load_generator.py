"""The load generator of `bench serve`: parsing of SSE bytes in any pieces, and its records."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gated_runner import gated_server

from minisgl.bench.offline_run import RequestRecord
from minisgl.bench.online.client import RecordedAnswer, post
from minisgl.bench.online.run import OnlineRun, StreamedRequest, run_online
from minisgl.bench.online.target import Endpoint
from minisgl.bench.workload.requests import ScheduledRequest
from minisgl.client.address import Address

EVENTS = [b'data: {"n":1}', b": ping", 'data: {"n":"\u00e9"}'.encode(), b"data: [DONE]"]
STREAM = b"".join(event + b"\n\n" for event in EVENTS)


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[int]:
    """A server that writes these bytes, each by itself, and hangs up; gives its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def answer_to(*pieces: bytes) -> RecordedAnswer:
    async with answering(*pieces) as port:
        return await post(Address("http", "127.0.0.1", port, "/x"), b"{}")


def chunked(body: bytes, cuts: list[int]) -> bytes:
    bounds = sorted({0, len(body), *cuts})
    parts = [body[a:b] for a, b in pairwise(bounds)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@given(
    cuts=st.lists(st.integers(1, len(STREAM) - 1)),
    breaks=st.lists(st.integers(1, len(STREAM)), max_size=8),
)
def test_events_are_parsed_the_same_however_the_bytes_are_split(
    cuts: list[int], breaks: list[int]
) -> None:
    data = chunked(STREAM, cuts)
    bounds = sorted({0, len(data), *breaks})
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    answer = asyncio.run(answer_to(*pieces))
    assert answer.events == EVENTS
    assert len(answer.times) == len(EVENTS) and answer.times == sorted(answer.times)
    assert answer.sent <= answer.times[0]
    assert [chunk for _, chunk in answer.chunks()] == [{"n": 1}, {"n": "é"}]
    assert answer.done


@given(breaks=st.lists(st.integers(1, len(STREAM) + 3), max_size=8))
def test_lines_may_end_in_crlf(breaks: list[int]) -> None:
    data = STREAM.replace(b"\n", b"\r\n")
    bounds = sorted({0, len(data), *breaks})
    head = b"HTTP/1.0 200 OK\r\nContent-Type:text/event-stream\r\n\r\n"
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    answer = asyncio.run(answer_to(head, *pieces))  # up to the end of the connection
    assert answer.events == EVENTS and answer.done


async def test_interim_responses_chunk_extensions_and_sse_comments_are_ignored() -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding:Chunked\r\n\r\n"
    events = b': hi\nevent: chunk\nid: 7\ndata:{"n":1}\n\ndata:[DONE]\n\n'
    chunk = b"%X;name=value\r\n%s\r\n" % (len(events), events)
    answer = await answer_to(head, chunk, b"0\r\nTrailer: x\r\n\r\n")
    assert [chunk for _, chunk in answer.chunks()] == [{"n": 1}]
    assert (answer.status, answer.done) == (200, True)


async def test_an_answer_that_is_not_streamed_is_read_whole() -> None:
    answer = await answer_to(b"HTTP/1.1 404 Not Found\r\ncontent-length: 6\r\n\r\nno", b"pe\n\n")
    assert (answer.status, answer.done) == (404, False)
    assert b"".join([*answer.events, answer.rest]) == b"nope"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nwhat\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
async def test_invalid_answers_are_errors_and_do_not_hang(data: bytes) -> None:
    with pytest.raises(ConnectionError):
        await answer_to(data)


async def test_a_run_counts_tokens_and_events() -> None:
    async with gated_server() as served:
        target = Endpoint(url=f"http://127.0.0.1:{served.port}/v1")
        schedule = [
            ScheduledRequest(prompt=[5, 6, n], max_tokens=20 + n, seed=n) for n in range(3, 9)
        ]
        run = await run_online(target, schedule)
        assert not run.failures
        for asked, request in zip(schedule, run.requests, strict=True):
            record = request.record
            assert record.num_output_tokens == asked.max_tokens
            assert record.num_prompt_tokens == 3
            assert 0 <= record.submitted_s <= record.first_token_s <= record.last_token_s
            assert len(request.itls_s) == len(request.times_s) - 1
        assert run.num_output_tokens == sum(20 + n for n in range(3, 9))
        assert run.elapsed_s > 0
        too_long = ScheduledRequest(prompt=[5], max_tokens=100_000, seed=0)
        run = await run_online(target, [*schedule, too_long])
        assert len(run.requests) == len(schedule)
        [reason] = run.failures
        assert re.search(r"400: .*100000", reason)
    async with answering(b"") as port:
        run = await run_online(Endpoint(url=f"http://127.0.0.1:{port}/v1"), schedule)
    assert run.failures == {"the server closed the connection without an answer": len(schedule)}


@pytest.mark.parametrize(("num_events", "share"), [(10, 1.0), (8, 0.75), (4, 0.0)])
def test_the_fraction_of_one_token_events_is_not_overstated(num_events: int, share: float) -> None:
    times_s = [float(n) for n in range(num_events)]
    record = RequestRecord(
        submitted_s=0.0,
        first_token_s=times_s[0],
        last_token_s=times_s[-1],
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=10,
    )
    request = StreamedRequest(record=record, times_s=times_s)
    assert OnlineRun([request]).single_share == share
