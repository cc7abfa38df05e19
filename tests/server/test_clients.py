"""Fair sharing between clients that the server distinguishes by their keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types import Completion, CompletionUsage
from support.gated_runner import Gated, gated_server
from support.waiting import until

KEYS = ("key-of-a", "key-of-b")


@asynccontextmanager
async def clients(
    api_key: tuple[str, ...] = KEYS, **options: Any
) -> AsyncIterator[tuple[Gated, list[openai.AsyncOpenAI]]]:
    """A server whose steps wait to be told, and a client for each of its keys."""
    async with gated_server(api_key=api_key, **options) as gated, AsyncExitStack() as stack:
        url = f"http://127.0.0.1:{gated.port}/v1"
        made = [openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) for key in api_key]
        yield gated, [await stack.enter_async_context(client) for client in made]


async def complete(
    client: openai.AsyncOpenAI, prompt: Sequence[int], max_tokens: int = 1, **fields: Any
) -> Completion:
    return await client.completions.create(
        model="gated", prompt=[*prompt], max_tokens=max_tokens, extra_body=fields
    )


async def queue(
    gated: Gated, client: openai.AsyncOpenAI, prompts: Sequence[Sequence[int]], **fields: Any
) -> list[asyncio.Task[Completion]]:
    """Send them one after the other; returns once all are in the engine."""
    tasks = []
    for prompt in prompts:
        before = in_engine(gated)
        tasks.append(asyncio.ensure_future(complete(client, prompt, **fields)))
        await until(lambda before=before: in_engine(gated) > before)
    return tasks


def in_engine(gated: Gated) -> int:
    stats = gated.engine.stats()
    return stats.num_queued + stats.num_running


async def order_of(gated: Gated, tasks: list[asyncio.Task[Completion]]) -> list[int]:
    """The first prompt token of each request, as they were admitted."""
    gated.runner.open()
    await asyncio.gather(*tasks)
    return [join.prompt_token_ids[0] for plan in gated.runner.launched for join in plan.joins]


async def test_a_request_does_not_wait_for_the_queue_of_another_key() -> None:
    async with clients(max_running_requests=1) as (gated, (a, b)):
        gated.runner.close_gate()
        many = await queue(gated, a, [[3, n] for n in range(3, 43)])
        hello = await queue(gated, b, [[4, 5, 6]])
        order = await order_of(gated, many + hello)
    assert order == [3, 4] + [3] * 39  # after the one that runs, before all that wait


async def test_with_one_key_all_users_are_one_client() -> None:
    async with clients(KEYS[:1], max_running_requests=1) as (gated, (client,)):
        gated.runner.close_gate()
        asked = []
        for first in range(10, 20):
            asked += await queue(gated, client, [[first]], user=str(first % 3))
        assert await order_of(gated, asked) == [*range(10, 20)]


async def test_users_of_a_key_are_served_in_turns_within_its_share() -> None:
    async with clients(max_running_requests=1) as (gated, (a, b)):
        gated.runner.close_gate()
        asked = await queue(gated, a, [[10], [11], [12]], user="x")
        asked += await queue(gated, a, [[20]], user="y" * 100_000)
        asked += await queue(gated, b, [[30], [31], [32]], user={"not": "a text"})
        assert await order_of(gated, asked) == [10, 30, 11, 31, 20, 32, 12]


async def test_a_full_queue_refuses_only_the_client_that_filled_it() -> None:
    async with clients(max_running_requests=1, max_queued_requests=4) as (gated, (a, b)):
        gated.runner.close_gate()
        asked = await queue(gated, a, [[n] for n in range(10, 15)])  # one of them runs
        with pytest.raises(openai.RateLimitError):
            await complete(a, [15])
        asked += await queue(gated, b, [[20], [21]])
        with pytest.raises(openai.RateLimitError):
            await complete(b, [22])
        assert await order_of(gated, asked) == [10, 20, 11, 21, 12, 13, 14]


def cached(usage: CompletionUsage | None) -> int:
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


async def test_each_key_and_each_salt_has_its_own_prefix_cache() -> None:
    async with clients() as (_, (a, b)):
        prompt = [*range(10, 30)]
        views: list[tuple[openai.AsyncOpenAI, dict[str, Any]]] = [
            *((client, {"cache_salt": salt}) for client in (a, b) for salt in ("x", "y")),
            *((a, {"cache_salt": "x", "extra_key": key}) for key in ("x", "y")),
            (a, {"extra_key": "z"}),
            *((client, {"user": "z"}) for client in (a, b)),
        ]
        for found in (0, 16):
            for client, fields in views:
                assert cached((await complete(client, prompt, **fields)).usage) == found


async def test_with_at_most_one_key_the_cache_is_shared_except_between_salts() -> None:
    async with clients(("any",)) as (_, (client,)):
        url = client.base_url
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as other:
            question: Any = {
                "model": "gated",
                "messages": [{"role": "user", "content": "What is a prefix cache good for?"}],
                "max_tokens": 1,
            }
            salted = question | {"extra_body": {"cache_salt": "x"}}
            find = [
                cached((await asker.chat.completions.create(**asked)).usage) > 0
                for asker, asked in (
                    *((client, question), (other, question)),
                    *((client, salted), (other, salted), (other, question)),
                )
            ]
    assert find == [False, True, False, True, True]


async def test_salts_divide_the_prefix_cache_in_every_api() -> None:
    async with clients(("any",)) as (_, (client,)):
        said: Any = [{"role": "user", "content": "What is a prefix cache good for?"}]

        async def share(path: str, **fields: str) -> int:
            body = {"max_output_tokens": 1, "input": said}
            if path == "messages":
                body = {"max_tokens": 1, "messages": said}
            answer: Any = await client.post(f"/{path}", body=body | fields, cast_to=object)
            usage = answer["usage"]
            details = usage.get("input_tokens_details", {})
            return int(usage.get("cache_read_input_tokens", details.get("cached_tokens")))

        for name in ("cache_salt", "extra_key"):
            for path in ("messages", "responses"):
                salted = {name: f"{name} {path}"}
                assert await share(path, **salted) == 0
                assert await share(path, **salted) > 0


async def test_an_invalid_salt_is_refused_by_name() -> None:
    async with clients() as (_, (a, _)):
        for salt in ("", "x" * 257, 5, ["x"], {}):
            for path in ("/completions", "/chat/completions"):
                body = {"cache_salt": salt, "prompt": "x", "messages": []}
                with pytest.raises(openai.BadRequestError) as caught:
                    await a.post(path, body=body, cast_to=object)
                assert caught.value.param == "cache_salt"
        assert (await complete(a, [5], cache_salt=None)).choices
        assert (await complete(a, [5], cache_salt="ü" * 256)).choices
