"""`serve --roles`: prompts computed by one engine and continued by another, with real processes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from support.processes import replica_sockets, wait_for_ready
from support.serving_processes import demo

PATH = "/v1/completions"
NUM_TOKENS = 900  # of a prompt, whose text in a body is long enough for a transfer
PREFILLS = "minisgl_router_prefills_total"
TRANSFERS = "minisgl_kv_transfers_total"


def prompt(seed: int, shared: int = 0) -> list[int]:
    """Token ids, of which the first `shared` are those of all seeds."""
    own = random.Random(seed)
    every = random.Random(0)
    return [every.randrange(300, 2000) for _ in range(shared)] + [
        own.randrange(300, 2000) for _ in range(NUM_TOKENS - shared)
    ]


async def ask(client: httpx.AsyncClient, token_ids: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": token_ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    answer = await client.post(PATH, json={**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def host_tokens(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"].get("host_cached_tokens", 0)
    return count


async def counted(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """The samples of /metrics by name and the values of their labels but that of the router."""
    page = (await client.get("/metrics")).text
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != "router")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_disaggregated_and_whole_give_the_same_tokens_and_a_killed_engine_loses_no_request(
    tmp_path: Path,
) -> None:
    options = ("--replicas", "2", "--roles", "prefill,decode", "--num-pages", "400")
    with demo(tmp_path, *options) as (process, url):
        await asyncio.to_thread(wait_for_ready, url, 2)
        decode = httpx.AsyncHTTPTransport(uds=replica_sockets(tmp_path)[1])
        async with (
            httpx.AsyncClient(base_url=url, timeout=60) as client,
            httpx.AsyncClient(base_url="http://localhost", transport=decode, timeout=60) as alone,
        ):
            prompts = [prompt(seed, shared=400 * (seed % 2)) for seed in range(1, 7)]
            wholes = [tokens_of(await ask(alone, each, cache_salt="whole")) for each in prompts]

            answers = await asyncio.gather(*(ask(client, each) for each in prompts))
            assert [tokens_of(each) for each in answers] == wholes
            assert all(host_tokens(each) >= NUM_TOKENS // 2 for each in answers)
            found = await counted(client)
            print(found)
