"""`minisgl serve --replicas 2` with the demo model: what is cached, a killed replica, the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
from support.forked_replicas import forked_demo
from support.processes import (
    children_of,
    replica_sockets,
    wait_for_ready,
    wait_until_nothing_is_left,
)
from support.routing import front
from support.serving import demo_engine, served

from minisgl.router.config import ROUND_ROBIN

CHAT = "/v1/chat/completions"
# Oddly many, so that turns that are dealt out in order go to both replicas.
NUM_CONVERSATIONS, NUM_TURNS = 13, 5
NUM_STREAMS = 64
# Of each replica. All conversations need some 180, so that both have room for each of them once.
NUM_PAGES = 130


async def cached_share(url: str, salt: str) -> float:
    """The share of the prompt tokens of all conversations that was found in a cache."""
    num_prompt_tokens = num_cached_tokens = 0

    async def converse(client: httpx.AsyncClient, number: int) -> None:
        nonlocal num_prompt_tokens, num_cached_tokens
        messages: list[dict[str, Any]] = []
        for turn in range(NUM_TURNS):
            text = f"{number} and {turn}: what is the capital of the country {number}? " * 2
            messages.append({"role": "user", "content": text})
            asked = {"messages": messages, "max_tokens": 4, "ignore_eos": True, "cache_salt": salt}
            answer = (await client.post(CHAT, json=asked)).raise_for_status().json()
            messages.append(answer["choices"][0]["message"])
            num_prompt_tokens += answer["usage"]["prompt_tokens"]
            num_cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(base_url=url) as client:
        await asyncio.gather(*(converse(client, number) for number in range(NUM_CONVERSATIONS)))
    return num_cached_tokens / num_prompt_tokens


async def end_of_stream(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """The last chunk of a stream before [DONE]."""
    messages = [{"role": "user", "content": f"Count from {number}."}]
    asked = {"messages": messages, "max_tokens": 24, "ignore_eos": True, "stream": True}
    async with client.stream("POST", CHAT, json=asked) as stream:
        assert stream.status_code == 200
        *_, last, done = [line async for line in stream.aiter_lines() if line]
    assert done == "data: [DONE]"
    ended: dict[str, Any] = json.loads(last.removeprefix("data: "))
    return ended


async def num_sent(client: httpx.AsyncClient) -> str:
    """The number of requests that replica 0 was sent."""
    page = (await client.get("/metrics")).text
    found = re.search(r'minisgl_router_requests_total\{router="0",replica="0"\} (\S+)', page)
    assert found is not None
    return found[1]


async def test_two_replicas_cache_like_one_engine_and_a_killed_one_comes_back(
    tmp_path: Path,
) -> None:
    with served(lambda: demo_engine(num_pages=2 * NUM_PAGES)) as one:
        alone = await cached_share(one.url, "alone")
    options = ("--replicas", "2", "--num-pages", str(NUM_PAGES), "--log-format", "json")
    with forked_demo(tmp_path, *options) as (process, url):
        await asyncio.to_thread(wait_for_ready, process, url, 2)
        routed = await cached_share(url, "routed")
        paths = replica_sockets(tmp_path)
        async with front(paths, ROUND_ROBIN) as (in_turns, _):
            scattered = await cached_share(in_turns, "scattered")
        print(f"cached: alone {alone:.3f}, routed {routed:.3f}, in turns {scattered:.3f}")
        assert abs(routed - alone) < 0.05
        assert scattered < routed - 0.15

        killed = next(pid for pid, part in children_of(tmp_path).items() if part[-1] == "0")
        async with httpx.AsyncClient(base_url=url) as client:
            before = await num_sent(client)
            streams = [
                asyncio.ensure_future(end_of_stream(client, number))
                for number in range(NUM_STREAMS)
            ]
            while await num_sent(client) == before:  # noqa: ASYNC110 - asks a server
                await asyncio.sleep(0)
            os.kill(killed, signal.SIGKILL)
            ends = await asyncio.gather(*streams)
            codes = [end["error"]["code"] for end in ends if "error" in end]
            assert set(codes) <= {"replica_lost"} and len(codes) < NUM_STREAMS
            finished = [end for end in ends if "error" not in end]
            assert {end["choices"][0]["finish_reason"] for end in finished} == {"length"}
            await asyncio.to_thread(wait_for_ready, process, url, 2)
            assert await end_of_stream(client, 0)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 0
        await asyncio.to_thread(wait_until_nothing_is_left, tmp_path)
        assert process.stderr is not None
        log = [json.loads(line) for line in process.stderr]
        messages = "\n".join(line.get("message", "") for line in log)
        assert 'completions.create(model="demo", ' in messages  # the name that replicas answer to
        assert messages.count("This is the bundled demo model") == 1
        tokens = {line["process"] for line in log if "output_tokens" in line}
        assert tokens == {"replica 0", "replica 1"}
