"""The whole engine with an FP8 KV cache against transformers that rounds K and V alike: whole,
chunked, cached, retracted, alone and in company, the tokens are the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fp8_kv import fp8_case
from support.parity import (
    FEW_PAGES,
    batch,
    case_of,
    check,
    count_excused,
    greedy,
    load_engine,
)

from minisgl.config import FP8
from minisgl.engine import AsyncEngine

WAYS: list[dict[str, Any]] = [
    {},
    {"max_prefill_length": 7, "page_size": 1},
    {"alone": True, "cache_type": "naive"},
    {"overlap": False, "page_size": 64},
    {"padded": 4, "max_prefill_length": 7, "page_size": 4},
    FEW_PAGES,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ",".join(way) or "plain")
def test_every_way_gives_the_tokens_of_rounded_keys_and_values(way: dict[str, Any]) -> None:
    stats, _ = check(fp8_case("llama3", scaled=True), **way)
    assert bool(stats.counters.num_retractions) == (way is FEW_PAGES)


def test_without_scales_in_the_checkpoint_they_are_one() -> None:
    check(fp8_case("qwen3", scaled=False), kv_cache_dtype="fp8")


def test_rounding_shows() -> None:
    """So that the tests above compare with what they say: without it other tokens come."""
    case = fp8_case("llama3", scaled=True)
    with pytest.raises(AssertionError, match="no close call"):
        check(case, kv_cache_dtype="model")
    assert [run.token_ids for run in case.runs] != [run.token_ids for run in case_of("llama3").runs]


def test_scales_of_another_layer_show() -> None:
    case = fp8_case("llama3", scaled=True)
    engine = load_engine(case.folder)
    kv = engine.runner._computation.states
    kv[0], kv[1] = kv[1], kv[0]

    async def run() -> None:
        async with AsyncEngine(engine) as running:
            outputs = await batch(running, case.prompts, [greedy()] * len(case.prompts))
            with pytest.raises(AssertionError, match="no close call"):
                await count_excused(running, case, outputs)

    asyncio.run(run())


def test_a_warm_cache_gives_what_a_cold_one_does() -> None:
    case = fp8_case("qwen3", scaled=True)

    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder)) as engine:
            params = [greedy()] * len(case.prompts)
            await count_excused(engine, case, await batch(engine, case.prompts, params))
            warm = await batch(engine, case.prompts, params)
            await count_excused(engine, case, warm)
            assert any(output.num_cached_tokens for output in warm)

    asyncio.run(run())


def test_a_page_takes_one_byte_a_number() -> None:
    case = fp8_case("llama3", scaled=True)
    fp8, plain = (load_engine(case.folder, kv_cache_dtype=kind) for kind in ("auto", "model"))
    assert (fp8.config.kv_dtype, plain.config.kv_dtype) == (FP8, "float32")
    assert 4 * fp8.runner.state_bytes == plain.runner.state_bytes


def test_several_ranks() -> None:
    check(fp8_case("llama3", scaled=True), tp=2)
