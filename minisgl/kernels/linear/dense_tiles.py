"""Which kernel and which tiles a linear map of few rows takes, as a function of its shape alone.

m: rows of x; n: rows of W, in a gated map those of both halves; k: columns of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import triton

from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, workspace_size
from minisgl.kernels.tuning import H200, DeviceTuning, fitting_stages, tuning_of

MAX_ROWS = H200.linear_weights[-1][0]  # with more rows, should_use says no


def allocate_workspace(
    shapes: Iterable[tuple[int, int]], max_rows: int, device: torch.device
) -> LinearWorkspace:
    """Room for maps of these (n, k), plain or gated, with up to max_rows rows."""
    tuning = tuning_of(device)
    sizes = (
        workspace_size(m, n, k, choose_tiles(m, n, k, tuning, gated=gated), gated=gated)
        for n, k in shapes
        for m in _block_rows(max_rows)
        for gated in (False, True)
        if not (gated and n % 2)  # the two halves of a gated map are alike
    )
    return LinearWorkspace.allocate(sizes, device)


def choose_tiles(
    m: int, n: int, k: int, tuning: DeviceTuning, *, gated: bool = False, may_split: bool = True
) -> LinearTiles:
    """The tiles for half precision. Measured on an H200 by bench_kernels.py linear --tiles and
    by the time of whole steps; with less shared memory, as many tiles in flight as fit."""
    halves = 2 if gated else 1
    n //= halves
    if m > 64:
        return _tiles_of_many_rows(m, n, k, halves, tuning, may_split)
    if m <= 16 and (tiles := _burst_tiles(m, n, k, halves, tuning)) is not None:
        return tiles

    programs = tuning.linear_programs
    block_m = max(16, triton.next_power_of_2(m))
    num_tiles = triton.cdiv(n, 64)
    resident = splits = 1
    if may_split and num_tiles < programs:
        # As many programs on each SM as leave the fewest of their places empty, but each with a few
        # tiles at least.
        most_resident = 1 if gated else 3 if m <= 16 else 2
        most_splits = max(k // (384 if m <= 32 else 512), 1)
        found = [
            (min(programs * resident // num_tiles, most_splits), resident)
            for resident in range(1, most_resident + 1)
        ]
        splits, resident = max(found, key=lambda pair: pair[0] / pair[1])
    # The last programs of a gated map would have the device to themselves: let all run at once.
    narrow = resident == 3 or (gated and programs < num_tiles <= programs * 3 // 2)
    tiles = LinearTiles(64, block_m, 64 if narrow else 128, splits=splits)
    # Deep pipelines where a program has its SM to itself, as gated ones have at any depth.
    single = resident == 1 and (num_tiles <= programs or (gated and num_tiles > 2 * programs))
    stage_bytes = (64 * halves + block_m) * tiles.block_k * 2
    deep = (narrow or single) and stage_bytes * 6 <= tuning.shared_bytes
    return replace(
        tiles,
        num_stages=6 if deep else fitting_stages(4, stage_bytes, tuning.shared_bytes),
        prefetch=tuning.linear_prefetch if num_tiles * splits <= programs * resident else 0,
    )


def _burst_tiles(m: int, n: int, k: int, halves: int, tuning: DeviceTuning) -> LinearTiles | None:
    """For at most 96 KiB of W in a program, and few programs on an SM. W and a tile of x pass
    through shared memory, on their way to the threads that multiply them."""
    block_k = min(max(triton.next_power_of_2(k), 128), 1024)
    block_m = 8 if m <= 8 else 16
    num_tiles = triton.cdiv(k, block_k) * halves
    if num_tiles > 3 or triton.cdiv(n, 16) > tuning.burst_programs * tuning.linear_programs:
        return None
    if (16 * num_tiles + block_m) * block_k * 2 > tuning.shared_bytes:
        return None
    return LinearTiles(16, block_m, block_k, groups=8, num_warps=8, burst=True)


def smaller(tiles: LinearTiles, m: int, tuning: DeviceTuning) -> LinearTiles:
    """Those of the small kernel in place of those of the burst kernel, where it is faster."""
    if not (tiles.burst and 0 < m <= tuning.small_rows):
        return tiles
    return replace(tiles, block_n=4, block_m=m, groups=1, num_warps=4, small=True)


def _tiles_of_many_rows(
    m: int, n: int, k: int, halves: int, tuning: DeviceTuning, may_split: bool
) -> LinearTiles:
    stage_bytes = (64 * halves + 64) * 128 * 2
    num_stages = fitting_stages(4, stage_bytes, tuning.shared_bytes)
    tiles = LinearTiles(64, 64, 128, num_stages=num_stages)
    num_tiles = triton.cdiv(n, tiles.block_n) * triton.cdiv(m, tiles.block_m)
    if not may_split:
        return tiles
    most_splits = k // (tiles.block_k * 4)
    return replace(tiles, splits=max(min(tuning.linear_programs // num_tiles, most_splits), 1))


def should_use(
    tuning: DeviceTuning, m: int, n: int, k: int, *, gated: bool, adapted: bool = False
) -> bool:
    """Whether our kernels are faster than the best of cuBLAS's algorithms. adapted: and what adds a
    delta to its result."""
    if k % 64 != 0:
        return False
    # cuBLAS is slow where W is small and, up to 64 rows, k the longer side.
    if m > tuning.linear_gated_rows and (gated or (m <= 64 and k <= n)):
        return False
    weights = tuning.delta_weights if adapted else tuning.linear_weights
    return any(m <= rows and n * k <= size for rows, size in weights)


def should_fuse_norm(tuning: DeviceTuning, m: int, n: int, k: int, *, gated: bool) -> bool:
    """Whether one of our kernels that norms its input is faster than a norm and then a GEMM."""
    small = m <= tuning.norm_rows and k <= tuning.norm_k
    return small and should_use(tuning, m, n, k, gated=gated)


def should_keep_norm(tuning: DeviceTuning, m: int, n: int, k: int) -> bool:
    """Whether `linear` can write the norm, too, and that is faster than two launches."""
    return should_fuse_norm(tuning, m, n, k, gated=False) and choose_tiles(m, n, k, tuning).burst


def _block_rows(max_rows: int) -> list[int]:
    """The numbers of rows up to `max_rows` that take most room, one for each kind of tiles."""
    powers = [1 << i for i in range(max_rows.bit_length()) if 1 << i <= max_rows]
    return [*powers, max_rows]
