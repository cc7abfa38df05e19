"""Whole experts on each rank: their kernels on a GPU, and the tokens of ranks on GPUs of their own
against transformers on the CPU, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.fp8_expert_cases import STEP
from support.rank_expert_cases import (
    FORMATS,
    check_choose_of,
    check_parts,
)
from support.tensor_parallel import check_with_aborts, short_case_of

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 5, "ep": True}
SIZES = [tp for tp in (2, 4) if tp <= torch.cuda.device_count()]


@pytest.mark.parametrize("num_rows", [1, 3, 24, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_the_parts_of_all_ranks_add_up_to_the_whole(name: str, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    # Sums on FP8 tensor cores are rounded, so a number may fall to the next one of e4m3.
    tolerance = STEP if name.startswith("fp8") else 1e-3
    check_parts(FORMATS[name](GPU), num_rows, device=GPU, tolerance=tolerance)


def test_a_rank_chooses_its_own_experts() -> None:
    check_choose_of(9, device=GPU)


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("name", ["moe", "moe-5", "moe-60", "gpt-oss", "glm-flash"])
def test_greedy_tokens_equal_those_of_transformers(name: str, tp: int) -> None:
    check_with_aborts(short_case_of(name), tp=tp, **ON_GPU)
