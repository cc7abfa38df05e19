"""Two engines of the demo model, on any device, one of which continues what the other computes."""

from __future__ import annotations

import asyncio
from typing import Any

from support.parity import complete, greedy

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine

PROMPT = [*range(300, 500)]


async def sharing_engine(**options: Any) -> AsyncEngine:
    return await AsyncEngine.start(EngineConfig(host_cache=0.05, num_pages=60, **options))


async def check_handover(prefill: AsyncEngine, decode: AsyncEngine, address: str) -> None:
    """Both share pages, `prefill` at `address`."""
    assert await prefill.offer_pages(PROMPT)
    assert await decode.fetch_pages(address, PROMPT)
    whole = await complete(prefill, PROMPT, greedy(8))
    output = await complete(decode, PROMPT, greedy(8))
    assert output.token_ids == whole.token_ids
    assert output.num_cached_tokens == whole.num_cached_tokens > len(PROMPT) - 32
    assert decode.stats().counters.num_host_tokens == output.num_cached_tokens
    sent = prefill.stats().transfers
    while sent is None or not sent.sent.num_transfers:
        await asyncio.sleep(0.01)  # the other engine may be the first to know
        sent = prefill.stats().transfers
    received = decode.stats().transfers
    assert received is not None and sent.sent.num_bytes == received.received.num_bytes > 0
    for engine in (prefill, decode):
        engine.audit()
