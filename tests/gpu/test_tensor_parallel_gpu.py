"""Ranks on GPUs of their own against one rank, and against transformers on the CPU, in float32."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from support.checkpoints import EXPERT_SPECS, SPECS
from support.parity import SAMPLED, batch, case_of, load_engine
from support.tensor_parallel import check_with_aborts, short_case_of

from minisgl.engine import AsyncEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 5}
SIZES = [tp for tp in (2, 4, 8) if tp <= torch.cuda.device_count()]
ALL_SPECS = {spec.name: spec for spec in (*SPECS, *EXPERT_SPECS)}


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("name", ALL_SPECS)
def test_greedy_tokens_of_several_ranks_equal_those_of_transformers(name: str, tp: int) -> None:
    if ALL_SPECS[name].num_heads % tp:
        pytest.skip(f"{ALL_SPECS[name].num_heads} heads do not divide by {tp}")
    check_with_aborts(short_case_of(name), tp=tp, **ON_GPU)


@pytest.mark.parametrize("disable_pynccl", [False, True])
@pytest.mark.parametrize("cuda_graph_max_bs", [0, 8])
@pytest.mark.parametrize("tp", SIZES)
def test_sampled_tokens_of_several_ranks_equal_those_of_the_cpu(
    tp: int, cuda_graph_max_bs: int, disable_pynccl: bool
) -> None:
    case = case_of("llama3")
    on_gpu = ON_GPU | {"cuda_graph_max_bs": cuda_graph_max_bs, "disable_pynccl": disable_pynccl}

    async def run(options: dict[str, Any]) -> list[list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            outputs = await batch(engine, case.prompts, SAMPLED)
            return [output.token_ids for output in outputs]

    assert asyncio.run(run({"tp": tp, **on_gpu})) == asyncio.run(run({}))
