"""Which tiles the experts' GEMMs take in FP8."""

from __future__ import annotations

from dataclasses import replace

import triton

from minisgl.kernels.linear.quantized import Fp8Weights
from minisgl.kernels.moe.quantized import Fp8Experts
from minisgl.kernels.moe.reference import Routing
from minisgl.kernels.tuning import (
    DeviceTuning,
    ExpertTiles,
    FewTiles,
    ManyTiles,
    fitting_stages,
)


def choose_tiles(
    num_rows: int, experts: Fp8Experts, routing: Routing, tuning: DeviceTuning
) -> FewTiles | ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. A tile of k is one block of
    the weights, if these have blocks."""
    down = experts.down
    num_experts, _, size = down.data.shape
    num_pairs = num_rows * routing.top_k
    if num_pairs <= tuning.few_pairs:
        few = tuning.fp8_few_tiles
        held = triton.next_power_of_2(routing.top_k) * triton.cdiv(size, few.block_k)
        held *= few.block_k
        if held <= tuning.fp8_few_weights:
            block_n = min(1 << (tuning.fp8_few_weights // held).bit_length() - 1, few.block_n)
            if down.block is not None:  # they share a scale
                block_n = min(block_n, down.block[0])
            inner = _fitting(few.inner, experts.gate_up, 2, tuning)
            return replace(few, inner=inner, block_n=block_n)
    pairs = num_pairs / num_experts
    many = next(tiles for most, tiles in tuning.fp8_many_tiles if pairs <= most)
    return ManyTiles(
        inner=_fitting(many.inner, experts.gate_up, 2, tuning),
        outer=_fitting(many.outer, down, 1, tuning),
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
