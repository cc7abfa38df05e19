"""Which tiles the experts' GEMMs take, by the format of their weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import triton

from minisgl.kernels.linear.quantized import CHUNK, Fp8Weights, Int4Weights
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts, Mxfp4Weights
from minisgl.kernels.moe.quantized_experts import Fp8Experts, Int4Experts
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
    num_rows: int, experts: ExpertWeights, top_k: int, tuning: DeviceTuning
) -> FewTiles | ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. With less shared memory
    than on an H200 fewer tiles are in flight."""
    num_experts, hidden_size, size = experts.down.shape
    itemsize, shared_bytes = experts.down.itemsize, tuning.shared_bytes

    def fitting(tiles: ExpertTiles, halves: int) -> ExpertTiles:
        stage_bytes = (tiles.block_n * halves + tiles.block_m) * tiles.block_k * itemsize
        return _fitting(tiles, stage_bytes, hidden_size if halves == 2 else size, shared_bytes)

    num_pairs = num_rows * top_k
    if num_pairs <= tuning.few_pairs:
        few = tuning.few_tiles
        held = triton.next_power_of_2(top_k) * triton.cdiv(size, few.block_k)
        held *= few.block_k
        if held <= tuning.few_weights:
            block_n = min(1 << (tuning.few_weights // held).bit_length() - 1, few.block_n)
            return replace(few, inner=fitting(few.inner, 2), block_n=block_n)
    many = _of_pairs(tuning.many_tiles, num_pairs / num_experts)
    if experts.down.dtype == torch.float32:
        many = tuning.float32_tiles
    return ManyTiles(inner=fitting(many.inner, 2), outer=fitting(many.outer, 1))


def choose_fp8_tiles(
    num_rows: int, experts: Fp8Experts, top_k: int, tuning: DeviceTuning
) -> ManyTiles:
    """As choose_tiles. A tile of k is one block of the weights, if these have blocks."""

    def fitting(tiles: ExpertTiles, weights: Fp8Weights, halves: int) -> ExpertTiles:
        tiles = replace(tiles, block_k=weights.group or tiles.block_k)
        # A tile of fewer columns is filled up with zeros; the pipeline also has x's scales.
        stage_bytes = (tiles.block_n * halves + tiles.block_m) * max(tiles.block_k, 32)
        stage_bytes, k = stage_bytes + 4 * tiles.block_m, weights.data.shape[2]
        return _fitting(tiles, stage_bytes, k, tuning.shared_bytes - 1024)

    many = _of_pairs(tuning.fp8_many_tiles, num_rows * top_k / len(experts.down.data))
    return ManyTiles(
        inner=fitting(many.inner, experts.gate_up, 2), outer=fitting(many.outer, experts.down, 1)
    )


def choose_int4_tiles(
    num_rows: int, experts: Int4Experts, top_k: int, dtype: torch.dtype, tuning: DeviceTuning
) -> ManyTiles:
    """As choose_tiles. A tile of k is a group, or two if they are smaller than a chunk. dtype: of
    x."""

    def fitting(tiles: ExpertTiles, weights: Int4Weights, halves: int) -> ExpertTiles:
        tiles = replace(tiles, block_k=max(weights.group_size, CHUNK))
        stage_bytes = tiles.block_n * halves * tiles.block_k // 2
        stage_bytes += tiles.block_m * tiles.block_k * dtype.itemsize
        k = weights.data.shape[2] * 4
        return _fitting(tiles, stage_bytes, k, tuning.shared_bytes - 1024)

    many = _of_pairs(tuning.int4_many_tiles, num_rows * top_k / len(experts.down.data))
    return ManyTiles(
        inner=fitting(many.inner, experts.gate_up, 2), outer=fitting(many.outer, experts.down, 1)
    )


def choose_mxfp4_tiles(
    num_rows: int, experts: Mxfp4Experts, top_k: int, dtype: torch.dtype, tuning: DeviceTuning
) -> PairTiles | ManyTiles:
    """As choose_tiles. dtype: of x."""

    def fitting(tiles: ExpertTiles, weights: Mxfp4Weights, halves: int) -> ExpertTiles:
        bytes_of_row = tiles.block_k // 2 + tiles.block_k // CHUNK * 4  # of W, with the scales
        stage_bytes = tiles.block_n * halves * bytes_of_row
        stage_bytes += tiles.block_m * tiles.block_k * dtype.itemsize
        k = weights.data.shape[2] * 4
        return _fitting(tiles, stage_bytes, k, tuning.shared_bytes - 1024)

    kind: type[PairTiles | ManyTiles] = PairTiles
    found: PairTiles | ManyTiles = tuning.mxfp4_pair_tiles
    if num_rows * top_k > tuning.few_pairs:
        pairs = num_rows * top_k / len(experts.down.data)
        kind, found = ManyTiles, _of_pairs(tuning.mxfp4_many_tiles, pairs)
    return kind(
        inner=fitting(found.inner, experts.gate_up, 2), outer=fitting(found.outer, experts.down, 1)
    )


def _of_pairs(table: Iterable[tuple[float, ManyTiles]], pairs: float) -> ManyTiles:
    """The first tiles for so many pairs of an expert."""
    return next(tiles for most, tiles in table if pairs <= most)


def _fitting(tiles: ExpertTiles, stage_bytes: int, k: int, shared_bytes: int) -> ExpertTiles:
    """With as many tiles in flight as there is room for, and steps of the loop over k."""
    steps = triton.cdiv(k, tiles.block_k)
    num_stages = fitting_stages(tiles.num_stages, stage_bytes, shared_bytes, steps)
    return replace(tiles, num_stages=num_stages)
