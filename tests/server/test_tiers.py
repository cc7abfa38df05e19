"""What clients and operators see of a host cache."""

from __future__ import annotations

import json
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from support.fake_runner import FakeDisk
from support.gated_runner import Gated, gated_server

from minisgl.server.stats_log import Interval

USAGE = {"include_usage": True}
KEYS = ("key-of-a", "key-of-b")
PAGE = 4
PROMPT = [4 + place % 30 for place in range(60)]
# Pages for two such prompts.
FEW: dict[str, Any] = {"num_pages": 37, "host_cache": 0.1, "max_seq_len_override": 140}


async def ask(gated: Gated, prompt: list[int], key: str = KEYS[0], **fields: Any) -> dict[str, int]:
    """The details of the prompt's usage."""
    body = {"prompt": prompt, "max_tokens": 3, "seed": 0, "ignore_eos": True, **fields}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gated.port}/v1") as client:
        headers = {"authorization": f"Bearer {key}"}
        answer = await client.post("/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        assert answer.json()["choices"][0]["text"] == gated.text(prompt, 3)
        details: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"]
        return details
    last = json.loads(answer.text.split("data: ")[-2])
    streamed: dict[str, int] = last["usage"]["prompt_tokens_details"]
    return streamed


async def push_out(gated: Gated, first: int) -> None:
    for token in (first, first + 1):
        await ask(gated, [token] * 65)


async def test_usage_metrics_and_the_log_say_what_came_from_host_memory() -> None:
    async with gated_server(api_key=KEYS, **FEW) as gated:
        before = gated.engine.stats()
        assert await ask(gated, PROMPT) == {"cached_tokens": 0}
        assert await ask(gated, PROMPT) == {"cached_tokens": 56}
        await push_out(gated, 40)
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        found = await ask(gated, PROMPT, **stream)
        assert found["cached_tokens"] == 56
        from_host = found["host_cached_tokens"]
        assert 0 < from_host <= 56
        async with httpx.AsyncClient() as client:
            metrics = await client.get(f"http://127.0.0.1:{gated.port}/metrics")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(metrics.text)
            for sample in family.samples
        }
        stats = gated.engine.stats()
        assert stats.host is not None
        hits = "minisgl_tier_hit_tokens_total"
        assert samples[hits, "host"] == from_host
        assert samples[hits, "device"] == 2 * 56 - from_host
        held = stats.num_pages - stats.num_free_pages
        assert samples["minisgl_tier_tokens", "device"] == held * PAGE > 0
        assert samples["minisgl_tier_tokens", "host"] == stats.host.num_used_pages * PAGE > 0
        num_offloaded, num_loaded = gated.runner.num_copied
        for direction, count in (("offload", num_offloaded), ("load", num_loaded)):
            assert samples["minisgl_tier_copied_bytes_total", direction] == 1000 * count > 0
            assert samples["minisgl_tier_copy_seconds_total", direction] == count / 1000
        line = Interval(before, stats, 5.0).describe()
        share = from_host / stats.counters.num_prompt_tokens
        assert f"from host: {share:.2f}, host usage: {stats.host.usage:.2f}, loaded: " in line
        assert "GB at 0.0 GB/s, offloaded: " in line


async def test_without_a_host_cache_nothing_is_said_of_one() -> None:
    async with gated_server(api_key=KEYS, num_pages=37, max_seq_len_override=140) as gated:
        assert await ask(gated, PROMPT) == {"cached_tokens": 0}
        await push_out(gated, 40)
        assert "host_cached_tokens" not in await ask(gated, PROMPT)
        async with httpx.AsyncClient() as client:
            metrics = await client.get(f"http://127.0.0.1:{gated.port}/metrics")
        assert "minisgl_tier" not in metrics.text
        stats = gated.engine.stats()
        assert stats.host is None and "host" not in Interval(stats, stats, 5.0).describe()


async def test_keys_and_salts_share_no_prefix_in_host_memory() -> None:
    async with gated_server(api_key=KEYS, **FEW) as gated:
        await ask(gated, PROMPT)
        await ask(gated, PROMPT, cache_salt="pepper")
        await push_out(gated, 40)
        nothing = {"cached_tokens": 0}
        assert await ask(gated, PROMPT, KEYS[1]) == nothing
        assert await ask(gated, PROMPT, cache_salt="salt") == nothing
        await push_out(gated, 42)
        assert (await ask(gated, PROMPT, cache_salt="pepper"))["host_cached_tokens"] > 0
        assert (await ask(gated, PROMPT))["host_cached_tokens"] > 0
        assert (await ask(gated, PROMPT, KEYS[1]))["host_cached_tokens"] > 0


async def test_usage_metrics_and_the_log_say_what_came_from_disk_after_a_restart() -> None:
    disk = FakeDisk()
    async with gated_server(api_key=KEYS, disk=disk, **FEW) as gated:
        await ask(gated, PROMPT)
        await ask(gated, PROMPT, cache_salt="pepper")
    assert len(disk.pages) >= 2 * len(PROMPT) // PAGE
    # The keys have changed their places, and there is one more.
    async with gated_server(api_key=("new-key", *KEYS[::-1]), disk=disk, **FEW) as gated:
        before = gated.engine.stats()
        nothing = {"cached_tokens": 0}
        for key in ("new-key", KEYS[1]):
            assert await ask(gated, PROMPT, key) == nothing
        assert await ask(gated, PROMPT, cache_salt="salt") == nothing
        from_disk = {"cached_tokens": 56, "disk_cached_tokens": 56}
        assert await ask(gated, PROMPT, stream=True, stream_options=USAGE) == from_disk
        assert await ask(gated, PROMPT, cache_salt="pepper") == from_disk
        async with httpx.AsyncClient() as client:
            metrics = await client.get(f"http://127.0.0.1:{gated.port}/metrics")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(metrics.text)
            for sample in family.samples
        }
        assert samples["minisgl_tier_hit_tokens_total", "disk"] == 2 * 56
        assert samples["minisgl_tier_hit_tokens_total", "device"] == 0
        num_written, num_read = gated.runner.num_moved
        for direction, count in (("write", num_written), ("read", num_read)):
            assert samples["minisgl_tier_copied_bytes_total", direction] == 1000 * count
            assert samples["minisgl_tier_copy_seconds_total", direction] == count / 1000
        assert num_read == 2 * 56 // PAGE
        stats = gated.engine.stats()
        share = 2 * 56 / stats.counters.num_prompt_tokens
        line = Interval(before, stats, 5.0).describe()
        assert f"from disk: {share:.2f}, read: 0.0 GB at 0.0 GB/s, written: " in line
