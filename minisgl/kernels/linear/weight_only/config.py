"""Which tiles a linear map with quantised weights and plain x takes, as a function of its shape.

m: rows of x; n: rows of W, in a gated map those of both halves; k: columns of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

import torch
import triton

from minisgl.kernels.linear.config import LinearTiles, LinearWorkspace, workspace_size
from minisgl.kernels.tuning import DeviceTuning, WeightOnlyTiles, fitting_stages, tuning_of


def choose_tiles(
    m: int,
    n: int,
    k: int,
    span: int,
    bits: int,
    tuning: DeviceTuning,
    *,
    gated: bool = False,
    may_split: bool = True,
) -> LinearTiles:
    """span: columns of k that the kernel takes at once, a divisor of k."""
    halves = 2 if gated else 1
    n //= halves
    tiles = next(tiles for rows, tiles in tuning.weight_only_tiles if m <= rows)
    # With fewer elements than threads, a tile of x would not be fetched ahead.
    least = 8 if span == 128 else 16
    block_m = min(max(tiles.block_m, least), max(least, triton.next_power_of_2(m)))
    block_n, block_k = tiles.block_n, gcd(k, max(tiles.block_k, span))
    num_stages = _stages(tiles, block_n, block_m, block_k, bits, tuning)
    while num_stages < min(tiles.num_stages, 3) and block_k > span:
        block_k //= 2
        num_stages = _stages(tiles, block_n, block_m, block_k, bits, tuning)
    while num_stages < 2:
        block_m //= 2
        num_stages = _stages(tiles, block_n, block_m, block_k, bits, tuning)
    block_n //= halves
    # A group of four warps multiplies 64 rows of W.
    num_warps = min(tiles.num_warps, block_n // 16)
    chosen = LinearTiles(block_n, block_m, block_k, num_warps=num_warps, num_stages=num_stages)
    num_tiles = triton.cdiv(n, block_n) * triton.cdiv(m, block_m)
    places = tuning.linear_programs * tiles.programs_per_sm
    most_splits = k // (block_k * 3) if may_split else 1
    if m <= 64:
        splits = max(min(places // num_tiles, most_splits), 1)
        few = num_tiles * splits <= places
        return replace(chosen, splits=splits, prefetch=512 if few else 0)
    return replace(chosen, splits=_splits_of_many_rows(num_tiles, places, k, most_splits))


def _splits_of_many_rows(num_tiles: int, places: int, k: int, most: int) -> int:
    """Those with the least time: programs run in waves, of which the last may be half empty, and
    the partial sums pass through L2."""

    def time(splits: int) -> float:
        waves: float = triton.cdiv(num_tiles * splits, places) * places / (num_tiles * splits)
        # Of a sum 8 bytes at 5 TB/s a split, beside 2 · k operations at 600 TFLOP/s.
        return waves + (splits * 480 / k if splits > 1 else 0)

    return min(range(1, max(min(most, 4), 1) + 1), key=time)


def allocate_workspace(
    shapes: Iterable[tuple[int, int, int, int]], device: torch.device
) -> LinearWorkspace:
    """Room for maps of these (n, k, span, bits), plain or gated, with any number of rows up to
    `weight_only_rows`."""
    tuning = tuning_of(device)
    sizes = [
        workspace_size(m, n, k, choose_tiles(m, n, k, span, bits, tuning, gated=gated), gated=gated)
        for n, k, span, bits in shapes
        for m in _rows_to_try(tuning)
        for gated in (False, True)
    ]
    return LinearWorkspace(
        partials=torch.empty(
            max((size[0] for size in sizes), default=0), dtype=torch.float32, device=device
        ),
        semaphores=torch.zeros(
            max((size[1] for size in sizes), default=0), dtype=torch.int32, device=device
        ),
    )


def _rows_to_try(tuning: DeviceTuning) -> list[int]:
    """Those that take most room, one for each number of tiles of m."""
    most = tuning.weight_only_rows
    return [1, *range(8, 64, 8), *range(64, most, 32), most]


def _stages(
    tiles: WeightOnlyTiles,
    block_n: int,
    block_m: int,
    block_k: int,
    bits: int,
    tuning: DeviceTuning,
) -> int:
    # W, and x, which e4m3 needs once more: there it passes through registers.
    stage_bytes = (block_n * bits // 8 + block_m * 2) * block_k
    extra = block_m * block_k * 2 if bits == 8 else 0
    return fitting_stages(tiles.num_stages, stage_bytes, tuning.shared_bytes - extra - (4 << 10))


def should_fuse_norm(tuning: DeviceTuning, m: int, k: int) -> bool:
    """Whether a product that norms its input is faster than a norm and then a product."""
    return m <= tuning.norm_rows and k <= tuning.norm_k


def should_gate(tuning: DeviceTuning, m: int) -> bool:
    """Whether the gated kernel is faster than the plain one and then the activation."""
    return m <= tuning.weight_only_gated_rows
