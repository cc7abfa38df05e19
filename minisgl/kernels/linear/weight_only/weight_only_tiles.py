"""Which tiles a linear map with quantised weights and plain x takes, as a function of its shape.

m: rows of x; n: rows of W, in a gated map those of both halves; k: columns of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

import torch
import triton

from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, workspace_size
from minisgl.kernels.tuning import DeviceTuning, WeightOnlyTiles, fitting_stages, tuning_of

# Rows up to which the time is that of reading W.
_FEW_ROWS = 64


def choose_tiles(
    m: int,
    n: int,
    k: int,
    span: int,
    bits: int,
    tuning: DeviceTuning,
    *,
    gated: bool = False,
    normed: bool = False,
    may_split: bool = True,
) -> LinearTiles:
    """span: columns of k that the kernel takes at once, a divisor of k; normed: a norm of x is part
    of the product."""
    found = next(
        tiles
        for rows, elements, tiles in tuning.weight_only_tiles
        if m <= rows and n * k <= elements
    )
    halves = 2 if gated else 1
    tiles = _fitting(found, m, k, span, bits, normed, tuning)
    # A group of four warps multiplies 64 rows of W.
    block_n = tiles.block_n // halves
    tiles = replace(tiles, block_n=block_n, num_warps=min(tiles.num_warps, block_n // 16))
    places = tuning.linear_programs * found.programs_per_sm
    most_splits = k // (tiles.block_k * 3) if may_split else 1
    if m <= _FEW_ROWS:
        num_tiles = triton.cdiv(n // halves, block_n) * triton.cdiv(m, tiles.block_m)
        splits = max(min(places // num_tiles, most_splits), 1)
        few = num_tiles * splits <= places
        return replace(tiles, splits=splits, prefetch=found.prefetch if few else 0)
    choices = [tiles]
    if bits == 4 and not gated:
        wider = replace(found, block_m=found.block_m * 2)
        choices.append(_fitting(wider, m, k, span, bits, normed, tuning))
    return min(
        (
            replace(choice, splits=splits)
            for choice in choices
            for splits in range(1, max(min(most_splits, 4), 1) + 1)
        ),
        key=lambda how: _time_of_many_rows(m, n // halves, k, how, places),
    )


def _fitting(
    tiles: WeightOnlyTiles,
    m: int,
    k: int,
    span: int,
    bits: int,
    normed: bool,
    tuning: DeviceTuning,
) -> LinearTiles:
    """Tiles of this k and of no more rows than there are, which the shared memory has room for."""

    def stages() -> int:
        x_bytes = block_m * block_k * 2
        # The weights of a norm are fetched as wide as x, and the norm of x needs room once more.
        # The scales take the rest.
        stage_bytes = tiles.block_n * bits // 8 * block_k + x_bytes * (2 if normed else 1)
        extra = (x_bytes if normed else 0) + (4 << 10)
        return fitting_stages(tiles.num_stages, stage_bytes, tuning.shared_bytes - extra)

    # With fewer elements than threads, a tile of x would not be fetched ahead.
    least = 8 if span == 128 else 16
    block_m = min(max(tiles.block_m, least), max(least, triton.next_power_of_2(m)))
    block_k = gcd(k, max(tiles.block_k, span))
    while stages() < min(tiles.num_stages, 3) and block_k > span:
        block_k //= 2
    while stages() < 2:
        block_m //= 2
    return LinearTiles(
        tiles.block_n, block_m, block_k, num_warps=tiles.num_warps, num_stages=stages()
    )


def _time_of_many_rows(m: int, n: int, k: int, how: LinearTiles, places: int) -> float:
    """In units of 40 µs, which a tile of 128 x 128 outputs takes on an H200 with a k of 5,120.

    Programs run in waves, each with its start and its end. Partial sums pass through L2.
    """
    num_tiles = triton.cdiv(n, how.block_n) * triton.cdiv(m, how.block_m)
    waves: int = triton.cdiv(num_tiles * how.splits, places)
    tile = how.block_m / 128 * k / how.splits / 5120
    if how.block_m > 128:  # x is read half as often
        tile *= 0.93
    return waves * (tile + 0.15) + (m * n * how.splits * 4e-8 if how.splits > 1 else 0)


def allocate_workspace(
    shapes: Iterable[tuple[int, int, int, int]], device: torch.device
) -> LinearWorkspace:
    """Room for maps of these (n, k, span, bits), plain or gated, with any number of rows up to
    `weight_only_rows`."""
    tuning = tuning_of(device)
    sizes = (
        workspace_size(m, n, k, choose_tiles(m, n, k, span, bits, tuning, gated=gated), gated=gated)
        for n, k, span, bits in shapes
        for m in _rows_to_try(tuning)
        for gated in (False, True)
    )
    return LinearWorkspace.allocate(sizes, device)


def _rows_to_try(tuning: DeviceTuning) -> list[int]:
    """Those that take most room, one for each number of tiles of m."""
    most = tuning.weight_only_rows
    return [1, *range(8, 64, 8), *range(64, most, 32), most]
