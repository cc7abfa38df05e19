"""Which tiles the experts' GEMMs take."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from minisgl.kernels.moe.reference import ExpertWeights, Routing
from minisgl.kernels.tuning import (
    DeviceTuning,
    ExpertTiles,
    FewTiles,
    ManyTiles,
    fitting_stages,
)


def choose_tiles(
    num_rows: int, experts: ExpertWeights, routing: Routing, tuning: DeviceTuning
) -> FewTiles | ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. With less shared memory
    than on an H200 fewer tiles are in flight."""
    num_experts, _, size = experts.down.shape
    itemsize, shared_bytes = experts.down.itemsize, tuning.shared_bytes
    num_pairs = num_rows * routing.top_k
    if num_pairs <= tuning.few_pairs:
        few = tuning.few_tiles
        held = triton.next_power_of_2(routing.top_k) * triton.cdiv(size, few.block_k)
        held *= few.block_k
        if held <= tuning.few_weights:
            block_n = min(1 << (tuning.few_weights // held).bit_length() - 1, few.block_n)
            inner = fitting(few.inner, 2, itemsize, shared_bytes)
            return replace(few, inner=inner, block_n=block_n)
    if experts.down.dtype == torch.float32:
        return tuning.float32_tiles
    pairs = num_pairs / num_experts
    many = next(tiles for most, tiles in tuning.many_tiles if pairs <= most)
    return ManyTiles(
        inner=fitting(many.inner, 2, itemsize, shared_bytes),
        outer=fitting(many.outer, 1, itemsize, shared_bytes),
    )


def fitting(tiles: ExpertTiles, halves: int, itemsize: int, shared_bytes: int) -> ExpertTiles:
    """As many tiles in flight as there is room for. halves: 2 of the gated GEMM, else 1."""
    stage_bytes = (tiles.block_n * halves + tiles.block_m) * tiles.block_k * itemsize
    return replace(tiles, num_stages=fitting_stages(tiles.num_stages, stage_bytes, shared_bytes))
