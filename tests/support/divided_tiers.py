"""Runs of ranks that divide requests, each with host memory of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from support.checkpoints import GreedyRun
from support.parity import batch, greedy, load_engine

from minisgl.engine import AsyncEngine

DP: dict[str, Any] = {"tp": 2, "dp_attention": True}
# So few pages that a long prompt pushes all others out of the device's cache.
FEW: dict[str, Any] = {"page_size": 4, "num_pages": 40, "max_seq_len_override": 156}
NUM_TOKENS = 8


class AnyCase(Protocol):
    folder: Any
    prompts: list[list[int]]
    runs: Sequence[GreedyRun]


def check_own_tiers(case: AnyCase, *, disk: str | None = None, **options: Any) -> None:
    """Ask all prompts at once, push them out of each rank's device, and ask them again: the tokens
    are right, and each rank loads. disk: a folder; then a second engine finds them there."""
    given = {**FEW, **DP, "host_cache": 0.02, **options}
    if disk is not None:
        given["disk_cache"] = disk

    async def ask(engine: AsyncEngine) -> int:
        """Returns how many tokens were cached of all prompts."""
        params = [greedy(NUM_TOKENS)] * len(case.prompts)
        outputs = await batch(engine, case.prompts, params)
        for output, run in zip(outputs, case.runs, strict=True):
            assert output.token_ids == run.token_ids[:NUM_TOKENS], "a token differs"
        engine.audit()
        return sum(output.num_cached_tokens for output in outputs)

    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder, **given)) as engine:
            kv = engine._scheduler.kv
            await ask(engine)
            long = [[token] * 150 for token in (3, 4)]  # one on each rank
            await batch(engine, long, [greedy(2)] * 2)
            assert all(cache.tiers.host.pool.num_used for cache in kv.of_ranks)
            before = engine.stats()
            assert await ask(engine) > 60
            after = engine.stats()
            assert after.counters.num_host_tokens - before.counters.num_host_tokens > 60
            assert all(cache.loads.num_begun for cache in kv.of_ranks)
            assert after.host is not None and after.host.num_used_pages <= after.host.num_pages
            num_used = [cache.tiers.host.pool.num_used for cache in kv.of_ranks]
            assert after.host.num_used_pages == sum(num_used)

    async def run_again() -> None:
        async with AsyncEngine(load_engine(case.folder, **given)) as engine:
            assert await ask(engine) > 60
            assert engine.stats().counters.num_disk_tokens > 60
            assert all(cache.loads.num_begun for cache in engine._scheduler.kv.of_ranks)

    asyncio.run(run())
    if disk is not None:
        asyncio.run(run_again())
