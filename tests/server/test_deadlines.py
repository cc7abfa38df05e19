"""How long a request may take, and wait for its first step."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.fake_engine import FakeEngine
from support.gated_runner import Gated, asking, gated_server
from support.http_server import HELLO, error_of, http_client, serving
from support.routing import routing
from support.waiting import until

from minisgl.errors import ConfigError
from minisgl.router import forward
from minisgl.router.app import forwarding_app
from minisgl.router.exchange import Head, HTTPRequest
from minisgl.router.forward import ForwardedAnswer
from minisgl.server.config import ServerConfig
from minisgl.server.http.deadlines import HEADER

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SOON = 0.05  # what waits for a closed gate is late then, however slow the machine is
TURN = 0.3  # time enough for a first step if there is a place
JSON = {"content-type": "application/json"}
BODIES: dict[str, Any] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 100},
}


def closed() -> FakeEngine:
    """An engine all of whose requests wait."""
    engine = FakeEngine()
    engine.gate.clear()
    return engine


async def asked(
    client: httpx.AsyncClient, path: str, by_header: bool, **fields: Any
) -> httpx.Response:
    """The answer to a request that is late soon."""
    headers = {HEADER: str(SOON)} if by_header else {}
    body = BODIES[path] | fields | ({} if by_header else {"timeout": SOON})
    return await client.post(path, json=body, headers=headers)


def check_late(answer: httpx.Response, path: str) -> None:
    assert answer.status_code == 504
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["type"] == "timeout_error"
    assert "as long as its timeout allows" in error["message"]
    if path != MESSAGES:
        assert error_of(answer)["code"] == "deadline_exceeded"


@pytest.mark.parametrize("through_router", [False, True])
@pytest.mark.parametrize("path", [*BODIES])
async def test_a_late_request_ends_with_an_error_of_its_api_and_is_aborted(
    tmp_path: Path, path: str, through_router: bool
) -> None:
    engine = closed()
    number = 0
    async with (
        serving(engine) as alone,
        routing(tmp_path, engine) as (router, fleet, _),
        httpx.AsyncClient(base_url=router if through_router else alone) as client,
    ):
        for by_header in (False, True):
            for stream in (False, True):
                check_late(await asked(client, path, by_header, stream=stream), path)
                number += 1
                await until(lambda: not engine.running)
                assert len(engine.aborted) == number
        assert fleet.num_open == 0


async def test_vectors_are_late_as_answers_are() -> None:
    engine = FakeEngine(task="embed")
    engine.gate.clear()
    async with http_client(engine) as client:
        body = {"input": ["a", "b"], "timeout": SOON}
        check_late(await client.post("/v1/embeddings", json=body), "/v1/embeddings")
    assert (engine.vectors.num_open, engine.vectors.num_aborted) == (0, 1)


async def test_the_clients_of_openai_and_anthropic_can_say_how_long_they_wait() -> None:
    async with serving(closed()) as url:
        late: dict[str, Any] = {"extra_body": {"timeout": SOON}}
        for options in (late, {"extra_headers": {HEADER: str(SOON)}}):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
                with pytest.raises(openai.InternalServerError) as failed:
                    await client.chat.completions.create(model="fake", messages=HELLO, **options)
                assert failed.value.status_code == 504 and failed.value.code == "deadline_exceeded"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="x") as other:
                with pytest.raises(anthropic.APIStatusError) as refused:
                    await other.messages.create(
                        model="fake", messages=HELLO, max_tokens=9, **options
                    )
                assert refused.value.status_code == 504


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", ["deadline_exceeded", "queue_timeout"])
async def test_an_answer_in_the_background_is_begun_at_once_and_fails_when_it_is_late(
    code: str, stream: bool
) -> None:
    engine, in_queue = closed(), code == "queue_timeout"
    async with http_client(engine, max_queue_seconds=SOON if in_queue else None) as client:
        body = BODIES[RESPONSES] | {"background": True, "stream": stream}
        for seconds in (0.2, 2, 20):  # so that it begins on any machine
            timed = body if in_queue else body | {"timeout": seconds}
            answer = await client.post(RESPONSES, json=timed, timeout=None)
            if answer.status_code == 200:
                break
        if stream:
            begun, *_, failed = [each for each in answer.text.split("\n\n") if each]
            assert begun.startswith("event: response.created")
            assert failed.startswith("event: response.failed")
            response = json.loads(failed.partition("data: ")[2])["response"]
        else:
            response = answer.json()
            assert response["status"] == "queued"
        while response["status"] in ("queued", "in_progress"):
            response = (await client.get(f"{RESPONSES}/{response['id']}")).json()
        assert response["status"] == "failed"
        said = "has waited" if in_queue else "as long as its timeout allows"
        assert said in response["error"]["message"]
    assert not engine.running


@pytest.mark.parametrize("path", [*BODIES])
async def test_a_stream_that_has_begun_ends_with_an_error_event(tmp_path: Path, path: str) -> None:
    engine = FakeEngine(ends_after=str(tmp_path / "never"))
    async with http_client(engine) as client:
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body = BODIES[path] | {"stream": True, limit: 3}
        for seconds in (0.1, 1, 10, 100):  # so that it begins on any machine
            answer = await client.post(path, json=body | {"timeout": seconds}, timeout=None)
            if answer.status_code == 200:
                break
    events = [event for event in answer.text.split("\n\n") if event]
    failure = events[-2] if events[-1] == "data: [DONE]" else events[-1]
    assert len(events) > 2
    assert "The request has taken as long as its timeout allows." in failure
    assert not engine.running


BAD: list[tuple[dict[str, str], dict[str, Any]]] = [
    *(({HEADER: given}, {}) for given in ("soon", "0", "-1", "nan", "1e9", "1_000")),
    *(({}, {"timeout": given}) for given in ("soon", 0, -1, 1e9)),
]


async def test_a_time_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with (
        serving(engine) as alone,
        routing(tmp_path, engine) as (router, _, _replicas),
        httpx.AsyncClient() as client,
    ):
        for url in (alone + CHAT, router + CHAT):
            for headers, body in BAD:
                answer = await client.post(url, json=BODIES[CHAT] | body, headers=headers)
                assert answer.status_code == 400
                assert error_of(answer)["param"] == (HEADER if headers else "timeout")
            assert (await client.post(url, json=BODIES[CHAT])).status_code == 200


async def test_the_shorter_of_two_times_counts_and_an_answer_in_time_is_whole() -> None:
    engine = closed()
    async with http_client(engine) as client:
        for header, field in ((SOON, 1000), (1000, SOON)):
            body = BODIES[CHAT] | {"timeout": field}
            check_late(await client.post(CHAT, json=body, headers={HEADER: str(header)}), CHAT)
        engine.gate.set()
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"timeout": 1000, "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3


async def test_time_counts_from_the_arrival_of_the_request_not_of_its_body() -> None:
    async with serving(FakeEngine()) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{HEADER}: {SOON}\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: 99\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 504")
        writer.close()


# -- on an engine ---------------------------------------------------------------------------------


async def post(gated: Gated, client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    asked = asking([1, 2, 3, 4, 5, 6, 7], 8, **fields)
    return await client.post(COMPLETIONS, content=asked, headers=JSON)


def client_of(gated: Gated) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{gated.port}", timeout=None)


@pytest.mark.parametrize("stream", [False, True])
async def test_under_load_what_is_late_frees_its_pages_and_the_rest_is_answered(
    stream: bool,
) -> None:
    """`gated_server` checks at its end that no page is used, by an audit."""
    async with (
        gated_server(max_running_requests=4, num_pages=60) as gated,
        client_of(gated) as http,
    ):
        gated.runner.close_gate()
        late = [post(gated, http, stream=stream, timeout=SOON, n=1 + i % 3) for i in range(20)]
        kept = [asyncio.ensure_future(post(gated, http, stream=False)) for _ in range(10)]
        found = await asyncio.gather(*late)
        assert {answer.status_code for answer in found} == {504}
        stats = gated.engine.stats()
        assert stats.num_running + stats.num_queued == len(kept)
        gated.runner.open()
        texts = {a.json()["choices"][0]["text"] for a in await asyncio.gather(*kept)}
        assert texts == {gated.text([1, 2, 3, 4, 5, 6, 7], 8)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_too_long_for_its_first_step_is_refused(stream: bool) -> None:
    options: dict[str, Any] = {"max_running_requests": 2}
    server = {"max_queue_seconds": TURN}
    async with gated_server(server=server, **options) as gated, client_of(gated) as http:
        gated.runner.close_gate()
        running = [asyncio.ensure_future(post(gated, http, stream=stream)) for _ in range(2)]
        await until(lambda: gated.engine.stats().num_running == 2)
        refused = await post(gated, http, stream=stream)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused)["code"] == "queue_timeout"
        assert "--max-queue-seconds" in error_of(refused)["message"]
        gated.runner.open()  # those have had their first step, and may take as long as they like
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}


async def test_choices_that_wait_for_those_of_their_own_request_are_not_refused() -> None:
    options: dict[str, Any] = {"max_running_requests": 1, "server": {"max_queue_seconds": TURN}}
    async with gated_server(**options) as gated, client_of(gated) as http:
        gated.runner.close_gate()
        asked = asyncio.ensure_future(post(gated, http, stream=False, n=3))
        await until(lambda: gated.engine.stats().num_queued == 2)
        assert (await post(gated, http)).status_code == 503  # which came later, and is late before
        gated.runner.open()
        answer = (await asked).json()
        assert len(answer["choices"]) == 3


async def test_vectors_that_wait_too_long_for_their_first_step_are_refused() -> None:
    options: dict[str, Any] = {"max_running_requests": 1, "server": {"max_queue_seconds": TURN}}
    async with gated_server(task="embed", **options) as gated, client_of(gated) as http:
        gated.runner.close_gate()
        body = {"input": [[5, 6], [7, 8]]}  # of which one has a place, and the other waits for it
        first = asyncio.ensure_future(http.post("/v1/embeddings", json=body))
        await until(lambda: gated.engine.stats().num_running == 1)
        refused = await http.post("/v1/embeddings", json=body)
        assert error_of(refused)["code"] == "queue_timeout"
        assert gated.engine.stats().num_queued == 1
        first.cancel()  # this runner makes no vectors
        await until(lambda: gated.engine.stats().num_queued == 0)
        gated.runner.open()


async def test_a_queue_that_is_stuck_refuses_through_the_router_once(tmp_path: Path) -> None:
    engines = [closed(), closed()]
    async with (
        routing(tmp_path, *engines, replica={"max_queue_seconds": SOON}) as (url, _, _replicas),
        httpx.AsyncClient(base_url=url) as client,
    ):
        for path, status in ((CHAT, 503), (MESSAGES, 529)):
            refused = await client.post(path, json=BODIES[path])
            assert (refused.status_code, refused.headers["retry-after"]) == (status, "1")
    assert sum(len(engine.submitted) for engine in engines) == 2


class Engines:
    """What a router asks: keeps the requests, and answers at once or never."""

    def __init__(self, *, answers: bool = True, begins: bool = False) -> None:
        self.asked: list[HTTPRequest] = []
        self._answers = answers
        self._begins = begins

    def check_ready(self) -> None:
        pass

    async def answer(self, request: HTTPRequest, answer: ForwardedAnswer) -> bool:
        self.asked.append(request)
        if self._begins:
            await answer.begin(Head(200, [(b"content-type", b"text/event-stream")]))
            await answer.go_on(b"data: {}\n\n")
        if not self._answers:
            await asyncio.Event().wait()
        await answer.begin(Head(200, []))
        await answer.end()
        return True


def router_of(engines: Engines) -> httpx.AsyncClient:
    app = forwarding_app(engines, ServerConfig(), None, Counter(), {})
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def test_a_router_tells_its_replicas_what_time_is_left() -> None:
    engines = Engines()
    async with router_of(engines) as client:
        for header, field, most in ((30, None, 30), (None, 20, 20), (30, 20, 20), (10, 20, 10)):
            body = BODIES[CHAT] | ({} if field is None else {"timeout": field})
            await client.post(CHAT, json=body, headers={HEADER: str(header)} if header else {})
            [left] = [value for name, value in engines.asked[-1].headers if name == HEADER.encode()]
            assert 0 < float(left) < most
        await client.post(CHAT, json=BODIES[CHAT])
        assert HEADER.encode() not in dict(engines.asked[-1].headers)


@pytest.mark.parametrize("begins", [False, True])
async def test_a_router_gives_up_a_replica_that_does_not_say_that_it_is_late(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "LATE_S", 0)
    async with router_of(Engines(answers=False, begins=begins)) as client:
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"timeout": SOON})
        if not begins:
            check_late(answer, CHAT)
            return
        first, failure, done, _ = answer.text.split("\n\n")
        assert (first, done) == ("data: {}", "data: [DONE]")
        assert "deadline_exceeded" in failure


def test_seconds_in_the_queue_are_more_than_none() -> None:
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"--max-queue-seconds .*: allowed: more than 0"):
            ServerConfig(max_queue_seconds=seconds)
