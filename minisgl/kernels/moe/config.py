"""How the products of experts are shared out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from minisgl.kernels.launch import fitting_stages
from minisgl.kernels.moe.reference import ExpertWeights, Routing

MAX_FEW_PAIRS = 8
_HELD = 48 << 10  # elements of W in the registers of a program at most


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one product is shared out. Sizes of blocks are powers of two."""

    block_n: int  # rows of W in a program; of the gated product, rows of either half
    block_m: int  # pairs
    block_k: int
    num_warps: int
    num_stages: int
    places: int = 1  # programs that share an expert's pairs


@dataclass(frozen=True, slots=True)
class FewTiles:
    """How the products of few rows are shared out: the gated one, for one pair in a program, and
    the one behind it."""

    inner: Tiles = Tiles(32, 16, 128, num_warps=4, num_stages=4)
    block_n: int = 8  # outputs in a program
    block_k: int = 256
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class ManyTiles:
    """How the products of many rows are shared out: the gated one and the one behind it."""

    inner: Tiles
    outer: Tiles


def tiles(
    num_rows: int, experts: ExpertWeights, routing: Routing, shared_bytes: int
) -> FewTiles | ManyTiles:
    """By the number of pairs that an expert has, if they spread evenly. For an H200; where a
    program may have less than its shared memory, fewer tiles are in flight."""
    num_experts, _, size = experts.down.shape
    itemsize = experts.down.itemsize
    num_pairs = num_rows * routing.top_k
    if num_pairs <= MAX_FEW_PAIRS:
        few = FewTiles()
        held = triton.next_power_of_2(routing.top_k) * triton.cdiv(size, few.block_k)
        held *= few.block_k
        if held <= _HELD:
            block_n = min(1 << (_HELD // held).bit_length() - 1, few.block_n)
            return replace(
                few, inner=_fitting(few.inner, 2, itemsize, shared_bytes), block_n=block_n
            )
    if experts.down.dtype == torch.float32:  # for tests
        slow = Tiles(32, 16, 32, num_warps=4, num_stages=2, places=2)
        return ManyTiles(slow, slow)
    pairs = num_pairs / num_experts
    if pairs <= 8:
        inner, outer = Tiles(64, 16, 128, 4, 3), Tiles(64, 16, 128, 4, 3)
    elif pairs <= 24:
        inner, outer = Tiles(64, 32, 64, 4, 3), Tiles(128, 32, 64, 4, 4)
    elif pairs <= 48:
        inner, outer = Tiles(64, 64, 64, 4, 3, places=2), Tiles(128, 64, 64, 4, 4, places=2)
    elif pairs <= 384:
        inner, outer = Tiles(64, 128, 64, 4, 3, places=4), Tiles(128, 64, 64, 4, 4, places=8)
    else:
        inner, outer = Tiles(128, 128, 64, 8, 4, places=8), Tiles(128, 256, 64, 8, 3, places=4)
    return ManyTiles(
        inner=_fitting(inner, 2, itemsize, shared_bytes),
        outer=_fitting(outer, 1, itemsize, shared_bytes),
    )


def _fitting(how: Tiles, halves: int, itemsize: int, shared_bytes: int) -> Tiles:
    """As many tiles in flight as there is room for. halves: 2 of the gated product, else 1."""
    stage_bytes = (how.block_n * halves + how.block_m) * how.block_k * itemsize
    return replace(how, num_stages=fitting_stages(how.num_stages, stage_bytes, shared_bytes))
