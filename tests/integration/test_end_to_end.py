"""The bundled model behind a real socket, with the clients that people use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
from support.gated_runner import served
from support.waiting import until

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine

HELLO: Any = [{"role": "user", "content": "Hello, who are you, and what can you do for me today?"}]


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[AsyncEngine, openai.AsyncOpenAI]]:
    async with (
        await AsyncEngine.start(EngineConfig(device="cpu", **options)) as engine,
        served(engine) as (_, port),
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0
        ) as client,
    ):
        yield engine, client


async def test_streamed_and_whole_answers_agree() -> None:
    async with serving() as (_, client):
        whole = await client.chat.completions.create(
            model="demo", messages=HELLO, max_tokens=30, temperature=0
        )
        stream = await client.chat.completions.create(
            model="demo",
            messages=HELLO,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert whole.usage is not None and chunks[-1].usage is not None
        assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens
        details = chunks[-1].usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16 > 0


async def test_64_concurrent_streams_give_what_each_gives_alone() -> None:
    async with serving() as (_, client):

        async def ask(number: int) -> str:
            stream = await client.completions.create(
                model="demo",
                prompt=f"Number {number} is",
                max_tokens=24,
                seed=number,
                stream=True,
            )
            return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

        together = await asyncio.gather(*map(ask, range(64)))
        assert [await ask(number) for number in range(0, 64, 8)] == together[::8]
        assert len(set(together)) > 32


async def test_a_client_that_disconnects_in_mid_stream_frees_its_pages() -> None:
    async with serving(cache_type="naive") as (engine, client):
        free = engine.stats().num_free_pages
        stream = await client.completions.create(
            model="demo",
            prompt="Hello",
            max_tokens=1900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        assert engine.stats().num_running == 1
        assert engine.stats().num_free_pages < free
        await stream.close()
        await until(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_free_pages == free
