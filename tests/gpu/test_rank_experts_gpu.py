"""Whole experts on each rank: their kernels on a GPU, and the tokens of ranks on GPUs of their own
against transformers on the CPU, in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.copied_experts import copied
from support.parity import batch, case_of, greedy, load_engine
from support.rank_expert_cases import (
    FORMATS,
    check_choose_of,
    check_copies,
    check_parts,
    check_tally,
)
from support.tensor_parallel import check_with_aborts, short_case_of

from minisgl.engine import AsyncEngine
from minisgl.kernels.moe.tally import ExpertTokens

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 5, "ep": True}
SIZES = [tp for tp in (2, 4) if tp <= torch.cuda.device_count()]


@pytest.mark.parametrize("num_rows", [1, 3, 24, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_the_parts_of_all_ranks_add_up_to_the_whole(name: str, num_rows: int) -> None:
    tolerance = 3e-2 if name.startswith("fp8") else 1e-3
    check_parts(FORMATS[name](GPU), num_rows, device=GPU, tolerance=tolerance)


def test_a_rank_chooses_its_own_experts_and_counts_all() -> None:
    check_choose_of(9, device=GPU)
    check_copies(device=GPU)
    check_tally(device=GPU)


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("name", ["moe", "moe-5", "moe-60", "gpt-oss"])
def test_greedy_tokens_equal_those_of_transformers(name: str, tp: int) -> None:
    check_with_aborts(short_case_of(name), tp=tp, **ON_GPU)


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("name", ["moe-5", "moe-60", "gpt-oss", "glm-flash"])
def test_tokens_with_copies_of_experts_equal_those_of_transformers(
    name: str, tp: int, tmp_path: Path
) -> None:
    case = short_case_of(name)
    check_with_aborts(case, **copied(case.folder, tmp_path, tp=tp, **ON_GPU))


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("by_requests", [False, True])
def test_captured_steps_count_no_padding(by_requests: bool, tp: int, tmp_path: Path) -> None:
    case = case_of("moe-5")
    options = copied(case.folder, tmp_path, tp=tp, dp_attention=by_requests, **ON_GPU)

    async def run() -> ExpertTokens | None:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            await batch(engine, case.prompts[:3], [greedy(6)] * 3)
            return engine.stats().experts

    counted = asyncio.run(run())
    num_rows = sum(len(prompt) + 6 - 1 for prompt in case.prompts[:3])
    assert counted is not None and sum(counted.by_rank) == num_rows * 2 * case.spec.num_layers
