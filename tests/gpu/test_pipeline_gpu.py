"""Stages on GPUs of their own against one rank on the CPU, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.parity import FEW_PAGES, Case, case_of
from support.pipelines import mixed_outcomes
from support.tensor_parallel import check_with_aborts, short_case_of

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs"),
]

ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32"}


def sizes() -> list[dict[str, int]]:
    found = [{"pp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "tp": 4}]
    return [size for size in found if size["pp"] * size.get("tp", 1) <= NUM_GPUS]


@pytest.mark.parametrize("size", sizes(), ids=str)
@pytest.mark.parametrize("cuda_graph_max_bs", [0, 5])
def test_greedy_tokens_of_stages_equal_those_of_transformers(
    size: dict[str, int], cuda_graph_max_bs: int
) -> None:
    """Four layers, some with experts, whose head is the embedding."""
    options = ON_GPU | size | {"cuda_graph_max_bs": cuda_graph_max_bs}
    check_with_aborts(short_case_of("moe-60"), **options)


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama-biased")


@pytest.fixture(scope="module")
def expected(case: Case) -> list[list[int]]:
    return [token_ids for token_ids, *_ in mixed_outcomes(case)]


@pytest.mark.parametrize("size", [size for size in sizes() if size["pp"] == 2], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph_max_bs": 0},
        {"cuda_graph_max_bs": 16, "max_prefill_length": 16},
        {"cuda_graph_max_bs": 16, "overlap": False, **FEW_PAGES},
        {"cuda_graph_max_bs": 16, "disable_pynccl": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_mixed_rows_of_stages_get_the_tokens_of_the_cpu(
    size: dict[str, int], options: dict[str, Any], case: Case, expected: list[list[int]]
) -> None:
    found = mixed_outcomes(case, **ON_GPU, **size, **options)
    assert [token_ids for token_ids, *_ in found] == expected
