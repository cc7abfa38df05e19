"""Requests and answers through the router, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import ResponseErrorEvent
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from support.fake_engine import FakeEngine
from support.http_server import HELLO, error_of
from support.routing import front, routing
from support.waiting import until

from minisgl.router.config import DECODE, PREFILL, ROUND_ROBIN
from minisgl.router.fleet import ReplicaState
from minisgl.server.metrics_format import OPEN_METRICS
from minisgl.server.process import new_event_loop

CHAT = "/v1/chat/completions"
ASKED: Any = {"messages": HELLO, "max_tokens": 20, "seed": 3}
ENDLESS = 1_000_000  # so many tokens that no answer ends before its replica


def texts(lines: list[str]) -> str:
    """The text of a stream of chat chunks that ends as it should."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@contextlib.asynccontextmanager
async def asked_as_http_1_0(
    url: str, path: str, asked: dict[str, Any]
) -> AsyncIterator[asyncio.StreamReader]:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.0\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    yield reader
    writer.close()


@pytest.mark.parametrize("format", ["float", "base64"])
async def test_vectors_pass_and_end_with_their_client(tmp_path: Path, format: Any) -> None:
    engine = FakeEngine(task="embed", max_queued=2000)
    inputs = ["ab\n\n" * 100, "abc"] * 1000  # an answer of many pieces
    async with (
        routing(tmp_path, engine) as (url, fleet, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        whole = await client.embeddings.create(model="fake", input=inputs, encoding_format=format)
        assert whole.usage.prompt_tokens == sum(map(len, inputs))
        assert len(whole.data) == len(inputs)
        engine.gate.clear()
        asked = asyncio.ensure_future(client.embeddings.create(model="fake", input="a"))
        await until(lambda: engine.vectors.num_open == 1)
        asked.cancel()
        await until(lambda: engine.vectors.num_aborted == 1 and fleet.num_open == 0)


async def test_answers_are_those_of_a_replica_whole_or_streamed(tmp_path: Path) -> None:
    async with (
        routing(tmp_path, FakeEngine()) as (url, fleet, _),
        httpx.AsyncClient(base_url=url) as client,
    ):
        whole = await client.post(CHAT, json=ASKED, headers={"x-request-id": "mine"})
        assert whole.json()["choices"][0]["message"]["content"] == "defghijklmnopqrstuvw"
        assert whole.headers["x-request-id"] == "mine"
        assert whole.json()["id"].startswith("chatcmpl-mine-")
        async with client.stream("POST", CHAT, json={**ASKED, "stream": True}) as stream:
            assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert len(stream.headers.get_list("x-request-id")) == 1
            assert len(stream.headers.get_list("date")) == 1
            assert texts([line async for line in stream.aiter_lines()]) == "defghijklmnopqrstuvw"
        assert fleet.num_open == 0 and len(fleet.replicas[0].idle) == 1  # one connection for both
        packed = gzip.compress(json.dumps(ASKED).encode())
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        unpacked = await client.post(CHAT, content=packed, headers=headers)
        assert unpacked.json()["choices"] == whole.json()["choices"]
        refused = await client.post(CHAT, content=packed, headers={"content-encoding": "br"})
        assert refused.status_code == 415
        models = await client.get("/v1/models")
        assert models.json()["data"][0]["id"] == "fake"
        refused = await client.post(CHAT, json={"messages": 7})
        assert refused.status_code == 400 and error_of(refused)["param"] == "messages"
        assert (await client.get("/nowhere")).status_code == 404
        assert (await client.head("/v1/models")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


async def test_an_http_1_0_client_gets_a_stream_without_chunks(tmp_path: Path) -> None:
    async with (
        routing(tmp_path, FakeEngine()) as (url, _, _replicas),
        asked_as_http_1_0(url, CHAT, {**ASKED, "stream": True}) as reader,
    ):
        answer = (await reader.read()).decode()
    head, _, rest = answer.partition("\r\n\r\n")
    assert "chunked" not in head
    assert texts(rest.splitlines()) == "defghijklmnopqrstuvw"


async def test_a_request_whose_client_leaves_ends_on_its_replica(tmp_path: Path) -> None:
    engine = FakeEngine(interval=0.01)
    asked = {"messages": HELLO, "ignore_eos": True}
    async with (
        routing(tmp_path, engine) as (url, fleet, _),
        httpx.AsyncClient(base_url=url) as client,
    ):
        async with client.stream("POST", CHAT, json={**asked, "stream": True}) as stream:
            await anext(stream.aiter_lines())
        await until(lambda: len(engine.aborted) == 1)
        asking = asyncio.ensure_future(client.post(CHAT, json=asked))
        await until(lambda: len(engine.submitted) == 2)
        asking.cancel()
        await until(lambda: len(engine.aborted) == 2)
        await until(lambda: fleet.num_open == 0)


@pytest.mark.parametrize("roles", [("", ""), (PREFILL, DECODE)])
def test_a_request_whose_client_leaves_before_its_replica_is_reached_is_not_sent(
    roles: tuple[str, str], tmp_path: Path
) -> None:
    paths = [str(tmp_path / f"replica-{index}.sock") for index in range(2)]
    body = json.dumps({"messages": [{"role": "user", "content": "long " * 1000}]})
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"

    async def leave() -> None:
        async with front(paths) as (url, fleet), httpx.AsyncClient(base_url=url) as client:
            for replica, role in zip(fleet.replicas, roles, strict=True):
                replica.role = role
            left = socket.create_connection(("127.0.0.1", client.base_url.port))
            left.sendall((head + body).encode())
            await until(lambda: fleet.num_open > 0)
            left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", True, 0))
            left.close()
            await until(lambda: fleet.num_open == 0)
            listeners[0].accept()[0].close()  # there is room
            assert (await client.get("/version")).status_code == 200
            assert fleet.num_prefills.total() == 0

    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in paths]
        for path, listener in zip(paths, listeners, strict=True):
            listener.bind(path)
            listener.listen(0)
            listener.setblocking(False)
        # No replica takes connections, and the first has no room for one more that waits.
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(paths[0])
        loop = stack.enter_context(contextlib.closing(new_event_loop()))  # the server's own waits
        loop.run_until_complete(leave())
        for listener in listeners:
            with pytest.raises(BlockingIOError):
                listener.accept()


async def test_a_slow_reader_stops_the_router_reading(tmp_path: Path) -> None:
    engine = FakeEngine(repeat=100_000, max_seq_len=4000)
    asked = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with routing(tmp_path, engine) as (url, _, replicas):
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        body = json.dumps(asked).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        # Nobody reads, so that the router does not read from the replica either. All of them are on
        # this loop: what is to be read is read in its next turn.
        stuck = num_turns = 0
        while num_turns < 100:
            await asyncio.sleep(0)
            before, stuck = stuck, replicas.num_unsent(0)
            num_turns = num_turns + 1 if stuck == before > 0 else 0
        read = 0
        while not (piece := await reader.read(1 << 16)).endswith(b"\r\n0\r\n\r\n"):
            read += len(piece)
        writer.close()
    assert read > 200 * 100_000


async def test_a_conversation_stays_on_its_replica_and_round_robin_does_not(
    tmp_path: Path,
) -> None:
    question = {"role": "user", "content": "What is the capital of France? " * 4}
    for policy, counts in (("cache", {4, 0}), (ROUND_ROBIN, {2})):
        folder = tmp_path / policy
        folder.mkdir()
        engines = FakeEngine(), FakeEngine()
        async with (
            routing(folder, *engines, policy=policy) as (url, _, _replicas),
            httpx.AsyncClient(base_url=url) as client,
        ):
            messages = [question]
            for _ in range(4):
                answer = await client.post(CHAT, json={**ASKED, "messages": messages})
                messages += [answer.json()["choices"][0]["message"], question]
        assert {len(engine.submitted) for engine in engines} == counts


@pytest.mark.parametrize("policy", ["cache", ROUND_ROBIN])
async def test_the_id_of_a_response_finds_the_replica_that_has_it(
    tmp_path: Path, policy: str
) -> None:
    engines = FakeEngine(), FakeEngine(), FakeEngine()
    async with (
        routing(tmp_path, *engines, policy=policy) as (url, fleet, _replicas),
        httpx.AsyncClient(base_url=url) as client,
    ):
        asked: dict[str, Any] = {"max_output_tokens": 3}
        for index in range(3):
            fleet.replicas[index].num_open = -100  # it has the least to do
            first = (await client.post("/v1/responses", json={**asked, "input": "a"})).json()
            fleet.replicas[index].num_open = 1000
            goes_on = {**asked, "input": "b", "previous_response_id": first["id"]}
            second = (await client.post("/v1/responses", json=goes_on)).json()
            reference = {"type": "item_reference", "id": second["output"][0]["id"]}
            third = await client.post("/v1/responses", json={**asked, "input": [reference]})
            assert third.status_code == 200
            shown = await client.get(f"/v1/responses/{second['id']}")
            assert shown.json() == second
            assert (await client.delete(f"/v1/responses/{second['id']}")).status_code == 200
            missing = await client.get(f"/v1/responses/{second['id']}")
            assert (missing.status_code, error_of(missing)["code"]) == (404, "response_not_found")
            fleet.replicas[index].num_open = 0
        # Where its replica takes no requests, another one says that it does not have it.
        name = int(first["id"].rpartition("-")[2])
        states = [ReplicaState(is_ready=each != name, start=1) for each in range(3)]
        fleet.update(states)
        missing = await client.post("/v1/responses", json=goes_on)
        assert (missing.status_code, error_of(missing)["param"]) == (400, "previous_response_id")


async def test_requests_without_an_answer_go_to_another_replica_and_others_get_the_error(
    tmp_path: Path,
) -> None:
    engines = FakeEngine(interval=0.01), FakeEngine(interval=0.001)
    engines[0].gate.clear()
    asked = {**ASKED, "stream": True}
    async with (
        routing(tmp_path, *engines, policy=ROUND_ROBIN) as (url, fleet, replicas),
        httpx.AsyncClient(base_url=url) as client,
    ):

        async def ask(**more: Any) -> tuple[int, list[str]]:
            answer = await client.post(CHAT, json={**asked, **more})
            return answer.status_code, answer.text.splitlines()

        tasks = [asyncio.ensure_future(ask()) for _ in range(4)]
        tasks += [asyncio.ensure_future(ask(stream=False)) for _ in range(2)]
        await until(lambda: len(engines[0].submitted) == 3)
        replicas.kill(0)
        for status, lines in await asyncio.gather(*tasks):
            assert status == 200
            content = "defghijklmnopqrstuvw"
            if len(lines) == 1:
                assert json.loads(lines[0])["choices"][0]["message"]["content"] == content
            else:
                assert texts(lines) == content
        assert fleet.num_resent >= 3
        async with client.stream("POST", CHAT, json={**asked, "max_tokens": 300}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            replicas.kill(1)
            events = [line async for line in lines if line]
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert error["code"] == "replica_lost" and error["type"] == "service_unavailable"
    assert fleet.num_open == 0


async def test_requests_of_a_silent_replica_go_to_another_and_begun_streams_stay(
    tmp_path: Path,
) -> None:
    engines = FakeEngine(interval=0.001), FakeEngine(interval=0.001), FakeEngine()
    for engine in engines[:2]:
        engine.gate.clear()
    ready, silent = ReplicaState(is_ready=True, start=1), ReplicaState(start=1, is_silent=True)
    async with (
        routing(tmp_path, *engines, policy=ROUND_ROBIN) as (url, fleet, _),
        httpx.AsyncClient(base_url=url) as client,
    ):
        fleet.update([ready, ready, ReplicaState(start=1)])
        asked = [asyncio.ensure_future(client.post(CHAT, json=ASKED)) for _ in range(2)]
        await until(lambda: [len(engine.submitted) for engine in engines] == [1, 1, 0])
        fleet.update([silent, ReplicaState(start=1), ReplicaState(start=1)])
        await asyncio.sleep(0)
        assert fleet.num_resent == 0  # there is no other
        fleet.update([silent, ReplicaState(start=1), ready])
        await until(lambda: any(task.done() for task in asked))
        assert fleet.num_resent == 1 and len(engines[2].submitted) == 1
        assert not all(task.done() for task in asked)  # a replica without new requests speaks
        engines[1].gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
        fleet.update([ready, silent, silent])
        body = {**ASKED, "stream": True, "max_tokens": 900}
        engines[0].gate.set()
        async with client.stream("POST", CHAT, json=body) as stream:
            lines = stream.aiter_lines()
            first = [await anext(lines)]
            fleet.update([silent, ready, ready])
            assert texts(first + [line async for line in lines])
        assert fleet.num_resent == 1
        assert not any(replica.unanswered for replica in fleet.replicas)


async def test_metrics_of_all_replicas_are_one_page_and_health_counts(tmp_path: Path) -> None:
    async with (
        routing(tmp_path, FakeEngine(), FakeEngine()) as (url, fleet, _),
        httpx.AsyncClient(base_url=url) as client,
    ):
        await client.post(CHAT, json=ASKED)
        page = (await client.get("/metrics")).text
        assert page.count("# TYPE minisgl_running_requests gauge") == 1
        assert 'minisgl_running_requests{replica="1"} 0.0' in page
        assert 'minisgl_http_responses_total{replica="0",route="/v1/chat/completions",' in page
        assert 'minisgl_router_requests_total{router="0",replica="0"} 1.0' in page
        assert "replica_role" not in page  # all do the same
        assert page.count("# TYPE process_open_fds gauge") == 1
        opened = await client.get("/metrics", headers={"accept": OPEN_METRICS.content_type})
        assert opened.headers["content-type"] == OPEN_METRICS.content_type
        families = {each.name: each for each in openmetrics_families(opened.text)}
        sent = families["minisgl_router_requests"]
        assert sum(sample.value for sample in sent.samples) == 1
        owners = [{*sample.labels.items()} for sample in families["process_open_fds"].samples]
        assert owners == [{("replica", "0")}, {("replica", "1")}, {("router", "0")}]
        assert families["minisgl_step_seconds"].unit == "seconds"
        fleet.replicas[1].role = "decode"
        page = (await client.get("/metrics")).text
        assert 'minisgl_router_replica_role{router="0",replica="1",role="decode"} 1.0' in page
        fleet.replicas[1].role = ""
        history = (await client.get("/metrics/history")).json()["replicas"]
        assert {*history} == {"0", "1"}
        assert "minisgl_running_requests" in history["1"]["series"]
        health = await client.get("/health")
        assert health.json() == {"status": "ready", "replicas": 2, "ready": 2}
        fleet.update([ReplicaState(start=1, refusal="asleep"), ReplicaState(start=1)])
        health = await client.get("/health")
        assert health.json() == {"status": "ready", "replicas": 2, "ready": 0}
        fleet.is_draining = True
        assert error_of(await client.get("/health"))["code"] == "draining"
        assert error_of(await client.post(CHAT, json=ASKED))["code"] == "draining"
        assert (await client.get("/version")).status_code == 200


async def test_a_replica_that_takes_no_requests_is_passed_over_and_without_any_it_is_said(
    tmp_path: Path,
) -> None:
    engines = FakeEngine(), FakeEngine(), FakeEngine(), FakeEngine()
    engines[0].draining = True
    async with (
        routing(tmp_path, *engines) as (url, fleet, replicas),
        httpx.AsyncClient(base_url=url) as client,
    ):
        assert (await client.post(CHAT, json=ASKED)).status_code == 200
        assert fleet.num_sent[0] == 1 and fleet.num_resent == 1
        for index in range(4):
            replicas.kill(index)
        lost = await client.post(CHAT, json=ASKED)
        assert lost.status_code == 503 and error_of(lost)["code"] == "replica_lost"
        assert fleet.num_resent == 3  # one request must not end all replicas
        of_anthropic = await client.post("/v1/messages", json={"messages": HELLO})
        error = of_anthropic.json()
        assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
        fleet.update([ReplicaState(start=1)] * 4)
        loading = error_of(await client.get("/health"))
        assert loading["code"] == "loading" and "ready: 0 of 4" in loading["message"]
        fleet.update([ReplicaState(start=2)] * 4)
        assert error_of(await client.get("/health"))["code"] == "dead"


@pytest.mark.parametrize(
    ("path", "asked", "end", "failure"),
    [
        (CHAT, {"messages": HELLO}, "data: [DONE]", "data: [DONE]"),
        (
            "/v1/messages",
            {"model": "fake", "messages": HELLO, "max_tokens": ENDLESS - 100},
            'data: {"type":"message_stop"}',
            'data: {"type":"error","error":{"type":"overloaded_error"',
        ),
        (
            "/v1/responses",
            {"input": HELLO},
            'data: {"type":"response.completed"',
            'data: {"type":"error","code":"replica_lost"',
        ),
    ],
)
async def test_streams_of_every_api_end_as_they_should_or_with_an_error_of_their_own(
    path: str, asked: dict[str, Any], end: str, failure: str, tmp_path: Path
) -> None:
    engine = FakeEngine(answer_length=5, max_seq_len=ENDLESS)
    async with (
        routing(tmp_path, engine) as (url, _, replicas),
        httpx.AsyncClient(base_url=url) as client,
    ):
        body = {**asked, "stream": True}
        whole = (await client.post(path, json=body)).text
        assert whole.rstrip().splitlines()[-1].startswith(end)
        engine.answer_length, engine.interval = None, 0.005
        async with client.stream("POST", path, json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await until(lambda: bool(engine.running))
            replicas.kill(0)
            *_, last = [line async for line in lines if line]
        assert last.startswith(failure)


async def test_the_clients_of_every_api_understand_the_error_of_a_replica_that_ends(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(max_seq_len=ENDLESS, interval=0.005)
    hello: Any = HELLO
    async with (
        routing(tmp_path, engine) as (url, _, replicas),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as of_openai,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as of_anthropic,
        asked_as_http_1_0(url, "/v1/responses", {"input": "hello", "stream": True}) as old,
    ):
        response = await of_openai.responses.create(model="fake", input="hello", stream=True)
        chat = await of_openai.chat.completions.create(model="fake", messages=hello, stream=True)
        message = await of_anthropic.messages.create(
            model="fake", messages=hello, max_tokens=ENDLESS - 100, stream=True
        )
        for stream in (chat, message):
            await anext(aiter(stream))  # type: ignore[arg-type]
        await old.readuntil(b"output_text.delta")
        numbers = list[int]()
        async for event in response:
            numbers.append(event.sequence_number)
            if len(numbers) == 9:
                replicas.kill(0)
        assert numbers == [*range(len(numbers))]
        error = ResponseErrorEvent.model_validate(event.to_dict())
        assert error.code == "replica_lost"
        with pytest.raises(openai.APIError, match="send the request again"):
            [chunk async for chunk in chat]
        with pytest.raises(anthropic.APIStatusError, match="send the request again"):
            [each async for each in message]
        *_, before, last = (await old.read()).decode().rstrip().split("\n\n")
        number = json.loads(before.partition("data: ")[2])["sequence_number"] + 1
        assert last.startswith("event: error\n") and f'"sequence_number":{number}}}' in last
