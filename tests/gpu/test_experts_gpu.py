"""Experts on a GPU: the kernels at the sizes of Qwen3-30B-A3B and at others, and a small model's
tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.checkpoints import EXPERT_SPECS
from support.expert_cases import check_choose, check_equals, check_mix, check_nan, random_experts
from support.parity import FEW_PAGES, case_of, check

from minisgl.kernels.moe import fused_experts
from minisgl.kernels.moe import reference as experts
from minisgl.kernels.moe.reference import ByRouter, Routing

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NAMES = [*(spec.name for spec in EXPERT_SPECS), "gpt-oss"]
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 5}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"max_prefill_length": 7, "page_size": 4},
    {"cuda_graph_max_bs": 0},
    FEW_PAGES,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 33, 1000])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (60, 4)])
def test_routing_matches_the_reference(
    num_experts: int, top_k: int, num_rows: int, dtype: torch.dtype
) -> None:
    check_choose(
        num_rows,
        num_experts,
        Routing(top_k, normalize=True),
        dtype=dtype,
        device=GPU,
        pdl=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 40, 256, 3000])
@pytest.mark.parametrize("sizes", [(60, 4, 256, 96), (128, 8, 2048, 768)])
def test_fused_experts_match_the_reference(
    num_rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    if dtype == torch.float32 and sizes[0] == 128 and num_rows > 40:
        pytest.skip("slow, and the small sizes show it")
    check_mix(num_rows, *sizes, dtype=dtype, device=GPU, pdl=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 40, 600])
def test_experts_with_biases_and_a_clamped_activation_match_the_reference(
    num_rows: int, dtype: torch.dtype
) -> None:
    check_mix(num_rows, 32, 4, 2880, 2880, dtype=dtype, device=GPU, pdl=True, clamped=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 40, 600])
def test_experts_with_gelu_and_scales_match_the_reference(
    num_rows: int, dtype: torch.dtype
) -> None:
    check_mix(num_rows, 128, 8, 2816, 704, dtype=dtype, device=GPU, pdl=True, gelu=True)


def test_routing_prefers_the_lower_expert_among_equal_logits() -> None:
    check_equals(GPU, pdl=True)


@pytest.mark.parametrize("num_rows", [3, 500])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (60, 4)])
def test_a_nan_row_routes_to_valid_experts_and_harms_no_other_row(
    num_rows: int, num_experts: int, top_k: int
) -> None:
    check_nan(num_rows, num_experts, Routing(top_k, normalize=True), device=GPU, pdl=True)


def test_row_counts_above_the_grid_limit_match_the_reference() -> None:
    check_mix(66_000, 8, 2, 64, 32, dtype=torch.bfloat16, device=GPU, pdl=True)


def test_all_rows_routed_to_the_same_experts_match_the_reference() -> None:
    check_mix(500, 128, 8, 256, 96, dtype=torch.bfloat16, device=GPU, pdl=True, crowded=True)


@pytest.mark.parametrize("num_rows", [1, 50])
def test_a_graph_replay_uses_the_routing_of_its_own_inputs(num_rows: int) -> None:
    weights, routing = random_experts(16, 128, 64, torch.bfloat16, GPU), Routing(4, normalize=True)
    x = torch.randn(num_rows, 128, device=GPU).bfloat16()
    logits = torch.randn(num_rows, 16, device=GPU).bfloat16()

    def run() -> torch.Tensor:
        return fused_experts.fused_experts(x, ByRouter(logits, routing), weights)[0]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(5):
        x.normal_()
        logits.normal_()
        graph.replay()
        wanted = experts.fused_experts(x, weights, ByRouter(logits, routing))
        torch.testing.assert_close(out, wanted, rtol=5e-2, atol=3e-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant) or "plain")
def test_greedy_tokens_equal_those_of_transformers(name: str, variant: dict[str, Any]) -> None:
    check(case_of(name), **ON_GPU | variant)
