"""Which tiles the experts' GEMMs take in FP8."""

from __future__ import annotations

from dataclasses import replace

from minisgl.kernels.linear.quantized import Fp8Weights
from minisgl.kernels.moe.quantized import Fp8Experts
from minisgl.kernels.moe.reference import Routing
from minisgl.kernels.tuning import DeviceTuning, ExpertTiles, ManyTiles, fitting_stages


def choose_tiles(
    num_rows: int, experts: Fp8Experts, routing: Routing, tuning: DeviceTuning
) -> ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. A tile of k is one block of
    the weights, if these have blocks."""
    pairs = num_rows * routing.top_k / len(experts.down.data)
    many = next(tiles for most, tiles in tuning.fp8_many_tiles if pairs <= most)
    return ManyTiles(
        inner=_fitting(many.inner, experts.gate_up, 2, tuning),
        outer=_fitting(many.outer, experts.down, 1, tuning),
    )


def _fitting(
    tiles: ExpertTiles, weights: Fp8Weights, halves: int, tuning: DeviceTuning
) -> ExpertTiles:
    """With as many tiles in flight as there is room for. halves: 2 of the gated GEMM, else 1."""
    block_k = weights.group or tiles.block_k
    # A tile of fewer columns is filled up with zeros; the pipeline also has x's scales.
    stage_bytes = (tiles.block_n * halves + tiles.block_m) * max(block_k, 32) + 4 * tiles.block_m
    num_stages = fitting_stages(tiles.num_stages, stage_bytes, tuning.shared_bytes - 1024)
    return replace(tiles, block_k=block_k, num_stages=num_stages)
