"""Several ranks, real processes over gloo, give the tokens of one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from checkpoints import SPECS
from test_parity import (
    FEW_PAGES,
    Case,
    batch,
    case_of,
    count_excused,
    greedy,
    load_engine,
)

from minisgl.engine import AsyncEngine, OutputStream
from minisgl.request import RequestOutput

# Chunks of a few tokens, prefixes that are found again, retraction.
EVERYTHING: dict[str, Any] = {**FEW_PAGES, "max_prefill_length": 7}
# 14 heads do not divide by 4.
ON_FOUR = [spec.name if spec.num_heads % 4 == 0 else "qwen2-12-heads" for spec in SPECS]


async def run_with_aborts(engine: AsyncEngine, case: Case) -> list[RequestOutput]:
    """The case's prompts beside others, which leave in the queue, in their prompt or in decode."""
    leaving = [engine.submit(prompt[::-1], greedy(50)) for prompt in case.prompts]

    async def leave(stream: OutputStream, num_deltas: int) -> None:
        for _ in range(num_deltas):
            await anext(stream)
        stream.abort()

    aborts = [leave(stream, 5 * place) for place, stream in enumerate(leaving)]
    outputs, *_ = await asyncio.gather(
        batch(engine, case.prompts, [greedy()] * len(case.prompts)), *aborts
    )
    return outputs


def check_with_aborts(case: Case, **options: Any) -> None:
    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder, **EVERYTHING, **options)) as engine:
            outputs = await run_with_aborts(engine, case)
            await count_excused(engine, case, outputs)
            again = await batch(engine, case.prompts[-1:], [greedy()])
            assert again[0].num_cached_tokens > 0
            stats = engine.stats()
            assert stats.counters.num_retractions > 0
            assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "tp"), [(spec.name, 2) for spec in SPECS] + [(name, 4) for name in ON_FOUR]
)
def test_greedy_tokens_are_those_of_transformers(name: str, tp: int) -> None:
    check_with_aborts(case_of(name), tp=tp)
