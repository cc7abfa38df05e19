"""The experts' kernels at awkward sizes: on a GPU if there is one, or else in the interpreter.

bfloat16 is left to tests/gpu, since the interpreter's is not exact.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.expert_cases import check_choose, check_equals, check_mix, check_nan

from minisgl.kernels.moe.expert_tiles import choose_tiles
from minisgl.kernels.moe.reference import ExpertWeights, Routing
from minisgl.kernels.tuning import H200, ExpertTiles, FewTiles, ManyTiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (5, 5), (128, 8)])
def test_routing_matches_the_reference(
    num_experts: int, top_k: int, normalize: bool, dtype: torch.dtype
) -> None:
    check_choose(3, num_experts, Routing(top_k, normalize), dtype=dtype, device=DEVICE, pdl=False)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), [(3, 8, 3), (40, 6, 2)])
def test_a_nan_row_routes_to_valid_experts_and_harms_no_other_row(
    num_rows: int, num_experts: int, top_k: int, normalize: bool
) -> None:
    check_nan(num_rows, num_experts, Routing(top_k, normalize), device=DEVICE, pdl=False)


def test_routing_prefers_the_lower_expert_among_equal_logits() -> None:
    check_equals(DEVICE, pdl=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "hidden_size", "size"),
    [(1, 8, 2, 64, 32), (5, 60, 4, 48, 24), (40, 16, 4, 64, 48), (70, 6, 2, 40, 72)],
)
def test_fused_experts_match_the_reference(
    num_rows: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    size: int,
    crowded: bool,
    dtype: torch.dtype,
) -> None:
    check_mix(
        num_rows,
        num_experts,
        top_k,
        hidden_size,
        size,
        dtype=dtype,
        device=DEVICE,
        pdl=False,
        crowded=crowded,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "hidden_size", "size"),
    [(1, 8, 4, 64, 32), (5, 60, 4, 48, 24), (40, 6, 2, 40, 72)],
)
def test_experts_with_biases_and_a_clamped_activation_match_the_reference(
    num_rows: int, num_experts: int, top_k: int, hidden_size: int, size: int, dtype: torch.dtype
) -> None:
    check_mix(
        num_rows,
        num_experts,
        top_k,
        hidden_size,
        size,
        dtype=dtype,
        device=DEVICE,
        pdl=False,
        clamped=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_experts_with_gelu_and_scales_match_the_reference(
    num_rows: int, dtype: torch.dtype
) -> None:
    check_mix(num_rows, 6, 2, 40, 72, dtype=dtype, device=DEVICE, pdl=False, gelu=True)


# Of Qwen3-30B-A3B
ROUTING, NUM_EXPERTS, HIDDEN_SIZE, SIZE = Routing(8, normalize=True), 128, 2048, 768


def weights_of(dtype: torch.dtype) -> ExpertWeights:
    """Shapes alone."""
    return ExpertWeights(
        torch.empty(NUM_EXPERTS, 2 * SIZE, HIDDEN_SIZE, dtype=dtype, device="meta"),
        torch.empty(NUM_EXPERTS, HIDDEN_SIZE, SIZE, dtype=dtype, device="meta"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, H200.shared_bytes])
def test_expert_tiles_fit_into_shared_memory(shared_bytes: int, dtype: torch.dtype) -> None:
    """What Triton 3.6 compiles for sm_80, sm_89, sm_90 and sm_120 takes no more than the tiles in
    flight, and for sm_100 up to 32 bytes more, for barriers. The other kernels take 50 KB at most.
    """
    weights, tuning = weights_of(dtype), replace(H200, shared_bytes=shared_bytes)
    for how in {
        choose_tiles(num_rows, weights, ROUTING.top_k, weights.down.dtype, tuning)
        for num_rows in range(1, 16385)
    }:
        products = [(how.inner, 2), *([(how.outer, 1)] if isinstance(how, ManyTiles) else [])]
        for product, halves in products:
            rows = product.block_n * halves + product.block_m
            stage_bytes = rows * product.block_k * dtype.itemsize
            assert stage_bytes * product.num_stages <= shared_bytes
            assert product.num_stages >= 2  # one at work, one under way


def test_expert_tiles_on_an_h200_are_the_measured_ones() -> None:
    measured = {
        1: FewTiles(ExpertTiles(32, 16, 128, num_warps=4, num_stages=4), block_n=8, block_k=256),
        64: ManyTiles(ExpertTiles(64, 16, 128, 4, 3), ExpertTiles(64, 16, 128, 4, 3)),
        16384: ManyTiles(
            ExpertTiles(128, 128, 64, 8, 4, places=8), ExpertTiles(128, 256, 64, 8, 3, places=4)
        ),
    }
    weights = weights_of(torch.bfloat16)
    for num_rows, how in measured.items():
        assert choose_tiles(num_rows, weights, ROUTING.top_k, torch.bfloat16, H200) == how
