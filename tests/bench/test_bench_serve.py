"""The load generator: what it makes of bytes in any pieces, and the scripts around it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from dummy_tokenizer import make_tokenizer, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from support.folders import SCRIPTS
from support.gated_runner import gated_server

from minisgl.bench.online.client import RecordedAnswer, post
from minisgl.bench.online.run import OnlineRun, OnlineRunError, StreamedRequest, run_online
from minisgl.bench.online.target import Endpoint
from minisgl.bench.workload.schedule import ScheduledRequest
from minisgl.text.tokenizer import Tokenizer

BENCH_SCRIPTS = SCRIPTS / "bench"
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
        return await post("127.0.0.1", port, "/x", b"{}")


def chunked(body: bytes, cuts: list[int]) -> bytes:
    bounds = sorted({0, len(body), *cuts})
    parts = [body[a:b] for a, b in pairwise(bounds)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@given(
    cuts=st.lists(st.integers(1, len(STREAM) - 1)),
    breaks=st.lists(st.integers(1, len(STREAM)), max_size=8),
)
def test_events_are_the_same_however_they_are_cut(cuts: list[int], breaks: list[int]) -> None:
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


async def test_what_other_servers_put_around_events() -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding:Chunked\r\n\r\n"
    events = b': hi\nevent: chunk\nid: 7\ndata:{"n":1}\n\ndata:[DONE]\n\n'
    chunk = b"%X;name=value\r\n%s\r\n" % (len(events), events)
    answer = await answer_to(head, chunk, b"0\r\nTrailer: x\r\n\r\n")
    assert [chunk for _, chunk in answer.chunks()] == [{"n": 1}]
    assert (answer.status, answer.done) == (200, True)


async def test_an_answer_that_is_not_streamed() -> None:
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
async def test_what_is_no_answer_is_an_error_and_no_hang(data: bytes) -> None:
    with pytest.raises(ConnectionError):
        await answer_to(data)


async def test_a_run_counts_tokens_and_events() -> None:
    async with gated_server() as served:
        target = Endpoint(url=f"http://127.0.0.1:{served.port}/v1")
        schedule = [
            ScheduledRequest(prompt=[5, 6, n], max_tokens=20 + n, seed=n) for n in range(3, 9)
        ]
        run = await run_online(target, schedule)
        run.require_all()
        for asked, request in zip(schedule, run.requests, strict=True):
            assert request.num_output_tokens == asked.max_tokens
            assert request.num_prompt_tokens == 3
            assert 0 <= request.sent_s <= request.times_s[0] <= request.times_s[-1]
            assert len(request.itls_s) == len(request.times_s) - 1
        assert run.num_output_tokens == sum(20 + n for n in range(3, 9))
        assert run.elapsed_s > 0
        too_long = ScheduledRequest(prompt=[5], max_tokens=100_000, seed=0)
        run = await run_online(target, [*schedule, too_long])
        assert len(run.requests) == len(schedule)
        with pytest.raises(OnlineRunError, match=r"400: .*100000"):
            run.require_all()
    async with answering(b"") as port:
        run = await run_online(Endpoint(url=f"http://127.0.0.1:{port}/v1"), schedule)
    assert run.failures == {"the server closed the connection without an answer": len(schedule)}


@pytest.mark.parametrize(("num_events", "share"), [(10, 1.0), (8, 0.75), (4, 0.0)])
def test_the_share_of_events_with_one_token_is_not_overstated(
    num_events: int, share: float
) -> None:
    request = StreamedRequest(
        sent_s=0.0,
        times_s=[float(n) for n in range(num_events)],
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=10,
    )
    assert OnlineRun([request]).single_share == share


# -- the scripts ----------------------------------------------------------------------------------


def run_script(name: str, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH_SCRIPTS / name), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("clock", [("--step-ms", 2), ()])
def test_the_benchmark_of_the_server_compares_it_with_the_engine(clock: tuple[object, ...]) -> None:
    options = ("--num", 6, "--input", 5, 9, "--output", 10, 12, "--repeat", 1)
    done = run_script("bench_serve.py", "--device", "cpu", "--num-pages", 300, *options, *clock)
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 requests, 5 to 9 tokens in, 10 to 12 out, all at once" in done.stdout
    assert ("a clock takes the place of the model: 2 ms a step" in done.stdout) == bool(clock)
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line[0] == "│"]
    figures = {name.strip(): float(value.strip(" %").replace(",", "")) for name, value in rows}
    ratio = 100 * figures["served tok/s"] / figures["offline tok/s"]
    assert figures["served / offline"] == pytest.approx(ratio, rel=0.01)
    assert 0 < figures["ITL p50 ms"] <= figures["ITL p99 ms"]
    assert 0 < figures["TTFT p50 ms"] <= figures["TTFT p99 ms"]
    assert 0 <= figures["one token"] <= 100


def test_the_benchmark_of_the_server_passes_on_why_the_engine_does_not_start() -> None:
    done = run_script("bench_serve.py", "/no/such/folder", "--num", 1)
    assert done.returncode == 2
    assert done.stderr.startswith("bench_serve.py: ") and "/no/such/folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_short_soak_leaves_nothing_behind() -> None:
    done = run_script("soak.py", "--minutes", 0.05)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "passed"
    assert "Traceback" not in done.stderr


# -- the tokenizer for folders without one --------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [259, 300, 5000])
def test_a_dummy_tokenizer_has_the_size_and_reads_any_text(tmp_path: Path, vocab_size: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.eos_token_id == vocab_size - 1
    text = "some words, Ünïcode, 漢字 and\na line"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert len(token_ids) < len(text.encode()) or vocab_size == 259
    assert tokenizer.chat([{"role": "user", "content": "hi"}])
    spelled = [tokenizer.token_text(token_id) for token_id in range(vocab_size)]
    assert sum("�" in text for text in spelled) == 128


def test_a_dummy_tokenizer_is_never_smaller_than_its_bytes() -> None:
    with pytest.raises(ValueError, match="259 is the least"):
        make_tokenizer(258)
