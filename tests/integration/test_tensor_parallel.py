"""Several ranks, real processes over gloo, give the tokens of one."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from support.checkpoints import SPECS
from support.parity import SAMPLED, batch, case_of, greedy, load_engine
from support.tensor_parallel import NUM_TOKENS, check_with_aborts, short_case_of

from minisgl.engine import AsyncEngine

# With a KV head for each rank, with half of one and with a quarter, with biases and without, tied
# and untied; the 14 heads of the other Qwen2 do not divide by 4.
ON_FOUR = ["llama-biased", "mistral", "qwen2-12-heads", "qwen3-biased"]
# Ranks know nothing of RoPE, so its variants are left to one rank.
ON_ONE = ["llama-linear", "llama-dynamic", "llama-yarn"]
ON_TWO = [spec.name for spec in SPECS if spec.name not in (*ON_ONE, *ON_FOUR)]


@pytest.mark.parametrize(
    ("name", "tp"), [(name, 2) for name in ON_TWO] + [(name, 4) for name in ON_FOUR]
)
def test_greedy_tokens_of_several_ranks_equal_those_of_transformers(name: str, tp: int) -> None:
    check_with_aborts(short_case_of(name), tp=tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_sampled_tokens_of_several_ranks_equal_those_of_one(tp: int) -> None:
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
