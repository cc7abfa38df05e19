"""A trainer that pauses `minisgl serve --replicas 2` while both replicas answer."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
from support.forked_replicas import forked_demo
from support.processes import wait_for_ready

OPTIONS = ("--replicas", "2", "--router-policy", "round-robin", "--max-running-requests", "1")
TRAINER = ("--trainer", "--admin-key", "admin")
ASKED: dict[str, Any] = {"prompt": [300, 301], "ignore_eos": True, "return_token_ids": True}
LONG = ASKED | {"max_tokens": 2000, "stream": True}


async def streamed(client: httpx.AsyncClient, begun: asyncio.Event) -> tuple[str, int]:
    """How a long answer ends, and its tokens. begun: set with the first one."""
    reason, num_tokens = "", 0
    async with client.stream("POST", "/v1/completions", json=LONG) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                num_tokens += len(choice.get("token_ids", ()))
                reason = choice["finish_reason"] or reason
            if num_tokens:
                begun.set()
    return reason, num_tokens


async def num_queued(client: httpx.AsyncClient) -> int:
    page = (await client.get("/metrics")).text
    return sum(map(int, re.findall(r"minisgl_queued_requests\{.*\} (\d+)", page)))


async def test_a_pause_ends_what_both_replicas_have_and_later_requests_wait(
    tmp_path: Path,
) -> None:
    with forked_demo(tmp_path, *OPTIONS, *TRAINER) as (process, url):
        await asyncio.to_thread(wait_for_ready, process, url, 2)
        headers = {"authorization": "Bearer admin"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None) as client:
            ends: list[tuple[str, int]] = []
            while {reason for reason, _ in ends} != {"abort"}:  # one may have come to its end
                begun = [asyncio.Event() for _ in range(4)]  # on each replica one, and one waits
                answers = [asyncio.ensure_future(streamed(client, each)) for each in begun]
                while not any(  # noqa: ASYNC110 - asks a server
                    each.done() for each in answers
                ) and (sum(each.is_set() for each in begun) < 2 or await num_queued(client) < 2):
                    await asyncio.sleep(0)
                (await client.post("/pause")).raise_for_status()
                ends = await asyncio.gather(*answers)
                later = [
                    asyncio.ensure_future(
                        client.post("/v1/completions", json=ASKED | {"max_tokens": 2})
                    )
                    for _ in range(2)
                ]
                while await num_queued(client) < 2:
                    pass
                assert not any(each.done() for each in later)
                (await client.post("/resume")).raise_for_status()
                for answer in await asyncio.gather(*later):
                    (choice,) = answer.raise_for_status().json()["choices"]
                    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 2
            num_tokens = sorted(count for _, count in ends)
            assert num_tokens[:2] == [0, 0] < num_tokens[2:] and num_tokens[-1] < 2000
