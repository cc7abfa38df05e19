"""The server under load: who waits for whom, who may leave when, and what it costs the others.

Steps end when a test says so, so that nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from support.gated_runner import EOS, VOCAB, Gated, asking, gated_server, served
from support.waiting import until

from minisgl.bench.online.client import RecordedAnswer, post
from minisgl.client.address import Address
from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.fanout import CONSUMERS_PER_TURN, Fanout
from minisgl.engine.stream import OutputStream
from minisgl.request import FinishReason, Request, SamplingParams
from minisgl.server.http.connection import MAX_UNSENT_BYTES, WANTED_FILES, raise_file_limit
from minisgl.text.detokenizer import Detokenizer

COMPLETIONS = "/v1/completions"


async def ask(gated: Gated, body: bytes) -> RecordedAnswer:
    return await post(Address("http", "127.0.0.1", gated.port, COMPLETIONS), body)


def choices(answer: RecordedAnswer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.rest
    assert answer.done, "no [DONE]"
    return [choice for _, chunk in answer.chunks() for choice in chunk["choices"]]


def text(answer: RecordedAnswer) -> str:
    """The text of an answer that has exactly one finish reason."""
    endings = [choice["finish_reason"] for choice in choices(answer)]
    assert endings[-1] in ("stop", "length") and endings.count(None) == len(endings) - 1
    return "".join(choice["text"] for choice in choices(answer))


class Reader:
    """A client that reads when it is told to, if ever."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream

    async def until(self, part: bytes) -> bytes:
        """Reads until the received bytes contain `part`."""
        loop, received = asyncio.get_running_loop(), b""
        while part not in received and (data := await loop.sock_recv(self.stream, 1 << 16)):
            received += data
        assert part in received
        return received


@contextlib.asynccontextmanager
async def connected(gated: Gated, body: bytes) -> AsyncIterator[Reader]:
    """A client that has sent its request, and whose kernel takes little that it does not read."""
    loop = asyncio.get_running_loop()
    with socket.socket() as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.setblocking(False)
        await loop.sock_connect(stream, ("127.0.0.1", gated.port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(stream, head.encode() + body)
        yield Reader(stream)


# -- the engine goes first -------------------------------------------------------------------------


class Writes:
    """Around the application: calls `at_write` for each event with text before it goes out."""

    def __init__(self) -> None:
        self.at_write: Callable[[], None] = lambda: None
        self.count = 0

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            async def sending(message: Message) -> None:
                if b'"text"' in message.get("body", b""):
                    self.count += 1
                    self.at_write()
                await send(message)

            await app(scope, receive, sending)

        return wrapped


@pytest.mark.parametrize(("overlap", "ahead"), [(True, 2), (False, 1)])
async def test_the_next_step_is_launched_before_chunks_are_written(
    overlap: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, launched_at_write, launched_at_decode = Writes(), [], []
    async with gated_server(overlap=overlap, wrap=writes.wrap) as gated:
        writes.at_write = lambda: launched_at_write.append(len(gated.runner.launched))
        decode = Detokenizer.push

        def recorded(detokenizer: Detokenizer, token_id: int) -> str:
            launched_at_decode.append(len(gated.runner.launched))
            return decode(detokenizer, token_id)

        monkeypatch.setattr(Detokenizer, "push", recorded)
        gated.runner.close_gate()
        asked = asyncio.ensure_future(ask(gated, asking([5, 6], 8)))
        for step in range(1, 9):
            gated.runner.step()
            await until(lambda step=step: writes.count == step)
        assert text(await asked) == gated.text([5, 6], 8)
    # When the token of step n becomes text, the steps after it are launched, as many as may be.
    assert launched_at_decode == [min(step + ahead, 8) for step in range(1, 9)]
    assert launched_at_write == launched_at_decode


class Consumer:
    def __init__(self, log: list[object], name: int) -> None:
        self.log = log
        self.name = name

    def notify(self) -> None:
        self.log.append(self.name)


async def test_collecting_a_step_waits_for_few_writes() -> None:
    loop, log = asyncio.get_running_loop(), []
    fanout = Fanout(loop)
    consumers = [Consumer(log, name) for name in range(100)]
    for consumer in consumers:
        fanout.add(consumer)
    await asyncio.sleep(0)  # the first of them are told
    loop.call_soon_threadsafe(log.append, "a step has ended")
    fanout.add(consumers[99])  # due already: keeps its place, and is told once
    await until(lambda: len(log) == 101)
    assert log.index("a step has ended") <= 2 * CONSUMERS_PER_TURN
    assert [entry for entry in log if isinstance(entry, int)] == list(range(100))


async def test_events_hold_one_token_unless_the_loop_falls_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes, ended = Writes(), []
    loop = asyncio.get_running_loop()
    tell = loop.call_soon_threadsafe

    def counted(*call: Any) -> asyncio.Handle:
        handle = tell(*call)
        ended.append(call)
        return handle

    async with gated_server(wrap=writes.wrap) as gated:
        runner = gated.runner
        runner.close_gate()
        asked = asyncio.ensure_future(ask(gated, asking([5, 6], 10)))
        for step in range(1, 6):
            runner.step()
            await until(lambda step=step: writes.count == step)
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        runner.step()
        runner.step()
        while len(ended) < 2:  # the loop is busy until it has been told of both steps
            pass
        await until(lambda: writes.count == 6)
        runner.open()
        pieces = [choice["text"] for choice in choices(await asked)]
        whole = gated.text([5, 6], 10)
    assert "".join(pieces) == whole
    assert pieces[:6] == [*whole[:5], whole[5:7]]


async def test_a_consumer_is_woken_only_for_new_output() -> None:
    request = Request("a", [1], SamplingParams(), max_tokens=9, seed=0)
    stream = OutputStream(request, None, lambda _: None)

    def token_came() -> None:
        request.token_ids.append(5)
        stream.changed = True

    taking = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    token_came()
    stream.notify()
    token_came()  # before the consumer runs, so that it takes both
    assert (await taking).token_ids == [5, 5]
    taking = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.notify()  # of the second
    await asyncio.sleep(0)
    assert not taking.done()
    token_came()
    stream.notify()
    assert (await taking).token_ids == [5]


# -- readers ---------------------------------------------------------------------------------------


async def test_a_client_that_stops_reading_slows_no_other_and_its_buffer_is_bounded() -> None:
    num_tokens = 1500
    async with gated_server() as gated:
        async with connected(gated, asking([7], num_tokens, logprobs=20)) as slow:
            await slow.until(b"HTTP/1.1 200")
            others = [ask(gated, asking([8 + n, 9], num_tokens)) for n in range(8)]
            answers = await asyncio.gather(*others)
            expected = [gated.text([8 + n, 9], num_tokens) for n in range(8)]
            assert [text(answer) for answer in answers] == expected
            # The slow one's request has ended too, for no writer waits in the engine.
            await until(lambda: gated.engine.stats().num_running == 0)
            [connection] = gated.server.server_state.connections
            event = max(len(event) for event in answers[0].events)
            waiting = connection.transport.get_write_buffer_size()
            assert 0 < waiting <= MAX_UNSENT_BYTES + 20 * event
            received = await slow.until(b"[DONE]")
        assert received.count(b'"finish_reason":"length"') == 1
        texts = received.split(b'"text":"')[1:]
        assert len(texts) < num_tokens / 2, "what it did not read in time was not merged"


@pytest.mark.parametrize("how", ["closes", "ends its half"])
async def test_a_client_that_disconnects_during_a_send_is_aborted(how: str) -> None:
    async with gated_server() as gated:
        gated.runner.close_gate()
        async with connected(gated, asking([7], 1900, logprobs=0)) as slow:
            await slow.until(b"HTTP/1.1 200")
            [connection] = gated.server.server_state.connections
            while not connection.flow.write_paused:
                await one_step(gated)
            assert gated.engine.stats().num_running == 1
            if how == "ends its half":
                slow.stream.shutdown(socket.SHUT_WR)
            else:
                slow.stream.close()
            # No step ends meanwhile, so nothing but the connection can tell.
            await until(lambda: gated.engine.stats().num_running == 0)
        assert gated.engine.stats().num_used_pages == 0
        gated.runner.open()


# -- clients that leave (complaint 2) --------------------------------------------------------------


async def one_step(gated: Gated) -> None:
    """Let a step end; returns when the engine has taken its tokens and launched another one."""
    count = len(gated.runner.launched)
    gated.runner.step()
    await until(lambda: len(gated.runner.launched) > count)


def requests_of(gated: Gated) -> dict[int, Request]:
    """The running and queued requests, by the first token of their prompt."""
    streams = gated.engine._delivery.streams.values()
    return {stream.request.token_ids[0]: stream.request for stream in streams}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["queue", "prefill", "decode"])
async def test_a_client_may_disconnect_at_any_moment(moment: str, stream: bool) -> None:
    async with gated_server(max_prefill_length=9, max_running_requests=2) as gated:
        engine, runner = gated.engine, gated.runner
        runner.close_gate()
        stays = asyncio.ensure_future(ask(gated, asking([5, 6], 40)))
        await until(lambda: len(runner.launched) == 2)
        if moment == "queue":
            fills = asyncio.ensure_future(ask(gated, asking([4], 40)))
            await until(lambda: engine.stats().num_queued == 1)
        length = 60 if moment == "prefill" else 1
        async with connected(gated, asking([9] * length, 30, stream=stream)) as leaving:
            await until(lambda: 9 in requests_of(gated))
            gone = requests_of(gated)[9]
            for _ in range(0 if moment == "queue" else 3):
                await one_step(gated)
            slots = {join.slot for plan in runner.launched for join in plan.joins}
            used, count = engine.stats().num_used_pages, len(runner.launched)
            leaving.stream.close()
            # With the gate closed: not when the next token comes, but when the client goes.
            await until(lambda: gone.finished)
        assert gone.finish_reason is FinishReason.ABORT
        if moment == "queue":
            assert not gone.output_token_ids
        elif moment == "prefill":
            assert gone.num_output_tokens == 0 and len(slots) == 2
        else:
            assert gone.num_output_tokens > 0
        if moment != "queue":
            assert engine.stats().num_used_pages < used
        runner.open()
        assert text(await stays) == gated.text([5, 6], 40)
        if moment == "queue":
            assert text(await fills) == gated.text([4], 40)
        else:
            [slot] = slots - {runner.launched[0].joins[0].slot}
            for plan in runner.launched[count:]:
                assert slot not in plan.decode_slots
                assert slot not in {chunk.slot for chunk in plan.chunks}


async def test_a_client_may_disconnect_while_the_step_with_its_eos_runs() -> None:
    async with gated_server() as gated:
        runner = gated.runner
        prompt, end = next(
            ([n], len(answer))
            for n in range(3, VOCAB)
            if 3 < len(answer := gated.text([n], 30, eos=True)) < 29
        )
        runner.close_gate()
        stays = asyncio.ensure_future(ask(gated, asking([5, 6], 60)))
        await until(lambda: len(runner.launched) == 2)
        async with connected(gated, asking(prompt, 40, ignore_eos=False)) as leaving:
            await until(lambda: prompt[0] in requests_of(gated))
            gone = requests_of(gated)[prompt[0]]
            while gone.num_output_tokens < end:
                await one_step(gated)
            leaving.stream.close()  # its EOS is on the way
            await until(lambda: gone.finished)
        assert gone.finish_reason is FinishReason.ABORT
        tokens = gone.output_token_ids
        runner.open()
        assert text(await stays) == gated.text([5, 6], 60)
        assert gone.output_token_ids == tokens and EOS not in tokens
        assert gone.finish_reason is FinishReason.ABORT


# -- many ------------------------------------------------------------------------------------------


async def test_1000_concurrent_streams_get_their_own_tokens() -> None:
    """Complaint 2, 5 and 13 in passing: every token depends on every page in front of it."""
    num_clients, num_tokens = 1000, 12
    raise_file_limit()
    async with gated_server(max_running_requests=num_clients, num_pages=9000) as gated:
        gated.runner.close_gate()
        prompts = [[3 + n % 70, 3 + n // 70, *range(n % 6)] for n in range(num_clients)]
        asked = [
            asyncio.ensure_future(ask(gated, asking(prompt, num_tokens))) for prompt in prompts
        ]
        await until(lambda: len(gated.engine._delivery.streams) == num_clients)
        assert len(gated.server.server_state.connections) == num_clients
        gated.runner.open()
        answers = await asyncio.gather(*asked)
        assert max(len(plan.decode_slots) for plan in gated.runner.launched) == num_clients
        for prompt, answer in zip(prompts, answers, strict=True):
            assert text(answer) == gated.text(prompt, num_tokens)


async def test_requests_beyond_the_queue_limit_are_refused() -> None:
    async with gated_server(max_running_requests=1, max_queued_requests=3) as gated:
        gated.runner.close_gate()
        first = asyncio.ensure_future(ask(gated, asking([5], 10)))
        await until(lambda: gated.engine.stats().num_running == 1)
        waiting = [asyncio.ensure_future(ask(gated, asking([6 + n], 10))) for n in range(3)]
        await until(lambda: gated.engine.stats().num_queued == 3)
        refused = await asyncio.gather(*[ask(gated, asking([9], 10)) for _ in range(20)])
        for answer in refused:
            assert answer.status == 429
            assert json.loads(answer.rest)["error"]["type"] == "rate_limit_error"
        gated.runner.open()
        texts = [text(answer) for answer in await asyncio.gather(first, *waiting)]
        assert texts == [gated.text([5 + n], 10) for n in range(4)]


async def test_retraction_under_load_does_not_change_the_answers() -> None:
    """Complaint 21: few pages and long answers; all finish, as they would alone."""
    async with gated_server(num_pages=60, schedule_conservativeness=0.01) as gated:
        prompts = [[3 + n, *range(n % 5)] for n in range(40)]
        gated.runner.close_gate()
        asked = [asyncio.ensure_future(ask(gated, asking(prompt, 60))) for prompt in prompts]
        await until(lambda: len(gated.engine._delivery.streams) == len(prompts))
        gated.runner.open()
        answers = await asyncio.gather(*asked)
        assert gated.engine.stats().counters.num_retractions > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert text(answer) == gated.text(prompt, 60)


async def test_retraction_with_a_real_model_does_not_change_the_answers() -> None:
    few: dict[str, Any] = {"num_pages": 40, "page_size": 4, "schedule_conservativeness": 0.01}
    config = EngineConfig(device="cpu", cache_type="naive", max_seq_len_override=128, **few)
    async with await AsyncEngine.start(config) as engine, served(engine) as (_, port):
        assert engine.tokenizer is not None
        questions = [f"What is {n} + {2 * n}?" for n in range(11, 19)]
        bodies = [
            asking(
                engine.tokenizer.chat([{"role": "user", "content": question}]), 30, temperature=0
            )
            for question in questions
        ]

        async def answer(body: bytes) -> str:
            return text(await post(Address("http", "127.0.0.1", port, COMPLETIONS), body))

        unloaded = [await answer(body) for body in bodies]
        assert engine.stats().counters.num_retractions == 0
        assert await asyncio.gather(*map(answer, bodies)) == unloaded
        assert engine.stats().counters.num_retractions > 0
        assert len(set(unloaded)) == len(questions)


async def test_a_seed_gives_the_same_answer_alone_and_under_load() -> None:
    """Complaint 7."""
    async with gated_server() as gated:
        alone = await ask(gated, asking([5, 6], 30, seed=11, temperature=0.8))
        others = [ask(gated, asking([n], 30, seed=n, temperature=0.8)) for n in range(3, 30)]
        company, *_ = await asyncio.gather(
            ask(gated, asking([5, 6], 30, seed=11, temperature=0.8)), *others
        )
        assert text(alone) == text(company) == gated.text([5, 6], 30, seed=11)


# -- files -----------------------------------------------------------------------------------------


def test_the_open_file_limit_is_raised_where_allowed() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource as r; from minisgl.server.http.connection import raise_file_limit as up;"
        "low = lambda: r.getrlimit(r.RLIMIT_NOFILE)[0];"
        f"r.setrlimit(r.RLIMIT_NOFILE, (64, {hard})); print(up(), low());"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 128)); print(up(), low())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    assert done.stdout.split() == [str(allowed), str(allowed), "128", "128"]
