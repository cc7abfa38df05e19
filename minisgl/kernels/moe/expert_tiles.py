"""Which tiles the experts' GEMMs take, by the format of their weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from minisgl.kernels.linear.nvfp4 import Nvfp4Weights
from minisgl.kernels.linear.quantized import CHUNK, Fp8Weights, Int4Weights
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts, Mxfp4Weights
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts, Nvfp4Experts
from minisgl.kernels.moe.reference import ExpertWeights
from minisgl.kernels.tuning import (
    DeviceTuning,
    ExpertTiles,
    FewTiles,
    ManyTiles,
    PairTiles,
    fitting_stages,
)


def choose_tiles(
    num_rows: int,
    experts: ExpertWeights | ExpertsProduct,
    top_k: int,
    dtype: torch.dtype,
    tuning: DeviceTuning,
    *,
    listed: bool = False,
) -> FewTiles | PairTiles | ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. With less shared memory
    than on an H200 fewer tiles are in flight. dtype: of x. listed: whether pairs must be listed,
    however few there are."""
    assert isinstance(
        experts, ExpertWeights | Fp8Experts | Int4Experts | Mxfp4Experts | Nvfp4Experts
    )
    gate_up, down, num_pairs = experts.gate_up, experts.down, num_rows * top_k
    has_few = num_pairs <= tuning.few_pairs and not listed

    def first_of(table: Iterable[tuple[float, ManyTiles]]) -> ManyTiles:
        data = down if isinstance(down, Tensor) else down.data
        return next(tiles for most, tiles in table if num_pairs / len(data) <= most)

    found: PairTiles | ManyTiles
    if isinstance(experts, ExpertWeights):
        if has_few and (few := _few_tiles(experts, top_k, tuning)):
            return few
        found = tuning.float32_tiles
        if dtype != torch.float32:
            found = first_of(tuning.many_tiles)
    elif isinstance(experts, Fp8Experts):
        found = first_of(tuning.fp8_many_tiles)
    elif isinstance(experts, Int4Experts):
        found = first_of(tuning.int4_many_tiles)
    elif not has_few:
        found = first_of(tuning.mxfp4_many_tiles)
    else:
        found = tuning.mxfp4_pair_tiles
    return replace(
        found,
        inner=_fitting(found.inner, gate_up, 2, dtype, tuning),
        outer=_fitting(found.outer, down, 1, dtype, tuning),
    )


def _few_tiles(experts: ExpertWeights, top_k: int, tuning: DeviceTuning) -> FewTiles | None:
    """None if the weights of a row's experts have no room in the registers of a program."""
    few, size = tuning.few_tiles, experts.down.shape[2]
    held = triton.next_power_of_2(top_k) * triton.cdiv(size, few.block_k) * few.block_k
    if held > tuning.few_weights:
        return None
    block_n = min(1 << (tuning.few_weights // held).bit_length() - 1, few.block_n)
    inner = _fitting(few.inner, experts.gate_up, 2, experts.down.dtype, tuning)
    return replace(few, inner=inner, block_n=block_n)


def _fitting(
    tiles: ExpertTiles,
    weights: Tensor | Fp8Weights | Int4Weights | Mxfp4Weights | Nvfp4Weights,
    halves: int,
    dtype: torch.dtype,
    tuning: DeviceTuning,
) -> ExpertTiles:
    """With as many tiles in flight as there is room for, and steps of the loop over k. halves: rows
    of W in a program for each of block_n."""
    block_k, room = tiles.block_k, tuning.shared_bytes - 1024
    x_bytes = block_k * dtype.itemsize  # of a row of a tile
    if isinstance(weights, Tensor):
        k, w_bytes, room = weights.shape[2], x_bytes, tuning.shared_bytes
    elif isinstance(weights, Fp8Weights):
        # A tile of k is one block of the weights, if these have blocks; one of fewer columns is
        # filled up with zeros. The pipeline also has x's scales.
        k, block_k = weights.data.shape[2], weights.group or block_k
        w_bytes = max(block_k, 32)
        x_bytes = w_bytes + 4
    elif isinstance(weights, Int4Weights):
        # A tile of k is a group, or two if they are smaller than a chunk.
        k, block_k = weights.data.shape[2] * 4, max(weights.group_size, CHUNK)
        w_bytes, x_bytes = block_k // 2, block_k * dtype.itemsize
    else:
        k, w_bytes = weights.data.shape[2] * 4, block_k // 2 + block_k // CHUNK * 4  # with scales
    stage_bytes = tiles.block_n * halves * w_bytes + tiles.block_m * x_bytes
    steps = triton.cdiv(k, block_k)
    num_stages = fitting_stages(tiles.num_stages, stage_bytes, room, steps)
    return replace(tiles, block_k=block_k, num_stages=num_stages)
