"""Experts with quantised weights on a GPU, at the sizes of Qwen3-30B-A3B, of gpt-oss and at
others."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.expert_cases import random_logits
from support.fp8_expert_cases import Blocks, check, check_nan, random_experts
from support.int4_expert_cases import check as check_int4
from support.mxfp4_expert_cases import check as check_mxfp4
from support.mxfp4_expert_cases import random_nvfp4_experts

from minisgl.config import Activations
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.reference import ByRouter, Routing
from minisgl.kernels.moe.select_experts import add_weighted_sum

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOKEN, GROUP, STATIC = Activations.TOKEN, Activations.GROUP, Activations.STATIC
# num_experts, top_k, hidden_size, size
A3B, SMALL, INT4_SMALL = (128, 8, 2048, 768), (60, 4, 264, 96), (60, 4, 320, 192)
KINDS: dict[str, tuple[tuple[int, int, int, int], Blocks, Activations]] = {
    "channels": (A3B, None, TOKEN),
    "blocks": (A3B, ((128, 128), (128, 128)), GROUP),
    "blocks of four ranks": ((128, 8, 2048, 192), ((64, 128), (128, 64)), GROUP),
    "static": (A3B, None, STATIC),
    "small channels": (SMALL, None, TOKEN),
    "small blocks": (SMALL, ((32, 128), (128, 32)), GROUP),
    "blocks, tokens": (SMALL, ((32, 128), (128, 32)), TOKEN),
    "blocks, static": (SMALL, ((32, 128), (128, 32)), STATIC),
    "blocks with ends": ((60, 4, 264, 136), ((8, 128), (128, 128)), GROUP),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 40, 256, 3000])
def test_fp8_experts_match_the_reference(num_rows: int, kind: str) -> None:
    sizes, blocks, activations = KINDS[kind]
    check(num_rows, *sizes, blocks, activations, dtype=torch.bfloat16, device=GPU, pdl=True)


@pytest.mark.parametrize("activations", [TOKEN, GROUP, STATIC])
def test_a_nan_row_harms_no_other_row(activations: Activations) -> None:
    blocks = ((64, 128), (128, 64)) if activations == GROUP else None
    check_nan(blocks, activations, device=GPU, pdl=True)


@pytest.mark.parametrize("kind", ["channels", "blocks", "static"])
@pytest.mark.parametrize("num_rows", [1, 50, 300])
def test_a_graph_gives_the_bits_of_calm_launches(num_rows: int, kind: str) -> None:
    """Several layers, whose launches overlap, with the routing of the inputs of each replay."""
    (num_experts, top_k, hidden_size, size), blocks, activations = KINDS[kind]
    routing = Routing(top_k, normalize=True)
    layers = []
    for _ in range(4):
        layers.append(random_experts(num_experts, hidden_size, size, blocks, activations, GPU))
    x = torch.randn(num_rows, hidden_size, device=GPU).bfloat16()
    logits = random_logits(num_rows, num_experts, torch.bfloat16, GPU)

    def run(*, calm: bool) -> torch.Tensor:
        rows = x.clone()
        for layer in layers:
            if calm:
                torch.cuda.synchronize()
            out, _ = fused_experts(rows, ByRouter(logits, routing), layer, pdl=not calm)
            rows = add_weighted_sum(layer, out, ByRouter(logits, routing), rows).rows
        return rows

    run(calm=False)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(calm=False)
    for _ in range(5):
        x.normal_()
        logits.copy_(random_logits(num_rows, num_experts, torch.bfloat16, GPU))
        expected = run(calm=True)
        graph.replay()
        assert torch.equal(found, expected)


def test_no_rows() -> None:
    experts = random_experts(60, 256, 96, None, TOKEN, GPU)
    x, logits = torch.randn(0, 256, device=GPU), torch.randn(0, 60, device=GPU)
    assert (
        fused_experts(x, ByRouter(logits, Routing(4, normalize=True)), experts)[0].shape == x.shape
    )


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8, 40, 256, 3000])
@pytest.mark.parametrize(
    ("sizes", "groups"),
    [(A3B, (128, 128)), ((128, 8, 2048, 192), (128, 64)), (INT4_SMALL, (32, 64))],
)
def test_int4_experts_match_the_reference(
    sizes: tuple[int, int, int, int], groups: tuple[int, int], num_rows: int, symmetric: bool
) -> None:
    check_int4(
        num_rows,
        *sizes,
        groups,
        symmetric=symmetric,
        dtype=torch.bfloat16,
        device=GPU,
        pdl=True,
    )


@pytest.mark.parametrize("num_rows", [1, 2, 3, 40, 256, 3000])
@pytest.mark.parametrize(
    "sizes", [(32, 4, 2880, 2880), (32, 4, 2880, 1472), (128, 4, 2880, 128), (60, 4, 320, 192)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mxfp4_experts_match_the_reference(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], num_rows: int
) -> None:
    check_mxfp4(num_rows, *sizes, dtype=dtype, device=GPU, pdl=True)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 40, 256, 3000])
@pytest.mark.parametrize("sizes", [A3B, (128, 8, 2048, 192), (60, 4, 320, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nvfp4_experts_match_the_reference(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], num_rows: int, plain: bool
) -> None:
    check_mxfp4(
        num_rows,
        *sizes,
        dtype=dtype,
        device=GPU,
        pdl=True,
        plain=plain,
        make=random_nvfp4_experts,
    )
