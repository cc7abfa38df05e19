"""The ingress and the engines behind it, on one event loop instead of Ray's."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from support.fake_engine import FakeEngine
from support.http_server import HELLO, error_of
from support.quick_server import QuickServer
from support.waiting import until

from minisgl.config import EngineConfig
from minisgl.ray import ingress
from minisgl.ray.engine import Answer, EngineReplica, EngineUnhealthyError
from minisgl.ray.ingress import create_ingress_app
from minisgl.router.exchange import EngineLostError, Head, HTTPRequest
from minisgl.server.answers.handover import PREFILL, PREFILLED, Handover, Offered
from minisgl.server.config import ServerConfig
from minisgl.server.metrics_format import OPEN_METRICS
from minisgl.server.process import bind, http_settings

CHAT = "/v1/chat/completions"
ASKED: Any = {"messages": HELLO, "max_tokens": 20, "seed": 3}


class LocalEngines:
    """Two engines that are asked in turn. The first one ends after so many parts of an answer."""

    def __init__(self, engine: FakeEngine, config: ServerConfig) -> None:
        self.replica = EngineReplica(engine, config, name="here")  # type: ignore[arg-type]
        self.num_asked = 0
        self.keys: list[bytes | None] = []
        self.parts_left: int | None = None
        self.num_ready = 2
        self.has_prefill = False
        self.asked: list[HTTPRequest] = []  # in the order of requests
        self.prefills: list[HTTPRequest] = []
        # What becomes of the next prefills: their offers, or why there are none.
        self.offers: list[Offered | Exception | None] = []

    async def ask_prefill(self, request: HTTPRequest) -> Answer:
        self.prefills.append(request)
        offer = self.offers.pop(0)
        if offer is None:  # no engine takes it
            await asyncio.Event().wait()
        if isinstance(offer, Exception):
            raise offer
        yield b""
        yield Head(200, [])
        yield msgspec.json.encode(offer)

    async def ask(self, request: HTTPRequest) -> Answer:
        self.num_asked += 1
        self.keys.append(request.key)
        self.asked.append(request)
        async with contextlib.aclosing(self.replica.answer(request)) as parts:
            async for part in parts:
                if self.parts_left == 0:
                    self.parts_left = None
                    raise EngineLostError
                if self.parts_left is not None:
                    self.parts_left -= 1
                yield part

    async def count(self) -> tuple[int, int]:
        return 2, self.num_ready

    async def metrics(self, accept: str) -> Mapping[str, bytes]:
        page = await self.replica.metrics(accept)
        return {"left": page, "right": page}


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, LocalEngines]]:
    config = ServerConfig(port=0, **options)
    engines = LocalEngines(engine, config)
    with bind(config) as listener:
        server = QuickServer(http_settings(create_ingress_app(engines, config)))
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url) as client:
            yield client, engines
        server.should_exit = True
        await task


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def test_answers_are_those_of_an_engine_whole_or_streamed() -> None:
    async with serving(FakeEngine()) as (client, engines):
        whole = await client.post(CHAT, json=ASKED, headers={"x-request-id": "mine"})
        assert whole.json()["choices"][0]["message"]["content"] == "defghijklmnopqrstuvw"
        assert whole.json()["id"].startswith("chatcmpl-mine-")
        assert whole.headers.get_list("x-request-id") == ["mine"]
        assert engines.keys[0] is not None and b"hello" in engines.keys[0]
        streamed = await client.post(CHAT, json={**ASKED, "stream": True})
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert text_of(events_of(streamed.text)) == "defghijklmnopqrstuvw"
        packed = gzip.compress(msgspec.json.encode(ASKED))
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        unpacked = await client.post(CHAT, content=packed, headers=headers)
        assert unpacked.json()["choices"] == whole.json()["choices"]
        assert engines.keys[-1] == engines.keys[0]  # it is routed by what it says
        refused = await client.post(CHAT, json={"messages": 7})
        assert refused.status_code == 400 and error_of(refused)["param"] == "messages"
        missing = await client.get("/nowhere")
        assert missing.status_code == 404 and error_of(missing)["code"] == "unknown_url"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
        assert engines.keys[-1] is None  # nothing of it is cached


async def test_keys_are_asked_for_and_prefixes_of_a_proxy_are_known() -> None:
    async with serving(FakeEngine(), api_key=("a", "b"), root_path="/llm") as (client, engines):
        refused = await client.post(CHAT, json=ASKED)
        assert refused.status_code == 401 and engines.num_asked == 0
        for path in (CHAT, "/llm" + CHAT):
            answer = await client.post(path, json=ASKED, headers={"authorization": "Bearer b"})
            assert answer.status_code == 200
        assert engines.keys[0] == engines.keys[1] and engines.keys[0] is not None
        await client.post(CHAT, json=ASKED, headers={"authorization": "Bearer a"})
        first, _, other = (key.partition(b"\0") for key in engines.keys if key is not None)
        assert first[0] != other[0] and first[2] == other[2]  # each key has a cache of its own


async def test_a_request_goes_to_another_engine_unless_its_answer_has_begun() -> None:
    async with serving(FakeEngine()) as (client, engines):
        for engines.parts_left in (0, 1):  # nothing, and the head
            engines.num_asked = 0
            answer = await client.post(CHAT, json=ASKED)
            assert answer.status_code == 200 and engines.num_asked == 2
            assert answer.json()["choices"][0]["message"]["content"] == "defghijklmnopqrstuvw"
        engines.parts_left = 2  # the head, and the first events
        streamed = await client.post(
            CHAT, json={**ASKED, "stream": True}, headers={"x-request-id": "mine"}
        )
        assert events_of(streamed.text)[-1]["error"]["code"] == "replica_lost"
        assert engines.num_asked == 3
        engines.parts_left = 2
        response = await client.post("/v1/responses", json={"input": "hello", "stream": True})
        *_, before, last = response.text.rstrip().split("\n\n")
        numbers = [
            json.loads(each.partition("data: ")[2])["sequence_number"] for each in (before, last)
        ]
        assert numbers[1] == numbers[0] + 1 and '"code":"replica_lost"' in last


async def test_a_request_that_goes_on_from_an_answer_names_the_engine_that_has_it() -> None:
    async with serving(FakeEngine()) as (client, engines):
        path, asked = "/v1/responses", {"input": "hello", "max_output_tokens": 3}
        first = (await client.post(path, json=asked)).json()
        goes_on = await client.post(path, json={**asked, "previous_response_id": first["id"]})
        assert goes_on.status_code == 200 and first["id"].endswith("-here")
        assert (await client.get(f"{path}/{first['id']}")).json() == first
        assert [request.holder for request in engines.asked] == ["", "here", "here"]
        assert engines.keys[0] is not None and engines.keys[1:] == [None, None]


async def test_a_request_whose_engines_all_end_gets_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(FakeEngine()) as (client, engines):

        async def lost(request: HTTPRequest) -> Answer:
            engines.num_asked += 1
            raise EngineLostError
            yield b""

        monkeypatch.setattr(engines, "ask", lost)
        answer = await client.post(CHAT, json=ASKED)
        assert answer.status_code == 503 and error_of(answer)["code"] == "replica_lost"
        assert engines.num_asked == 3


async def test_a_request_whose_client_leaves_ends_on_its_engine() -> None:
    engine = FakeEngine(interval=0.01)
    asked = {"messages": HELLO, "ignore_eos": True}
    async with serving(engine) as (client, _):
        async with client.stream("POST", CHAT, json={**asked, "stream": True}) as stream:
            await anext(stream.aiter_lines())
        await until(lambda: len(engine.aborted) == 1)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=asked, timeout=0.1)
        await until(lambda: len(engine.aborted) == 2)
        assert not engine.running


async def test_prompts_are_computed_by_engines_for_that_and_handed_over_by_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prompt(index: int) -> Any:
        said = f"{index} " * 1500
        return {**ASKED, "messages": [{"role": "user", "content": said}], "max_tokens": 2}

    async with serving(FakeEngine(max_seq_len=10_000)) as (client, engines):
        engines.has_prefill = True
        handed = Offered(1, "10.0.0.7:4000")

        async def ask(asked: Any, *offers: Offered | Exception | None) -> bytes | None:
            """Where the engine that answers found the pages."""
            engines.offers = [*offers]
            headers = {"x-minisgl-prefilled": "evil:1", "x-minisgl-prefill": "1"}
            answer = await client.post(CHAT, json=asked, headers=headers)
            assert answer.json()["choices"][0]["message"]["content"] == "de"
            assert not engines.offers
            return dict(engines.asked[-1].headers).get(PREFILLED)

        assert await ask(prompt(1), handed) == b"10.0.0.7:4000"
        assert engines.prefills[0].headers.count((PREFILL, b"1")) == 1
        assert engines.prefills[0].body == engines.asked[-1].body
        assert await ask({**ASKED, "max_tokens": 2}) is None  # short
        turn = prompt(1)
        turn["messages"] += [{"role": "user", "content": "more"}]
        assert await ask(turn) is None  # the engines that answer have most of it
        assert await ask(prompt(2), Offered(0, "10.0.0.7:4000")) is None
        assert await ask(prompt(3), handed) is not None

        # While no engine takes prompts, only now and then one request waits for it.
        now = [100.0]
        monkeypatch.setattr(ingress, "monotonic", lambda: now[0])
        monkeypatch.setattr(ingress, "ACCEPT_S", 0.01)
        assert await ask(prompt(4), None) is None
        assert await ask(prompt(5)) is None
        now[0] += ingress.PAUSE_S + 1
        assert await ask(prompt(6), EngineLostError()) is None
        assert await ask(prompt(7)) is None
        now[0] += ingress.PAUSE_S + 1
        assert await ask(prompt(8), handed) is not None
        assert await ask(prompt(9), handed) is not None


class SharingEngine(FakeEngine):
    """Offers and fetches whatever it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    @property
    def pages(self) -> SharingEngine:
        return self

    async def share(self, address: str, *, always_load: bool) -> str:
        return address

    async def offer(self, prompt_token_ids: Sequence[int], **_: object) -> bool:
        return True

    async def fetch(self, address: str, prompt_token_ids: Sequence[int], **_: object) -> bool:
        self.fetched.append(address)
        return True


async def test_an_engine_says_that_it_has_a_prompt_before_it_computes_it() -> None:
    engine = SharingEngine()
    around = Handover(engine, "10.0.0.7:4000").around
    replica = EngineReplica(engine, ServerConfig(), around)  # type: ignore[arg-type]
    body = msgspec.json.encode(ASKED)
    request = HTTPRequest("POST", CHAT, b"", [(b"content-type", b"application/json")], body)
    parts = [part async for part in replica.prefill(request.with_header(PREFILL, b"1"))]
    assert parts[0] == b"" and isinstance(parts[1], Head) and parts[1].status == 200
    assert isinstance(parts[2], bytes)
    assert msgspec.json.decode(parts[2], type=Offered) == Offered(1, "10.0.0.7:4000")
    asked = request.with_header(PREFILLED, b"10.0.0.8:5000")
    head, *_ = [part async for part in replica.answer(asked)]
    assert isinstance(head, Head) and head.status == 200
    assert engine.fetched == ["10.0.0.8:5000"]


async def test_fingerprints_tell_the_options_of_engines_apart() -> None:
    body, found = msgspec.json.encode(ASKED), set()
    request = HTTPRequest("POST", CHAT, b"", [(b"content-type", b"application/json")], body)
    for dtype in ("bfloat16", "float32"):
        engine: Any = FakeEngine()
        replica = EngineReplica(engine, ServerConfig(), options=EngineConfig(dtype=dtype))
        _, *pieces = [part async for part in replica.answer(request)]
        answer = json.loads(b"".join(part for part in pieces if isinstance(part, bytes)))
        found.add(answer["system_fingerprint"])
    assert len(found) == 2


async def test_health_counts_engines_and_metrics_are_labelled() -> None:
    engine = FakeEngine()
    async with serving(engine) as (client, engines):
        health = await client.get("/health")
        assert health.json() == {"status": "ready", "replicas": 2, "ready": 2}
        page = (await client.get("/metrics")).text
        assert 'minisgl_running_requests{replica="left"} 0.0' in page
        assert page.count("# TYPE minisgl_running_requests gauge") == 1
        accept = {"accept": OPEN_METRICS.content_type}
        opened = (await client.get("/metrics", headers=accept)).text
        [running] = (
            family
            for family in openmetrics_families(opened)
            if family.name == "minisgl_running_requests"
        )
        assert [sample.labels["replica"] for sample in running.samples] == ["left", "right"]
        engines.num_ready = 0
        health = await client.get("/health")
        assert health.status_code == 503 and error_of(health)["code"] == "loading"
        await engines.replica.check_health()
        engine.stalled = "A step has taken 20 s."
        with pytest.raises(EngineUnhealthyError, match="A step has taken"):
            await engines.replica.check_health()
        engine.stalled, engine.failure = None, RuntimeError("the device is lost")
        with pytest.raises(EngineUnhealthyError, match="the device is lost"):
            await engines.replica.check_health()
