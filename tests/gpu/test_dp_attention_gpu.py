"""GPUs that divide requests in attention, against one rank and transformers on the CPU, in
float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.parity import case_of
from support.pipelines import mixed_outcomes
from support.tensor_parallel import check_with_aborts, short_case_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "cuda_graph_max_bs": 8,
    "tp": 2,
    "dp_attention": True,
}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "moe-60", "gpt-oss"])
def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    check_with_aborts(short_case_of(name), **ON_GPU)


def test_tokens_of_an_adopted_model_equal_those_of_transformers() -> None:
    check_with_aborts(short_case_of("qwen3"), model_impl="adopted", **ON_GPU)


@pytest.mark.parametrize("disable_pynccl", [False, True])
@pytest.mark.parametrize("cuda_graph_max_bs", [0, 8])
def test_mixed_rows_get_the_outputs_of_the_cpu(
    cuda_graph_max_bs: int, disable_pynccl: bool
) -> None:
    case = case_of("llama-biased")
    options = ON_GPU | {"cuda_graph_max_bs": cuda_graph_max_bs, "disable_pynccl": disable_pynccl}
    assert mixed_outcomes(case, **options) == mixed_outcomes(case)
