"""Which tiles the experts' GEMMs take, by the format of their weights."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from minisgl.kernels.linear.quantized import CHUNK, Fp8Weights, Int4Weights
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts
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
    num_experts, _, size = experts.down.shape
    itemsize, shared_bytes = experts.down.itemsize, tuning.shared_bytes
    num_pairs = num_rows * top_k
    if num_pairs <= tuning.few_pairs:
        few = tuning.few_tiles
        held = triton.next_power_of_2(top_k) * triton.cdiv(size, few.block_k)
        held *= few.block_k
        if held <= tuning.few_weights:
            block_n = min(1 << (tuning.few_weights // held).bit_length() - 1, few.block_n)
            inner = _fitting(few.inner, 2, itemsize, shared_bytes)
            return replace(few, inner=inner, block_n=block_n)
    if experts.down.dtype == torch.float32:
        return tuning.float32_tiles
    pairs = num_pairs / num_experts
    many = next(tiles for most, tiles in tuning.many_tiles if pairs <= most)
    return ManyTiles(
        inner=_fitting(many.inner, 2, itemsize, shared_bytes),
        outer=_fitting(many.outer, 1, itemsize, shared_bytes),
    )


def _fitting(tiles: ExpertTiles, halves: int, itemsize: int, shared_bytes: int) -> ExpertTiles:
    """As many tiles in flight as there is room for. halves: 2 of the gated GEMM, else 1."""
    stage_bytes = (tiles.block_n * halves + tiles.block_m) * tiles.block_k * itemsize
    return replace(tiles, num_stages=fitting_stages(tiles.num_stages, stage_bytes, shared_bytes))


def choose_fp8_tiles(
    num_rows: int, experts: Fp8Experts, top_k: int, tuning: DeviceTuning
) -> ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. A tile of k is one block of
    the weights, if these have blocks."""
    pairs = num_rows * top_k / len(experts.down.data)
    many = next(tiles for most, tiles in tuning.fp8_many_tiles if pairs <= most)
    return ManyTiles(
        inner=_fitting_fp8(many.inner, experts.gate_up, 2, tuning),
        outer=_fitting_fp8(many.outer, experts.down, 1, tuning),
    )


def _fitting_fp8(
    tiles: ExpertTiles, weights: Fp8Weights, halves: int, tuning: DeviceTuning
) -> ExpertTiles:
    """With as many tiles in flight as there is room for. halves: 2 of the gated GEMM, else 1."""
    block_k = weights.group or tiles.block_k
    # A tile of fewer columns is filled up with zeros; the pipeline also has x's scales.
    stage_bytes = (tiles.block_n * halves + tiles.block_m) * max(block_k, 32) + 4 * tiles.block_m
    num_stages = fitting_stages(tiles.num_stages, stage_bytes, tuning.shared_bytes - 1024)
    return replace(tiles, block_k=block_k, num_stages=num_stages)


def choose_int4_tiles(
    num_rows: int,
    experts: Int4Experts,
    top_k: int,
    dtype: torch.dtype,
    tuning: DeviceTuning,
) -> ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. dtype: of x."""
    pairs = num_rows * top_k / len(experts.down.data)
    many = next(tiles for most, tiles in tuning.int4_many_tiles if pairs <= most)
    return ManyTiles(
        inner=_fitting_int4(many.inner, experts.gate_up, 2, dtype, tuning),
        outer=_fitting_int4(many.outer, experts.down, 1, dtype, tuning),
    )


def _fitting_int4(
    tiles: ExpertTiles, weights: Int4Weights, halves: int, dtype: torch.dtype, tuning: DeviceTuning
) -> ExpertTiles:
    """A tile of k is a group, or two if they are smaller than a chunk, with as many tiles in flight
    as there is room for. halves: 2 of the gated GEMM, else 1."""
    block_k = max(weights.group_size, CHUNK)
    stage_bytes = tiles.block_n * halves * block_k // 2 + tiles.block_m * block_k * dtype.itemsize
    num_stages = fitting_stages(tiles.num_stages, stage_bytes, tuning.shared_bytes - 1024)
    return replace(tiles, block_k=block_k, num_stages=num_stages)


def choose_mxfp4_tiles(
    num_rows: int,
    experts: Mxfp4Experts,
    top_k: int,
    dtype: torch.dtype,
    tuning: DeviceTuning,
) -> PairTiles | ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. dtype: of x."""
    if num_rows * top_k <= tuning.few_pairs:
        few = tuning.mxfp4_pair_tiles
        return PairTiles(
            inner=_fitting_mxfp4(few.inner, 2, dtype, tuning),
            outer=_fitting_mxfp4(few.outer, 1, dtype, tuning),
        )
    pairs = num_rows * top_k / len(experts.down.data)
    many = next(tiles for most, tiles in tuning.mxfp4_many_tiles if pairs <= most)
    return ManyTiles(
        inner=_fitting_mxfp4(many.inner, 2, dtype, tuning),
        outer=_fitting_mxfp4(many.outer, 1, dtype, tuning),
    )


def _fitting_mxfp4(
    tiles: ExpertTiles, halves: int, dtype: torch.dtype, tuning: DeviceTuning
) -> ExpertTiles:
    """With as many tiles in flight as there is room for. halves: 2 of the gated GEMM, else 1."""
    bytes_of_row = tiles.block_k // 2 + tiles.block_k // CHUNK * 4  # of W, with the scales
    stage_bytes = tiles.block_n * halves * bytes_of_row
    stage_bytes += tiles.block_m * tiles.block_k * dtype.itemsize
    num_stages = fitting_stages(tiles.num_stages, stage_bytes, tuning.shared_bytes - 1024)
    return replace(tiles, num_stages=num_stages)
