"""Runs of several ranks with everything at once: chunks, cached prefixes, retraction, aborts."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from support.parity import Case, batch, case_of, count_excused, cut, greedy, load_engine

from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream
from minisgl.request import RequestOutput

NUM_TOKENS = 20
# Prompts in chunks, prefixes that are found again, and so few pages that requests are retracted.
EVERYTHING: dict[str, Any] = {
    "max_prefill_length": 16,
    "page_size": 4,
    "num_pages": 30,
    "max_seq_len_override": 100,
    "schedule_conservativeness": 0.02,
}


def short_case_of(name: str) -> Case:
    return shortened(case_of(name))


def shortened(case: Case) -> Case:
    """Some prompts of a case, with short outputs."""
    short = cut(case, NUM_TOKENS)
    return dataclasses.replace(short, prompts=short.prompts[1:5], runs=short.runs[1:5])


def check_with_aborts(case: Case, **options: Any) -> None:
    """The case's prompts beside others, which leave in the queue, in their prompt or in decode."""

    async def leave(stream: OutputStream, num_deltas: int) -> None:
        for _ in range(num_deltas):
            await anext(stream)
        stream.abort()

    async def run_all(engine: AsyncEngine) -> list[RequestOutput]:
        leaving = [engine.submit(prompt[::-1], greedy(20)) for prompt in case.prompts[:3]]
        aborts = [leave(stream, 3 * place) for place, stream in enumerate(leaving)]
        outputs, *_ = await asyncio.gather(
            batch(engine, case.prompts, [greedy(NUM_TOKENS)] * len(case.prompts)), *aborts
        )
        return outputs

    async def run() -> None:
        given = {**EVERYTHING, **options}
        async with AsyncEngine(load_engine(case.folder, **given)) as engine:
            await count_excused(engine, case, await run_all(engine))
            again = await batch(engine, case.prompts[-1:], [greedy(1)])
            assert again[0].num_cached_tokens > 0
            stats = engine.stats()
            assert stats.counters.num_retractions > 0
            assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages

    asyncio.run(run())
