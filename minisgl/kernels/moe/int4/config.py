"""Which tiles the experts' GEMMs take with INT4 weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl.kernels.linear.quantized import CHUNK, Int4Weights
from minisgl.kernels.moe.quantized import Int4Experts
from minisgl.kernels.moe.reference import Routing
from minisgl.kernels.tuning import DeviceTuning, ExpertTiles, ManyTiles, fitting_stages


def choose_tiles(
    num_rows: int,
    experts: Int4Experts,
    routing: Routing,
    dtype: torch.dtype,
    tuning: DeviceTuning,
) -> ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. dtype: of x."""
    pairs = num_rows * routing.top_k / len(experts.down.data)
    many = next(tiles for most, tiles in tuning.int4_many_tiles if pairs <= most)
    return ManyTiles(
        inner=_fitting(many.inner, experts.gate_up, 2, dtype, tuning),
        outer=_fitting(many.outer, experts.down, 1, dtype, tuning),
    )


def _fitting(
    tiles: ExpertTiles, weights: Int4Weights, halves: int, dtype: torch.dtype, tuning: DeviceTuning
) -> ExpertTiles:
    """A tile of k is a group, or two if they are smaller than a chunk, with as many tiles in flight
    as there is room for. halves: 2 of the gated GEMM, else 1."""
    block_k = max(weights.group_size, CHUNK)
    stage_bytes = tiles.block_n * halves * block_k // 2 + tiles.block_m * block_k * dtype.itemsize
    num_stages = fitting_stages(tiles.num_stages, stage_bytes, tuning.shared_bytes - 1024)
    return replace(tiles, block_k=block_k, num_stages=num_stages)
