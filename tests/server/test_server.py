"""Answers, errors and disconnects over real sockets, with the usual clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from support.fake_engine import LETTERS, FakeEngine, FakeStream, FakeTokenizer
from support.http_server import (
    HELLO,
    error_of,
    http_client,
    server_on,
    serving,
)
from support.waiting import until

from minisgl import __version__
from minisgl.engine.turns import MAX_TURN_S
from minisgl.errors import StepError
from minisgl.server.answers.delivery import MANY_SCORED
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.http.bodies import MAX_BODY_BYTES


@contextlib.asynccontextmanager
async def openai_client(engine: FakeEngine, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(engine, **options) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


# -- answers --------------------------------------------------------------------------------------


async def test_chat_whole_and_streamed_agree() -> None:
    async with openai_client(FakeEngine(answer_length=10)) as client:
        whole = await client.chat.completions.create(
            model="fake", messages=HELLO, seed=3, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model="fake",
            messages=HELLO,
            seed=3,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    choice = whole.choices[0]
    assert choice.message.content == LETTERS[3:13]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("<user>hello")
    assert whole.usage.completion_tokens == 10
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 2

    *pieces, usage = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert all(piece.choices[0].delta.role is None for piece in pieces[1:])
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == choice.message.content
    scored = [
        item
        for piece in pieces
        if (found := piece.choices[0].logprobs)
        for item in found.content or []
    ]
    assert scored == choice.logprobs.content
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 11 + ["stop"]
    assert usage.choices == []
    assert usage.usage == whole.usage


async def test_completions_number_their_choices_by_prompt_and_n() -> None:
    engine = FakeEngine(answer_length=4)
    async with openai_client(engine) as client:
        whole = await client.completions.create(model="fake", prompt=["one", "three"], n=2, seed=1)
        stream = await client.completions.create(
            model="fake", prompt=["one", "three"], n=2, seed=1, stream=True
        )
        texts = [""] * 4
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == texts
    assert whole.choices[0].text == whole.choices[2].text == LETTERS[1:5]
    prompts = [bytes(stream.prompt) for stream in engine.submitted[:4]]
    assert prompts == [b"one", b"one", b"three", b"three"]
    seeds = [stream.params.seed for stream in engine.submitted[:4]]
    assert seeds[0] == 1 != seeds[1]
    assert seeds[:2] == seeds[2:]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 8
    assert whole.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["hi", [104, 105], [[104, 105]], ["hi"]])
async def test_every_kind_of_prompt_is_echoed(prompt: Any) -> None:
    async with openai_client(FakeEngine()) as client:
        scoring = await client.completions.create(
            model="fake", prompt=prompt, max_tokens=0, echo=True, logprobs=1
        )
        echoing = await client.completions.create(
            model="fake", prompt=prompt, max_tokens=2, echo=True, seed=0
        )
    assert scoring.choices[0].text == "hi"
    assert scoring.choices[0].finish_reason == "length"
    assert scoring.choices[0].logprobs is not None
    assert scoring.choices[0].logprobs.tokens == ["h", "i"]
    assert scoring.choices[0].logprobs.token_logprobs == [None, -0.5]
    assert echoing.choices[0].text == "hiab"
    assert echoing.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("length", "on_loop"), [(MANY_SCORED, True), (MANY_SCORED + 2, False)])
async def test_large_logprobs_are_encoded_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, stream: bool, length: int, on_loop: bool
) -> None:
    threads: set[threading.Thread] = set()

    def token_bytes(self: FakeTokenizer, token_id: int, /) -> bytes:
        threads.add(threading.current_thread())
        return bytes([token_id])

    monkeypatch.setattr(FakeTokenizer, "token_bytes", token_bytes)
    asked = {"prompt": "a" * length, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    async with http_client(FakeEngine()) as client:
        answer = (await client.post("/v1/completions", json=asked)).text
    assert answer.count("-0.5") >= length - 1
    assert (threads == {threading.current_thread()}) is on_loop
    assert (threading.current_thread() in threads) is on_loop


async def test_submitting_many_choices_yields_to_other_tasks() -> None:
    turns: list[bool] = []  # whether each was the loop's, or submitted a choice

    class Slow(FakeEngine):
        def submit(self, *args: Any, **options: Any) -> FakeStream:
            time.sleep(MAX_TURN_S / 4)
            turns.append(False)
            return super().submit(*args, **options)

    async def tick() -> None:
        while True:
            turns.append(True)
            await asyncio.sleep(0)

    async with openai_client(Slow()) as client:
        ticking = asyncio.ensure_future(tick())
        answer = await client.completions.create(model="fake", prompt="a", n=40, max_tokens=1)
        ticking.cancel()
    assert len(answer.choices) == 40
    runs = [len([*run]) for ticked, run in itertools.groupby(turns) if not ticked]
    assert sum(runs) == 40 and max(runs) <= 5


async def test_64_concurrent_streams_get_their_own_answers() -> None:
    async with openai_client(FakeEngine(interval=0.002, answer_length=50)) as client:

        async def ask(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*map(ask, range(64)))
    assert answers == [(LETTERS * 6)[seed:][:50] for seed in (seed % 26 for seed in range(64))]


async def test_models_are_listed_under_their_served_names() -> None:
    async with openai_client(FakeEngine(answer_length=1), served_model_name=("a/b", "c")) as client:
        assert [model.id async for model in client.models.list()] == ["a/b", "c"]
        assert (await client.models.retrieve("a/b")).id == "a/b"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("d")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="fake", messages=HELLO)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        answer = await client.chat.completions.create(model="c", messages=HELLO)
        assert answer.model == "c"


async def test_version_is_served_and_requests_need_no_model_name() -> None:
    async with http_client(FakeEngine(answer_length=1)) as client:
        assert (await client.get("/version")).json()["version"] == __version__
        assert f'version="{__version__}"' in (await client.get("/metrics")).text
        answer = await client.post("/v1/chat/completions", json={"messages": HELLO})
        assert answer.json()["model"] == "fake"


# -- errors ---------------------------------------------------------------------------------------


async def test_errors_have_the_openai_envelope() -> None:
    async with http_client(FakeEngine(max_seq_len=20)) as client:
        chat = "/v1/chat/completions"
        cases: list[tuple[httpx.Response, int, str | None, str | None]] = [
            (await client.post(chat, json={}), 400, "messages", None),
            (await client.post(chat, json={"messages": HELLO, "tools": 3}), 400, "tools", None),
            (await client.post(chat, json=[]), 400, None, None),
            (await client.post(chat, content=b"{"), 400, None, None),
            (
                await client.post(chat, content=b"{", headers={"content-type": "application/json"}),
                400,
                None,
                None,
            ),
            (await client.get("/nowhere"), 404, None, "unknown_url"),
            (await client.get(chat), 405, None, "method_not_allowed"),
            (
                await client.post("/v1/completions", json={"prompt": [300]}),
                400,
                "prompt",
                None,
            ),
            (await client.post("/v1/completions", json={"prompt": ""}), 400, "prompt", None),
            (
                await client.post(
                    "/v1/completions",
                    content=b" " * (MAX_BODY_BYTES + 1),
                    headers={"content-type": "application/json"},
                ),
                413,
                None,
                "request_too_large",
            ),
        ]
    for response, status, param, code in cases:
        error = error_of(response)
        assert (response.status_code, error["param"], error["code"]) == (status, param, code)
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_is_refused_before_the_first_byte(stream: bool) -> None:
    async with http_client(FakeEngine(max_seq_len=20)) as client:
        body = {"messages": [{"role": "user", "content": "x" * 30}], "stream": stream}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert "36" in error["message"]
        assert "20" in error["message"]


@pytest.mark.parametrize("clamp", [False, True])
async def test_max_tokens_beyond_the_context_is_refused_or_clamped(clamp: bool) -> None:
    async with http_client(FakeEngine(max_seq_len=20), clamp_max_tokens=clamp) as client:
        asked = {"prompt": "x" * 15, "max_tokens": 10}
        response = await client.post("/v1/completions", json=asked)
        silent = await client.post("/v1/completions", json={"prompt": "x" * 15})
    assert silent.json()["usage"]["completion_tokens"] == 5
    if clamp:
        assert response.json()["usage"]["completion_tokens"] == 5
    else:
        assert error_of(response)["code"] == "context_length_exceeded"
        assert error_of(response)["message"].endswith(
            " With this prompt max_tokens may be up to 5; a server with --clamp-max-tokens lowers "
            "it by itself."
        )


async def test_a_full_queue_is_a_429_and_submits_no_choice() -> None:
    engine = FakeEngine(max_queued=2)
    async with http_client(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "n": 3})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert error_of(response)["type"] == "rate_limit_error"
    assert not engine.running


@pytest.mark.parametrize("error", [StepError("out of memory"), RuntimeError("with a secret")])
async def test_an_error_in_mid_stream_is_an_error_event(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(interval=0.01)
    async with http_client(engine) as client:
        asked = {"messages": HELLO, "n": 2, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
            lines = [line async for line in _failing_after(response, 5, engine, error) if line]
    assert lines[-1] == "data: [DONE]"
    body = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert body["type"] == "internal_error"
    assert "secret" not in body["message"]
    assert not engine.running
    await until(lambda: bool(caplog.messages))
    [line] = caplog.messages
    assert type(error).__name__ in line or str(error) in line
    assert "secret" not in caplog.text


async def _failing_after(
    response: httpx.Response, count: int, engine: FakeEngine, error: Exception
) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        yield line
        count -= 1
        if count == 0:
            next(iter(engine.running.values())).fail(error)


@pytest.mark.parametrize("error", [StepError("out of memory"), RuntimeError("with a secret")])
async def test_an_error_of_a_whole_answer_is_a_500(error: Exception) -> None:
    engine = FakeEngine(interval=0.01)
    async with http_client(engine) as client:
        asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: bool(engine.running))
        next(iter(engine.running.values())).fail(error)
        response = await asking
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]


async def test_health_reports_the_phase() -> None:
    async with http_client(None) as client:
        assert error_of(await client.get("/health"))["code"] == "loading"
        response = await client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
    engine = FakeEngine()
    state = EngineState(ServerConfig(), engine)
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/health")).json() == {"status": "ready"}
        state.drain()
        assert error_of(await client.get("/health"))["code"] == "draining"
        engine.fail(RuntimeError("the device is gone"))
        response = await client.get("/health")
        assert response.status_code == 503
        assert error_of(response)["code"] == "dead"
        assert "the device is gone" in error_of(response)["message"]


# -- clients that leave ---------------------------------------------------------------------------


async def test_a_client_that_disconnects_in_mid_stream_is_aborted() -> None:
    engine = FakeEngine(interval=0.01)
    async with openai_client(engine) as client:
        stream = await client.chat.completions.create(
            model="fake", messages=HELLO, n=2, stream=True
        )
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: not engine.running)
    assert len(engine.aborted) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_before_the_first_token_is_aborted(stream: bool) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with http_client(engine) as client:
        asked = {"messages": HELLO, "stream": stream}
        asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=asked))
        await until(lambda: bool(engine.running))
        asking.cancel()
        await until(lambda: not engine.running)
    assert len(engine.aborted) == 1


async def test_a_client_that_disconnects_during_a_blocked_send_is_aborted() -> None:
    engine = FakeEngine(repeat=100_000, interval=0.001)
    async with server_on(engine) as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            body = json.dumps({"messages": HELLO, "stream": True})
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(body), body.encode())
            )
            await until(lambda: bool(server.server_state.connections))
            [connection] = server.server_state.connections
            await until(lambda: connection.flow.write_paused)
        await until(lambda: not engine.running)
    assert len(engine.aborted) == 1


async def test_a_disconnect_does_not_affect_other_requests() -> None:
    engine = FakeEngine(interval=0.002, answer_length=100)
    async with openai_client(engine) as client:

        async def ask(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, seed=seed, stream=True
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if seed % 2 and len(text) >= 10:
                    await stream.close()
                    break
            return text

        answers = await asyncio.gather(*map(ask, range(20)))
        await until(lambda: not engine.running)
    assert answers[::2] == [(LETTERS * 6)[seed:][:100] for seed in range(0, 20, 2)]
    assert len(engine.aborted) == 10
