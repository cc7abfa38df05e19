"""What becomes of requests when a trainer pauses the server that has them, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.gated_runner import Gated, gated_server
from support.waiting import until

from minisgl.engine.weights import PausedError
from minisgl.events import CallArguments, CallEnd, CallStart
from minisgl.request import FinishReason, OutputDelta, SamplingParams
from minisgl.server.answers.jobs import GenerationJob
from minisgl.server.answers.plan import AnswerStyle
from minisgl.server.apis.openai.chat_reply import ChatReply

ADMIN = {"authorization": "Bearer admin"}
PROMPT = [50, 51, 52, 53, 54]
NUM_TOKENS = 40
ENDLESS = {"ignore_eos": True, "seed": 0}
ASKED: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": NUM_TOKENS,
    **ENDLESS,
    "return_token_ids": True,
    "logprobs": 0,
}
HELLO: Any = {"messages": [{"role": "user", "content": "hi"}], **ENDLESS}


@asynccontextmanager
async def paused_midway(**options: Any) -> AsyncIterator[tuple[Gated, httpx.AsyncClient]]:
    """A server for a trainer, of one request at a time, whose steps end one by one until the
    pause."""
    server = {"trainer": True, "admin_key": "admin"}
    async with (
        gated_server(max_running_requests=1, server=server, **options) as gated,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{gated.port}", headers=ADMIN, timeout=None
        ) as client,
    ):
        gated.runner.close_gate()
        yield gated, client


async def begin(gated: Gated, num_asked: int = 1) -> None:
    """Wait until so many requests are there, and let some steps end."""
    await until(lambda: len(gated.engine._delivery.streams) == num_asked)
    for _ in range(5):
        before = gated.runner.num_collected
        gated.runner.step()
        await until(lambda before=before: gated.runner.num_collected > before)


async def pause(gated: Gated, client: httpx.AsyncClient, query: str) -> None:
    """Pause, while the steps that are launched end."""
    pausing = asyncio.ensure_future(client.post(f"/pause{query}"))
    await until(lambda: gated.engine.weights._holds)
    gated.runner.open()
    (await pausing).raise_for_status()


def posted(client: httpx.AsyncClient, path: str, body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.ensure_future(client.post(path, json=body))


def ended(answer: httpx.Response) -> Any:
    """The one choice of an answer, whole or streamed, with its text and tokens."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return answer.json()["choices"][0]
    *lines, done = [line[6:] for line in answer.text.split("\n") if line]
    assert done == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    return choices[-1] | {
        "text": "".join(each["text"] for each in choices),
        "token_ids": [token for each in choices for token in each.get("token_ids", ())],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("query", ["", "?mode=abort"])
async def test_abort_ends_what_has_begun_and_what_waits_and_later_requests_wait(
    stream: bool, query: str
) -> None:
    async with paused_midway() as (gated, client):
        whole = gated.text(PROMPT, NUM_TOKENS)
        stop = [f"{char}?!" for char in {*whole}][:16]  # which hold the last character back
        asked = ASKED | {"stream": stream, "stop": stop}
        begun, queued = (posted(client, "/v1/completions", asked) for _ in "ab")
        await begin(gated, 2)
        await pause(gated, client, query)
        first, second = ended(await begun), ended(await queued)
        assert first["finish_reason"] == second["finish_reason"] == "abort"
        assert (second["token_ids"], second["text"]) == ([], "")
        num_tokens = len(first["token_ids"])
        assert 0 < num_tokens < NUM_TOKENS
        assert gated.engine.tokenizer is not None
        assert first["text"] == gated.engine.tokenizer.decode(first["token_ids"])
        assert whole.startswith(first["text"])
        if not stream:
            assert len(first["logprobs"]["tokens"]) == num_tokens

        later = posted(client, "/v1/completions", ASKED)
        await until(lambda: gated.engine.stats().num_queued == 1)
        steps = gated.engine.stats().counters.num_steps
        await asyncio.sleep(0.05)
        assert gated.engine.stats().counters.num_steps == steps and not later.done()
        (await client.post("/resume")).raise_for_status()
        last = ended(await later)
        assert (last["finish_reason"], last["text"]) == ("length", whole)


async def test_a_chat_that_is_aborted_answers_with_what_it_has() -> None:
    async with paused_midway() as (gated, client):
        whole = posted(client, "/v1/chat/completions", HELLO | {"max_tokens": NUM_TOKENS})
        await begin(gated)
        await pause(gated, client, "")
        found = (await whole).json()
        assert found["choices"][0]["finish_reason"] == "abort"
        assert 0 < found["usage"]["completion_tokens"] < NUM_TOKENS
        (await client.post("/resume")).raise_for_status()


@pytest.mark.parametrize("aborts", [False, True])
async def test_a_name_for_the_weights_counts_from_the_next_token_on(aborts: bool) -> None:
    async with paused_midway() as (gated, client):
        begun = posted(client, "/v1/completions", ASKED)
        await begin(gated)
        body = {"new_version": "7", "abort_all_requests": aborts}
        named = posted(client, "/update_weight_version", body)
        await until(lambda: gated.engine._steps._max_in_flight == 0)
        gated.runner.open()
        (await named).raise_for_status()
        found = ended(await begun)
        if aborts:
            assert found["finish_reason"] == "abort" and "weight_versions" not in found
        else:
            (first, old), (later, new) = found["weight_versions"]
            assert (first, old, new) == (0, "", "7") and 0 < later < NUM_TOKENS
            assert found["text"] == gated.text(PROMPT, NUM_TOKENS)
        prompt = [*PROMPT, *found["token_ids"]]
        answer = await client.post("/v1/completions", json=ASKED | {"prompt": prompt})
        assert ended(answer)["weight_versions"] == [[0, "7"]]
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert len(PROMPT) < cached == (len(prompt) - 1) // 4 * 4


def test_a_call_that_is_aborted_is_no_answer_that_ran_out_of_tokens() -> None:
    style = AnswerStyle(
        reasoning_fields=(), custom_names=frozenset(), short_ids=False, count_call=lambda: None
    )
    job = GenerationJob(index=0, k=0, prompt_token_ids=PROMPT, params=SamplingParams(), style=style)
    reply = ChatReply([job], model="m", tokenizer=None, include_usage=False)
    cut = [CallStart(0, "look"), CallArguments(0, '{"at'), CallEnd(0, is_object=False)]
    reply.choices[0].keep(OutputDelta([50], "", 1, 0, finish_reason=FinishReason.ABORT, events=cut))
    (choice,) = json.loads(reply.whole())["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"at'


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/responses", {"input": "hi", **ENDLESS}, 503),
        ("/v1/messages", HELLO | {"max_tokens": NUM_TOKENS}, 529),
    ],
)
async def test_apis_without_a_word_for_it_answer_with_an_error(
    path: str, body: Any, status: int
) -> None:
    async with paused_midway() as (gated, client):
        asked = posted(client, path, body)
        await begin(gated)
        await pause(gated, client, "")
        refused = await asked
        assert refused.status_code == status
        assert "stopped before it had finished" in refused.json()["error"]["message"]
        (await client.post("/resume")).raise_for_status()


async def test_keep_lets_all_go_on() -> None:
    async with paused_midway() as (gated, client):
        begun, queued = (posted(client, "/v1/completions", ASKED) for _ in "ab")
        await begin(gated, 2)
        await pause(gated, client, "?mode=keep")
        assert not (begun.done() or queued.done())
        (await client.post("/resume")).raise_for_status()
        for each in (await begun, await queued):
            assert ended(each)["finish_reason"] == "length"


async def test_requests_without_an_answer_are_refused_by_name() -> None:
    async with paused_midway(max_prefill_length=4) as (gated, client):
        scored = asyncio.ensure_future(gated.engine.vectors.logits([PROMPT * 20], (41, 42)))
        await begin(gated)
        await pause(gated, client, "")
        with pytest.raises(PausedError):
            await scored
        (await client.post("/resume")).raise_for_status()
