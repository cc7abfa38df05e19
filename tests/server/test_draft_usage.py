"""The drafts of answers as clients, metrics and the log tell them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.engine_loop import ScriptedRunner, engine_on
from support.http_server import http_client

from minisgl.client.chunk import StreamChunk
from minisgl.engine import AsyncEngine
from minisgl.server.stats_log import Interval

NUM_DRAFTS = 3
BODY: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "seed": 0}
CHAT = {"messages": [{"role": "user", "content": "How are you?"}], **BODY}
COMPLETION = {"prompt": "How are you?", **BODY}


@pytest.fixture
async def speculating() -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    runner = ScriptedRunner(page_size=4)
    options: Any = {"speculative": "ngram", "draft_tokens": NUM_DRAFTS}
    async with (
        engine_on(runner, tokenizer=True, **options) as engine,
        http_client(engine) as client,
    ):
        yield engine, client


async def usage_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
async def test_usage_has_the_drafts_of_an_answer_whole_and_streamed(
    speculating: tuple[AsyncEngine, httpx.AsyncClient], path: str, body: dict[str, Any]
) -> None:
    engine, client = speculating
    whole = await usage_of(client, path, body)
    details = whole["completion_tokens_details"]
    accepted, rejected = (
        details[f"{which}_prediction_tokens"] for which in ("accepted", "rejected")
    )
    assert 0 < accepted < whole["completion_tokens"] == 20
    # Each token but the first, which the prompt's step samples, has a row or is accepted.
    drafts = engine.stats().drafts
    assert drafts is not None and accepted + rejected <= drafts.num_drafted
    assert (accepted + rejected) % NUM_DRAFTS == 0
    assert accepted + (accepted + rejected) // NUM_DRAFTS == 19
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    response = await client.post(path, json={**body, "stream": True, **options})
    chunks = [
        json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]
    ]
    so_far = [chunk["usage"].get("completion_tokens_details", {}) for chunk in chunks]
    counts = [each.get("accepted_prediction_tokens", 0) for each in so_far]
    assert counts == sorted(counts) and counts[-1] > 0
    last = chunks[-1]["usage"]
    num_drafted, num_accepted = json_usage(last)
    assert num_accepted == last["completion_tokens_details"]["accepted_prediction_tokens"]
    assert num_accepted + num_drafted // NUM_DRAFTS == 19


def json_usage(usage: dict[str, Any]) -> tuple[int, int]:
    """As the chat and the benchmark read it."""
    chunk = msgspec.convert({"usage": usage}, StreamChunk)
    assert chunk.usage is not None
    return chunk.usage.drafts


async def test_several_choices_add_up_their_drafts(
    speculating: tuple[AsyncEngine, httpx.AsyncClient],
) -> None:
    _, client = speculating
    usage = await usage_of(client, "/v1/completions", {**COMPLETION, "n": 3})
    num_drafted, num_accepted = json_usage(usage)
    assert num_accepted + num_drafted // NUM_DRAFTS == 3 * 19


async def test_drafts_behind_a_stop_string_are_rejected(
    speculating: tuple[AsyncEngine, httpx.AsyncClient],
) -> None:
    _, client = speculating
    answer = (await client.post("/v1/completions", json=COMPLETION)).json()
    text = answer["choices"][0]["text"]
    for end in range(4, len(text)):
        body = {**COMPLETION, "stop": text[end - 3 : end]}
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        num_drafted, num_accepted = json_usage(usage)
        # The last run may be cut, and then has at least its first token.
        assert num_accepted + num_drafted // NUM_DRAFTS == usage["completion_tokens"] - 1


async def test_rows_that_take_no_drafts_and_engines_without_report_none(
    speculating: tuple[AsyncEngine, httpx.AsyncClient],
) -> None:
    _, client = speculating
    usage = await usage_of(client, "/v1/completions", {**COMPLETION, "presence_penalty": 1})
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    async with (
        engine_on(ScriptedRunner(page_size=4), tokenizer=True) as engine,
        http_client(engine) as plain,
    ):
        usage = await usage_of(plain, "/v1/completions", COMPLETION)
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
        assert engine.stats().drafts is None
        assert b"draft" not in (await plain.get("/metrics")).content


async def test_metrics_and_the_log_have_the_drafts_of_all_requests(
    speculating: tuple[AsyncEngine, httpx.AsyncClient],
) -> None:
    engine, client = speculating
    before = engine.stats()
    usages = [await usage_of(client, "/v1/completions", COMPLETION) for _ in range(3)]
    stats = engine.stats()
    text = (await client.get("/metrics")).text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    drafts = stats.drafts
    assert drafts is not None
    assert found["minisgl_drafted_tokens_total"] == drafts.num_drafted
    assert found["minisgl_accepted_draft_tokens_total"] == drafts.num_accepted
    assert found["minisgl_decode_rows_total"] == drafts.num_rows
    assert found["minisgl_draft_length"] == NUM_DRAFTS
    told = [json_usage(usage) for usage in usages]
    assert sum(num_accepted for _, num_accepted in told) <= drafts.num_accepted
    assert 0 < sum(num_drafted for num_drafted, _ in told) <= drafts.num_drafted
    line = Interval(before, stats, 5.0).describe()
    accepted = drafts.num_accepted / drafts.num_drafted
    per_step = 1 + drafts.num_accepted / drafts.num_rows
    assert f"drafts accepted: {accepted:.2f}, tokens per step: {per_step:.2f}, " in line
