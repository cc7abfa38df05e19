"""Responses with background: true, through the real `openai` client."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from support.gated_runner import gated_server
from support.http_server import error_of, serving
from support.response_events import events_of, streamed_response
from support.routing import routing
from support.scripted_engine import ScriptedEngine, ScriptedStream, qwen
from support.waiting import until

from minisgl.errors import QueueFullError
from minisgl.server.apis.responses.background import events_after
from minisgl.server.apis.responses.store import ResponseStore, StoredResponse

ANSWER = "one two three four five"
ALL = 1_000_000
ASKED: Any = {"model": "fake", "input": "Hi", "background": True}


class HeldEngine(ScriptedEngine):
    """Answers have at most `allowed` tokens for now."""

    def __init__(self, answer: str = ANSWER) -> None:
        super().__init__(qwen())
        self.answers = [answer]
        self.allowed = 0

    async def pause(self, stream: ScriptedStream, num_tokens: int) -> None:
        await until(lambda: num_tokens < self.allowed or stream.aborted)


@asynccontextmanager
async def held(
    answer: str = ANSWER, **options: Any
) -> AsyncIterator[tuple[HeldEngine, openai.AsyncOpenAI, httpx.AsyncClient]]:
    engine = HeldEngine(answer)
    async with (
        serving(engine, **options) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        httpx.AsyncClient(base_url=url) as http,
    ):
        yield engine, client, http
        engine.allowed = ALL
        await engine.close()


async def ended(client: openai.AsyncOpenAI, id: str) -> Response:
    """The response when it has ended."""
    while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
        pass
    return found


async def test_a_response_is_shown_while_it_is_generated_and_goes_on_without_its_client() -> None:
    async with held() as (engine, client, _):
        first = await client.responses.create(**ASKED)
        assert (first.status, first.background, first.output) == ("queued", True, [])
        queued = await client.responses.retrieve(first.id)
        assert queued == first and queued.usage is None
        engine.allowed = 3
        while (found := await client.responses.retrieve(first.id)).status == "queued":
            pass
        assert found.status == "in_progress" and found.usage is None
        while found.output_text != "one two"[: len(found.output_text)] or not found.output_text:
            found = await client.responses.retrieve(first.id)
        assert found.output[0].status == "in_progress"
        engine.allowed = ALL
        whole = await ended(client, first.id)
        assert (whole.status, whole.output_text) == ("completed", ANSWER)
        assert whole.usage is not None and whole.completed_at is not None
        again = await client.responses.create(
            **{**ASKED, "background": False}, previous_response_id=first.id
        )
        assert again.status == "completed" and ANSWER in engine.texts[-1]


async def test_the_tokens_of_a_response_count_for_its_key() -> None:
    engine = HeldEngine()
    engine.allowed = ALL
    async with (
        serving(engine, api_key=("ada: s3cret",)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="s3cret", max_retries=0) as client,
        httpx.AsyncClient(base_url=url) as http,
    ):
        whole = await ended(client, (await client.responses.create(**ASKED)).id)
        assert whole.usage is not None
        page = (await http.get("/metrics")).text
        counted = f'minisgl_key_generated_tokens_total{{key="ada"}} {whole.usage.output_tokens}.0'
        assert counted in page
        assert f'minisgl_key_prompt_tokens_total{{key="ada"}} {whole.usage.input_tokens}.0' in page
        await engine.close()


async def test_a_stream_is_resumed_behind_any_event_while_it_comes_and_afterwards() -> None:
    async with held() as (engine, client, http):
        engine.allowed = 3
        numbers, id = [], ""
        async with await client.responses.create(**ASKED, stream=True) as stream:
            async for event in stream:
                numbers.append(event.sequence_number)
                if event.type == "response.created":
                    id = event.response.id
                    assert event.response.status == "queued"
                if event.type == "response.output_text.delta":
                    break
        assert numbers == [*range(len(numbers))]
        resumed = await client.responses.retrieve(id, stream=True, starting_after=numbers[-1])
        engine.allowed = ALL
        later = [event async for event in resumed]
        assert [event.sequence_number for event in later] == [
            *range(len(numbers), len(numbers) + len(later))
        ]
        assert later[-1].type == "response.completed"
        path, shown = f"/v1/responses/{id}", await client.responses.retrieve(id)
        events = events_of(await http.get(path, params={"stream": "true"}))
        created, queued, in_progress, *rest = events
        assert queued["type"] == "response.queued" and queued["response"] == created["response"]
        created["response"]["status"] = "in_progress"  # as that of any other stream begins
        whole = streamed_response([created, in_progress, *rest])
        assert Response.model_validate(whole) == shown and shown.output_text == ANSWER
        total = len(events)
        for number in (0, 1, total - 2, total - 1, total, 10 * total):
            again = await client.responses.retrieve(id, stream=True, starting_after=number)
            assert [each.sequence_number async for each in again] == [*range(number + 1, total)]


async def test_a_stream_that_is_asked_for_early_waits_for_its_events() -> None:
    async with held() as (engine, client, _):
        stream = await client.responses.create(**ASKED, stream=True)
        first = await anext(aiter(stream))
        early = await client.responses.retrieve(first.response.id, stream=True, starting_after=4)
        engine.allowed = ALL
        assert (await anext(aiter(early))).sequence_number == 5
        assert [event async for event in early][-1].type == "response.completed"
        await stream.close()


async def test_a_response_is_cancelled_once_and_for_all(caplog: pytest.LogCaptureFixture) -> None:
    async with held() as (engine, client, http):
        engine.allowed = 3
        stream = await client.responses.create(**ASKED, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        id = (await client.responses.create(**ASKED)).id
        with caplog.at_level(logging.INFO, "minisgl"):
            cancelled = await client.responses.cancel(id)
        assert cancelled.status == "cancelled" and cancelled.error is None
        [line] = [line for line in caplog.messages if "background=cancelled" in line]
        assert "POST /v1/responses 200" in line and "output_tokens=" in line
        assert engine.streams[1].aborted and not engine.streams[0].aborted
        assert await client.responses.cancel(id) == cancelled
        assert await client.responses.retrieve(id) == cancelled
        engine.allowed = ALL
        assert [event async for event in stream][-1].type == "response.completed"
        engine.allowed = 3
        stream = await client.responses.create(**ASKED, stream=True)
        async for event in stream:
            if event.type == "response.created":
                id = event.response.id
            if event.type == "response.output_text.delta":
                cut = await client.responses.cancel(id)
        assert cut.output[0].status == "incomplete" and ANSWER.startswith(cut.output_text)
        assert (await http.delete(f"/v1/responses/{id}")).status_code == 200
        assert (await http.post(f"/v1/responses/{id}/cancel")).status_code == 404


async def test_a_response_that_runs_is_ended_and_forgotten_by_delete() -> None:
    async with held() as (engine, client, http):
        id = (await client.responses.create(**ASKED)).id
        await client.responses.delete(id)
        assert engine.streams[0].aborted
        assert (await http.get(f"/v1/responses/{id}")).status_code == 404


async def test_a_failure_is_kept_with_its_reason() -> None:
    async with held("{no JSON") as (engine, client, http):
        engine.allowed = ALL
        text: Any = {"format": {"type": "json_object"}}
        failed = await ended(client, (await client.responses.create(**ASKED, text=text)).id)
        assert failed.status == "failed" and failed.error is not None
        assert "mask forbids" in failed.error.message
        refused = await http.post("/v1/responses", json={**ASKED, "temperature": 3})
        assert refused.status_code == 400


async def test_what_cannot_run_in_the_background_or_be_streamed_is_refused() -> None:
    async with held() as (engine, client, http):
        engine.allowed = ALL
        refused = await http.post("/v1/responses", json={**ASKED, "store": False})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "background")
        plain = await client.responses.create(**{**ASKED, "background": False})
        unstreamed = await ended(client, (await client.responses.create(**ASKED)).id)
        for id in (plain.id, unstreamed.id):
            refused = await http.get(f"/v1/responses/{id}", params={"stream": "true"})
            assert (refused.status_code, error_of(refused)["param"]) == (400, "stream")
        refused = await http.post(f"/v1/responses/{plain.id}/cancel")
        assert (refused.status_code, error_of(refused)["param"]) == (400, "response_id")
        for number in ("-1", "x", "1.5", "9" * 30, "٣", ""):
            query = {"stream": "true", "starting_after": number}
            refused = await http.get(f"/v1/responses/{plain.id}", params=query)
            assert error_of(refused)["param"] == "starting_after"
        refused = await http.get(f"/v1/responses/{plain.id}", params={"starting_after": "1"})
        assert error_of(refused)["param"] == "starting_after"
    async with held(response_store=0) as (_, _client, http):
        refused = await http.post("/v1/responses", json=ASKED)
        assert "stream: true" in error_of(refused)["message"]


async def test_a_refusal_of_the_engine_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise QueueFullError("Too many requests are waiting.")

    async with held() as (engine, client, http):
        with monkeypatch.context() as patched:
            patched.setattr(engine, "submit", refuse)
            for stream in (False, True):
                refused = await http.post("/v1/responses", json={**ASKED, "stream": stream})
                assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
        engine.allowed = ALL
        assert (await ended(client, (await client.responses.create(**ASKED)).id)).output_text


async def test_other_clients_neither_see_nor_end_a_response() -> None:
    async with held(api_key=("a", "b")) as (engine, _, http):
        a, b = ({"authorization": f"Bearer {key}"} for key in "ab")
        id = (await http.post("/v1/responses", json=ASKED, headers=a)).json()["id"]
        path = f"/v1/responses/{id}"
        assert (await http.get(path, headers=b)).status_code == 404
        assert (await http.post(f"{path}/cancel", headers=b)).status_code == 404
        assert (await http.delete(path, headers=b)).status_code == 404
        assert not engine.streams[0].aborted
        assert (await http.post(f"{path}/cancel", headers=a)).json()["status"] == "cancelled"


async def test_events_that_take_the_memory_of_the_store_keep_further_responses_out() -> None:
    async with held("word " * 1500, response_store=1) as (engine, _, http):
        engine.allowed = 7000  # whose events take more than a megabyte
        async with http.stream("POST", "/v1/responses", json={**ASKED, "stream": True}) as stream:
            num_bytes = 0
            async for piece in stream.aiter_raw():
                num_bytes += len(piece)
                if num_bytes >= 1_000_000:
                    break
        refused = await http.post("/v1/responses", json=ASKED)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
        plain = await http.post(
            "/v1/responses", json={**ASKED, "background": False, "max_output_tokens": 1}
        )
        assert plain.status_code == 200
        engine.allowed = ALL
        while (answer := await http.post("/v1/responses", json=ASKED)).status_code == 429:
            pass
        assert answer.status_code == 200


async def test_a_cancelled_response_gives_its_pages_back() -> None:
    async with (
        gated_server() as gated,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gated.port}") as http,
    ):
        gated.runner.close_gate()
        asked = {"input": "hi", "background": True, "max_output_tokens": 200, "ignore_eos": True}
        id = (await http.post("/v1/responses", json=asked)).json()["id"]
        await until(lambda: gated.engine.stats().num_running == 1)
        cancelled = await http.post(f"/v1/responses/{id}/cancel")
        assert cancelled.json()["status"] == "cancelled"
        gated.runner.open()
        await until(lambda: gated.engine.stats().num_used_pages == 0)


async def test_a_router_finds_the_replica_that_generates_a_response(tmp_path: Path) -> None:
    engines = HeldEngine(), HeldEngine()
    async with (
        routing(tmp_path, *engines) as (url, fleet, _replicas),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        for index, engine in enumerate(engines):
            fleet.replicas[index].num_open = -100  # it has the least to do
            first = await client.responses.create(**ASKED)
            stream = await client.responses.create(**ASKED, stream=True)
            begun = await anext(aiter(stream))
            fleet.replicas[index].num_open = 1000
            assert len(engine.streams) == 2
            assert (await client.responses.retrieve(first.id)).status == "queued"
            assert (await client.responses.cancel(first.id)).status == "cancelled"
            resumed = await client.responses.retrieve(
                begun.response.id, stream=True, starting_after=0
            )
            engine.allowed = ALL
            assert (await anext(aiter(resumed))).sequence_number == 1
            assert (await ended(client, begun.response.id)).output_text == ANSWER
            await stream.close()
            fleet.replicas[index].num_open = 0
        for engine in engines:
            await engine.close()


def test_events_are_cut_behind_a_number() -> None:
    events = [b"event: a\ndata: %d\n\n" % number for number in range(3)]
    for number in range(-1, 5):
        assert events_after(b"".join(events), number) == b"".join(events[number + 1 :])


def test_the_store_counts_events() -> None:
    store = ResponseStore(10_000)
    store.keep("", StoredResponse("resp_1", None, (), (), b"{}", True, b"x" * 6000))
    store.keep("", StoredResponse("resp_2", None, (), (), b"{}", True, b"x" * 6000))
    assert store.find("", "resp_1") is None and store.find("", "resp_2") is not None
