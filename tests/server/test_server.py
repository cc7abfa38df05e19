"""The server over real sockets, with the clients that people use."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.fake_engine import LETTERS, FakeEngine, FakeStream, FakeTokenizer
from support.http_server import (
    HELLO,
    error_of,
    free_port,
    http_client,
    running,
    serve,
    serving,
    serving_process,
    until,
    wait_for_health,
)

from minisgl.errors import ConfigError, StepError
from minisgl.server.app import create_app
from minisgl.server.bodies import MAX_BODY_BYTES
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.process import bind
from minisgl.server.responses import MANY_SCORED, MAX_TURN_S


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
        assert (await client.get("/version")).json()["version"]
        answer = await client.post("/v1/chat/completions", json={"messages": HELLO})
        assert answer.json()["model"] == "fake"


# -- errors ---------------------------------------------------------------------------------------


async def test_errors_have_the_openai_envelope() -> None:
    async with http_client(FakeEngine(max_seq_len=20)) as client:
        chat = "/v1/chat/completions"
        cases: list[tuple[httpx.Response, int, str | None, str | None]] = [
            (await client.post(chat, json={}), 400, "messages", None),
            (await client.post(chat, json={"messages": HELLO, "tools": []}), 400, "tools", None),
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


async def test_requests_need_one_of_the_keys() -> None:
    async with http_client(FakeEngine(), api_key=("secret",)) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = await client.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        right = {"authorization": "Bearer secret"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_cors_preflights_need_no_key() -> None:
    origin = "https://example.org"
    async with http_client(FakeEngine(), api_key=("secret",), cors_origin=(origin,)) as client:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        response = await client.options("/v1/chat/completions", headers=asked)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin


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
        assert await until(lambda: not engine.running) < 0.1
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
        assert await until(lambda: not engine.running) < 0.1
    assert len(engine.aborted) == 1


async def test_a_client_that_disconnects_during_a_blocked_send_is_aborted() -> None:
    engine = FakeEngine(repeat=100_000, interval=0.001)
    async with serving(engine) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            body = json.dumps({"messages": HELLO, "stream": True})
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(body), body.encode())
            )
            await until(lambda: bool(engine.running))
            await asyncio.sleep(0.5)  # by now the buffers are full
        assert await until(lambda: not engine.running) < 0.1
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


# -- the process ----------------------------------------------------------------------------------


def stream_lines(url: str) -> Iterator[str]:
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={"messages": HELLO, "stream": True}
    ) as response:
        yield from (line for line in response.iter_lines() if line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_process_exits_at_once_with_0(number: signal.Signals) -> None:
    with serving_process({"load_seconds": 0.5}) as (process, url):
        wait_for_health(url, 503)
        wait_for_health(url, 200)
        process.send_signal(number)
        _, log = process.communicate(timeout=5)
    assert process.returncode == 0
    assert f"Serving fake at {url}" in log
    assert f"curl {url}/v1/chat/completions" in log
    assert "Traceback" not in log


def test_a_process_drains_before_it_exits() -> None:
    with serving_process({"interval": 0.02, "answer_length": 40}) as (process, url):
        wait_for_health(url, 200)
        lines = stream_lines(url)
        next(lines)
        process.send_signal(signal.SIGTERM)
        wait_for_health(url, 503)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert [*lines][-1] == "data: [DONE]"
        assert process.wait(5) == 0


def test_requests_beyond_the_drain_timeout_end_with_an_error_event() -> None:
    with serving_process({"interval": 0.02}, drain_timeout=0.3) as (process, url):
        wait_for_health(url, 200)
        lines = stream_lines(url)
        next(lines)
        process.send_signal(signal.SIGTERM)
        *_, error, done = lines
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "service_unavailable"
        assert process.wait(5) == 0


def test_a_second_signal_exits_at_once() -> None:
    with serving_process({"interval": 0.02}) as (process, url):
        wait_for_health(url, 200)
        lines = stream_lines(url)
        next(lines)
        process.send_signal(signal.SIGINT)
        wait_for_health(url, 503)
        process.send_signal(signal.SIGINT)
        assert process.wait(2) == -signal.SIGINT
        with pytest.raises(httpx.TransportError):
            list(lines)


def test_a_signal_while_loading_exits_at_once() -> None:
    with serving_process({"load_seconds": 60}) as (process, url):
        wait_for_health(url, 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(2) == 0


def test_a_dead_engine_ends_the_streams_and_the_process() -> None:
    with serving_process({"interval": 0.02, "fail_after": 1.0}) as (process, url):
        wait_for_health(url, 200)
        *_, error, done = stream_lines(url)
        assert done == "data: [DONE]"
        assert "the device is gone" in error
        assert process.wait(5) == 1


def test_a_failed_load_ends_the_process() -> None:
    with serving_process({"load_error": "no such weights"}) as (process, _):
        _, log = process.communicate(timeout=10)
    assert process.returncode == 1
    assert log.strip().endswith("no such weights")


def test_an_unavailable_address_is_an_error_that_names_the_option() -> None:
    with bind(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind(ServerConfig(port=port))
        assert caught.value.param == "--port"
        assert str(port) in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        bind(ServerConfig(host="no.such.host.invalid"))
    assert caught.value.param == "--host"


# -- the command and the real engine --------------------------------------------------------------


def test_minisgl_serve_serves_a_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ("--api-key", "secret", "--served-model-name", "tiny", "--served-model-name", "t")
    monkeypatch.setenv("MINISGL_API_KEY", "secret-2, secret-3")
    (tmp_path / "keys").write_text("# of the team\nsecret-4\n")
    options += ("--api-key", "secret-5", "--api-key-file", str(tmp_path / "keys"))
    with running(*serve(tiny_model, port, *options)) as process:
        wait_for_health(url, 200, seconds=60)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            check_answers(client)
        for key, status in (*((f"secret-{n}", 200) for n in range(2, 6)), ("#", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == status
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=10)
    assert process.returncode == 0
    assert f"Serving tiny, t at {url}" in log
    assert '-H "Authorization: Bearer $MINISGL_API_KEY"' in log
    assert "secret" not in log
    assert "Traceback" not in log


def check_answers(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HELLO,
        "n": 2,
        "seed": 5,
        "max_tokens": 30,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("user: hello\n")
    assert whole.usage.completion_tokens == 60
    texts = [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or []) == 30

    streamed = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts

    prompt = "a prompt that is longer than a page " * 3
    for cached in (0, 96):
        echo = client.completions.create(
            model="t", prompt=prompt, echo=True, max_tokens=3, temperature=0
        )
        assert echo.choices[0].text.startswith(prompt)
        assert echo.usage is not None
        assert echo.usage.prompt_tokens_details is not None
        assert echo.usage.prompt_tokens_details.cached_tokens == cached

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="t", messages=HELLO, max_tokens=501)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="t", prompt=[257])
    assert caught.value.param == "prompt"
    with client.chat.completions.create(model="t", messages=HELLO, stream=True) as stream:
        next(iter(stream))


def test_a_process_without_standard_streams_shuts_down_cleanly() -> None:
    """Its sockets would get their numbers, and libuv aborts where it closes one of those."""
    behind = (
        "import fake_engine, sys; from minisgl_cli import main as cli; "
        "cli.app = lambda *_, **__: fake_engine.main(); sys.exit(cli.main())"
    )
    port = free_port()
    arguments = [sys.executable, "-c", behind, "{}", json.dumps({"port": port})]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *arguments], cwd=Path(__file__).parent
    )
    try:
        wait_for_health(f"http://127.0.0.1:{port}", 200, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_minisgl_serve_reports_startup_errors_in_one_line(tmp_path: Path) -> None:
    with bind(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with running(*serve(tmp_path, port)) as process:
            _, taken = process.communicate(timeout=30)
        assert process.returncode == 2
    with running(*serve(tmp_path / "missing", free_port())) as process:
        _, missing = process.communicate(timeout=60)
    assert process.returncode == 2
    for text, word in ((taken, "--port"), (missing, "missing")):
        assert word in text
        assert len(text.splitlines()) == 1
