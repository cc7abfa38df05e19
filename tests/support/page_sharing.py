"""Two engines of the demo model, on any device, one of which continues what the other computes."""

from __future__ import annotations

import asyncio
from typing import Any

from support.parity import complete, greedy

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine

PROMPT = [*range(290, 490)]


async def sharing_engine(**options: Any) -> AsyncEngine:
    return await AsyncEngine.start(
        EngineConfig(host_cache=0.05, num_pages=60, max_seq_len_override=256, **options)
    )


async def check_handover(
    prefill: AsyncEngine, decode: AsyncEngine, address: str, *, is_direct: bool
) -> None:
    """Both share pages, `prefill` at `address`; these go through host memory, or past it."""
    assert await prefill.pages.offer(PROMPT)
    assert await decode.pages.fetch(address, PROMPT)
    whole = await complete(prefill, PROMPT, greedy(8))
    output = await complete(decode, PROMPT, greedy(8))
    assert output.token_ids == whole.token_ids
    assert output.num_cached_tokens == whole.num_cached_tokens > len(PROMPT) - 32
    from_host = 0 if is_direct else output.num_cached_tokens
    assert decode.stats().counters.num_host_tokens == from_host
    sent = prefill.stats().transfers
    while sent is None or not sent.sent.num_transfers:
        await asyncio.sleep(0.01)  # the other engine may be the first to know
        sent = prefill.stats().transfers
    received = decode.stats().transfers
    assert received is not None and sent.sent.num_bytes == received.received.num_bytes > 0
    assert sent.sent.num_direct == received.received.num_direct == is_direct
    for engine in (prefill, decode):
        engine.audit()
