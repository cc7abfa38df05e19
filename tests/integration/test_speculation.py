"""The whole engine with drafts, in float32: the tokens are those that it gives without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.parity import FEW_PAGES, Case, batch, case_of, load_engine

from minisgl.engine import AsyncEngine
from minisgl.engine.stats import EngineStats
from minisgl.request import SamplingParams

# Every second request repeats itself, so that n-grams have something to find.
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={7: 30.0, 8: 29.9}, max_tokens=40, ignore_eos=True),
]


def prompts_of(case: Case) -> list[list[int]]:
    return [*case.prompts, *((prompt[:9] * 4)[:33] for prompt in case.prompts)]


def answers(case: Case, **options: Any) -> tuple[list[list[int]], EngineStats]:
    async def run() -> tuple[list[list[int]], EngineStats]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            prompts = prompts_of(case)
            params = [PARAMS[index % len(PARAMS)] for index in range(len(prompts))]
            outputs = await batch(engine, prompts, params)
            return [output.token_ids for output in outputs], engine.stats()

    return asyncio.run(run())


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1, "max_prefill_length": 7},
        {"padded": 4},
        {"overlap": False},
        FEW_PAGES,
    ],
    ids=["plain", "chunks", "padded", "no overlap", "few pages"],
)
def test_ngrams_change_no_token(num_drafts: int, options: dict[str, Any]) -> None:
    case = case_of("llama3")
    expected, _ = answers(case)
    found, stats = answers(case, speculative="ngram", draft_tokens=num_drafts, **options)
    assert found == expected
    if options is FEW_PAGES:
        assert stats.counters.num_retractions > 0
