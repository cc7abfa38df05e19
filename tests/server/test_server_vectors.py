"""Requests for vectors and scores end with their clients, take turns and have limits, as others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from support.fake_engine import FakeEngine
from support.gated_runner import VOCAB, Gated, gated_server
from support.http_server import error_of, http_client
from support.waiting import until

from minisgl.engine.vector_types import EmbedOptions, RerankOptions

BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a", "bc"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "cde"]},
    "/v2/rerank": {"query": "a", "documents": ["b", "cde"]},
    "/v1/score": {"text_1": "a", "text_2": ["b", "cde"]},
}
OF_EMBED, *OF_RERANK = BODIES


def task_of(path: str) -> str:
    return "embed" if path == OF_EMBED else "rerank"


def prompts(num: int) -> dict[str, Any]:
    return {"input": [[3 + index % (VOCAB - 3)] * 9 for index in range(num)]}


async def left(gated: Gated, body: dict[str, Any], num_open: int) -> None:
    """Ask for vectors, and leave when `num_open` requests of them are in the engine."""
    sent = json.dumps(body).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", gated.port)
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
    await until(lambda: num_in(gated) == num_open)
    writer.close()
    await writer.wait_closed()


def num_in(gated: Gated) -> int:
    stats = gated.engine.stats()
    return stats.num_running + stats.num_queued


async def test_a_client_that_leaves_ends_all_of_its_requests() -> None:
    async with gated_server(task="embed", max_running_requests=4, max_queued_requests=40) as gated:
        gated.runner.close_gate()
        await left(gated, prompts(20), 20)  # some run, others wait
        await until(lambda: num_in(gated) == 0)
        gated.runner.open()


async def test_of_a_large_request_no_more_than_half_of_the_queue_is_taken() -> None:
    async with gated_server(task="embed", max_running_requests=4, max_queued_requests=8) as gated:
        gated.runner.close_gate()
        leaving = asyncio.ensure_future(left(gated, prompts(50), 8))
        await leaving  # the others were never submitted
        await until(lambda: num_in(gated) == 0)
        gated.runner.open()


async def test_a_full_queue_is_a_429_after_which_nothing_is_left() -> None:
    async with gated_server(task="embed", max_running_requests=2, max_queued_requests=4) as gated:
        gated.runner.close_gate()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gated.port}") as client:
            others = [asyncio.ensure_future(client.post(OF_EMBED, json=prompts(3)))]
            await until(lambda: gated.engine.stats().num_running == 2)
            others.append(asyncio.ensure_future(client.post(OF_EMBED, json=prompts(3))))
            await until(lambda: gated.engine.stats().num_queued == 4)
            refused = await client.post(OF_EMBED, json=prompts(1))
            assert refused.status_code == 429
            assert error_of(refused)["code"] == "queue_full"
            for other in others:
                other.cancel()
            await until(lambda: num_in(gated) == 0)
            gated.runner.open()


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_cancels_what_waits(path: str) -> None:
    engine = FakeEngine(task=task_of(path))
    engine.gate.clear()
    async with http_client(engine) as client:
        asked = asyncio.ensure_future(client.post(path, json=BODIES[path]))
        await until(lambda: engine.vectors.num_open == 1)
        asked.cancel()
        await until(lambda: engine.vectors.num_open == 0)
    assert engine.vectors.num_aborted == 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_has_the_tenant_and_the_salt_of_its_client(path: str) -> None:
    engine = FakeEngine(task=task_of(path))
    async with http_client(engine, api_key=("one", "two")) as client:
        refused = await client.post(path, json=BODIES[path])
        assert refused.status_code == 401
        for key, fields in (
            ("one", {"user": "me", "cache_salt": "s"}),
            ("two", {"user": "me", "extra_key": "t"}),
            ("two", {}),
        ):
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post(path, json=BODIES[path] | fields, headers=headers)
            assert answer.status_code == 200, answer.text
    (_, one_salt, one), (_, two_salt, two), (_, no_salt, nobody) = engine.vectors.asked
    assert (one_salt, two_salt, no_salt) == ("s", "t", None)
    assert one.client != two.client == nobody.client != ""
    assert one.user == two.user != nobody.user == ""


@pytest.mark.parametrize("path", OF_RERANK)
async def test_all_options_of_scores_reach_the_engine(path: str) -> None:
    options = {"instruction": "i", "truncate_prompt_tokens": 5, "max_tokens_per_doc": 3}
    engine = FakeEngine(task="rerank")
    async with http_client(engine) as client:
        assert (await client.post(path, json=BODIES[path] | options)).status_code == 200
    [(asked, *_)] = engine.vectors.asked
    assert asked == RerankOptions(**options)


async def test_all_options_of_vectors_reach_the_engine() -> None:
    options: dict[str, Any] = {"prompt_name": "p", "dimensions": 1, "truncate_prompt_tokens": -1}
    engine = FakeEngine(task="embed")
    async with http_client(engine) as client:
        body = BODIES[OF_EMBED] | options | {"instruction": "i"}
        assert (await client.post(OF_EMBED, json=body)).status_code == 200
    [(asked, *_)] = engine.vectors.asked
    assert asked == EmbedOptions(instruction="i", **options)


async def test_equal_scores_keep_the_order_of_the_documents() -> None:
    body = {"query": "a", "documents": ["bb", "c", "dd", "e"]}
    async with http_client(FakeEngine(task="rerank")) as client:
        answer = (await client.post("/v1/rerank", json=body)).json()
    assert [each["index"] for each in answer["results"]] == [0, 2, 1, 3]


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_and_other_models_are_refused_as_elsewhere(path: str) -> None:
    async with http_client(FakeEngine(task=task_of(path)), strict_fields=True) as client:
        refused = await client.post(path, json=BODIES[path] | {"inptu": 1})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "inptu")
        refused = await client.post(path, json=BODIES[path] | {"model": "other"})
        assert (refused.status_code, error_of(refused)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_that_generates_says_how_to_serve_one_for_this(path: str) -> None:
    async with http_client(FakeEngine()) as client:
        refused = await client.post(path, json=BODIES[path])
    error = error_of(refused)
    assert (refused.status_code, error["code"]) == (400, "wrong_task")
    assert f"{path} is not available" in error["message"]
    assert "/v1/chat/completions" in error["message"]
    assert f"`minisgl serve --task {task_of(path)}`" in error["message"]


async def test_responses_are_counted_by_their_endpoints() -> None:
    async with http_client(FakeEngine(task="rerank")) as client:
        for path in BODIES:
            await client.post(path, json=BODIES[path])
        lines = (await client.get("/metrics")).text.splitlines()
    counted = {line for line in lines if line.startswith("minisgl_http_responses_total")}
    for path in OF_RERANK:
        assert f'minisgl_http_responses_total{{route="{path}",status="200"}} 1.0' in counted
    assert f'minisgl_http_responses_total{{route="{OF_EMBED}",status="400"}} 1.0' in counted


async def test_the_openai_package_asks_with_its_key() -> None:
    async with http_client(FakeEngine(task="embed"), api_key=("secret",)) as http:
        url = f"{http.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            answer = await client.embeddings.create(model="fake", input=["abc", "a"])
    assert [each.embedding for each in answer.data] == [
        [1.0, -0.5],
        [pytest.approx(1 / 3), -0.5],
    ]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4
