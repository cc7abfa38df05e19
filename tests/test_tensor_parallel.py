"""Several ranks, real processes over gloo, give the tokens of one."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from checkpoints import SPECS, GreedyRun
from test_parity import SAMPLED, Case, batch, case_of, count_excused, greedy, load_engine

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
# Every architecture, with a KV head for each rank and with fewer, with biases and without, tied
# and untied; 14 heads do not divide by 4.
ON_FOUR = ["llama3", "llama-biased", "mistral", "qwen2-12-heads", "qwen3", "qwen3-biased"]


def short_case_of(name: str) -> Case:
    case = case_of(name)
    runs = [GreedyRun(run.token_ids[:NUM_TOKENS], run.logits[:NUM_TOKENS]) for run in case.runs]
    return dataclasses.replace(case, prompts=case.prompts[1:5], runs=runs[1:5])


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
        async with AsyncEngine(load_engine(case.folder, **EVERYTHING, **options)) as engine:
            await count_excused(engine, case, await run_all(engine))
            again = await batch(engine, case.prompts[-1:], [greedy(1)])
            assert again[0].num_cached_tokens > 0
            stats = engine.stats()
            assert stats.counters.num_retractions > 0
            assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "tp"), [(spec.name, 2) for spec in SPECS] + [(name, 4) for name in ON_FOUR]
)
def test_greedy_tokens_are_those_of_transformers(name: str, tp: int) -> None:
    check_with_aborts(short_case_of(name), tp=tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_sampled_tokens_are_those_of_one_rank(tp: int) -> None:
    """Without filters the ranks exchange their best tokens, else the logits; in shapes that would
    be captured on a GPU, too."""
    case = case_of("llama3")
    params = [dataclasses.replace(one, max_tokens=NUM_TOKENS) for one in SAMPLED]

    async def run(options: dict[str, Any]) -> list[list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            together = await batch(engine, case.prompts, params)
            unfiltered = await batch(engine, case.prompts[:2], [params[0], greedy(NUM_TOKENS)])
            scored = await batch(
                engine,
                case.prompts[:2],
                [dataclasses.replace(params[0], logprobs=3, prompt_logprobs=3)] * 2,
            )
            return [output.token_ids for output in (*together, *unfiltered, *scored)]

    wanted = asyncio.run(run({}))
    assert asyncio.run(run({"tp": tp})) == wanted
    if tp == 2:
        assert asyncio.run(run({"tp": tp, "padded": 4})) == wanted
