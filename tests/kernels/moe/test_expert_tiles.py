"""The tiles of the experts' GEMMs, in every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from minisgl.config import Activations
from minisgl.kernels.linear.quantized import Fp8Weights, Int4Weights
from minisgl.kernels.moe import expert_tiles
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts, Mxfp4Weights
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts
from minisgl.kernels.moe.reference import ExpertWeights
from minisgl.kernels.tuning import H200, DeviceTuning, FewTiles, ManyTiles, PairTiles

NUM_EXPERTS, TOP_K = 16, 2
Tiles = FewTiles | PairTiles | ManyTiles


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(NUM_EXPERTS, *shape, dtype=dtype, device="meta")


def dense(num_rows: int, hidden: int, size: int, tuning: DeviceTuning) -> Tiles:
    weights = ExpertWeights(meta(2 * size, hidden), meta(hidden, size))
    return expert_tiles.choose_tiles(num_rows, weights, TOP_K, weights.down.dtype, tuning)


def float32(num_rows: int, hidden: int, size: int, tuning: DeviceTuning) -> Tiles:
    shapes = (2 * size, hidden), (hidden, size)
    weights = ExpertWeights(*(meta(*shape, dtype=torch.float32) for shape in shapes))
    return expert_tiles.choose_tiles(num_rows, weights, TOP_K, weights.down.dtype, tuning)


def fp8(num_rows: int, hidden: int, size: int, tuning: DeviceTuning) -> Tiles:
    shapes = (2 * size, hidden), (hidden, size)
    gate_up, down = (Fp8Weights(meta(*shape), meta(1), None) for shape in shapes)
    experts = Fp8Experts(gate_up, down, activations=Activations.TOKEN)
    return expert_tiles.choose_tiles(num_rows, experts, TOP_K, torch.bfloat16, tuning)


def int4(num_rows: int, hidden: int, size: int, tuning: DeviceTuning) -> Tiles:
    gate_up, down = (
        Int4Weights(meta(n, k // 4), meta(k // 64, n), None)
        for n, k in ((2 * size, hidden), (hidden, size))
    )
    experts = Int4Experts(gate_up, down)
    return expert_tiles.choose_tiles(num_rows, experts, TOP_K, torch.bfloat16, tuning)


def mxfp4(num_rows: int, hidden: int, size: int, tuning: DeviceTuning) -> Tiles:
    gate_up, down = (
        Mxfp4Weights(meta(n, k // 4), meta(k // 64, n))
        for n, k in ((2 * size, hidden), (hidden, size))
    )
    experts = Mxfp4Experts(gate_up, down)
    return expert_tiles.choose_tiles(num_rows, experts, TOP_K, torch.bfloat16, tuning)


@pytest.mark.parametrize(("hidden", "size"), [(64, 64), (128, 64), (192, 128), (2048, 256)])
@pytest.mark.parametrize("choose", [dense, float32, fp8, int4, mxfp4])
def test_no_more_tiles_are_in_flight_than_the_loop_has_steps(
    choose: Callable[[int, int, int, DeviceTuning], Tiles], hidden: int, size: int
) -> None:
    """Triton 3.6 overwrites tiles of a longer pipeline while they are multiplied."""
    tuning = replace(H200, shared_bytes=1 << 30)  # room for as many as there may be
    for num_rows in (1, 4, 16, 64, 256, 1024, 16384):
        how = choose(num_rows, hidden, size, tuning)
        products = [(how.inner, hidden)]
        if not isinstance(how, FewTiles):
            products.append((how.outer, size))
        for product, k in products:
            assert 1 <= product.num_stages <= -(-k // product.block_k)
