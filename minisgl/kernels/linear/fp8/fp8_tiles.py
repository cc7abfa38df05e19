"""Which tiles an FP8 linear map takes, as a function of its shape alone.

m: rows of x; n: rows of W; k: columns of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import triton

from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, workspace_size
from minisgl.kernels.tuning import DeviceTuning, fitting_stages, tuning_of

_BLOCKS_M = (8, 16, 32, 64, 128)
_PREFETCHED = 512  # bytes of each row of W


def allocate_workspace(
    shapes: Iterable[tuple[int, int, int | None]], device: torch.device
) -> LinearWorkspace:
    """Room for maps of these (n, k, group), with any number of rows."""
    tuning = tuning_of(device)
    most_rows = _BLOCKS_M[-1] * tuning.linear_programs  # with more, k is not split
    sizes = (
        workspace_size(m, n, k, choose_tiles(m, n, k, tuning, group=group))
        for n, k, group in shapes
        for m in (*_BLOCKS_M, *range(_BLOCKS_M[-1], most_rows + 1, _BLOCKS_M[-1]))
    )
    return LinearWorkspace.allocate(sizes, device)


def should_use(tuning: DeviceTuning, m: int, group: int | None) -> bool:
    """Whether our kernel is faster than torch's scaled products."""
    return m <= (tuning.fp8_rows if group is None else tuning.fp8_group_rows)


def choose_tiles(
    m: int,
    n: int,
    k: int,
    tuning: DeviceTuning,
    *,
    group: int | None = None,
    may_split: bool = True,
) -> LinearTiles:
    """A tile of k is one group, if there are groups. Any number of rows has tiles.

    Measured on an H200 by scripts/bench/bench_kernels.py linear --tiles.
    """
    block_m = next((size for size in _BLOCKS_M if m <= size), _BLOCKS_M[-1])
    if block_m == _BLOCKS_M[-1]:
        return _tiles_of_many_rows(m, n, k, tuning, group, may_split)
    programs = tuning.linear_programs
    tiles = LinearTiles(64, block_m, group or 128, num_stages=8, prefetch=_PREFETCHED)
    num_tiles = triton.cdiv(n, tiles.block_n)
    if num_tiles >= 2 * programs:
        num_stages = 4 if group is not None and block_m == 64 else 3
        return _fitting(replace(tiles, block_n=128, num_stages=num_stages), 1, tuning)
    if group is not None:
        # Each tile of k waits for its sum before it is scaled: another program works meanwhile.
        shallow = block_m in (8, 64)
        resident = 3 if shallow else 2
        tiles = replace(tiles, num_stages=4 if shallow else 8)
        splits = min(programs * resident // num_tiles, k // 1280, 4)
    elif block_m == 8 and programs // 3 <= num_tiles <= programs * 2 // 3:
        # Too few for all SMs, but with rows enough for one program on each.
        resident, num_tiles = 1, triton.cdiv(n, 128)
        tiles = replace(tiles, block_n=128, num_warps=8)
        splits = min(programs // num_tiles, k // 1024)
    else:
        splits = _fewest_splits(num_tiles, k, block_m, programs)
        resident = triton.cdiv(num_tiles * splits, programs)
    return _fitting(replace(tiles, splits=max(splits, 1) if may_split else 1), resident, tuning)


def _fewest_splits(num_tiles: int, k: int, block_m: int, programs: int) -> int:
    """With more, adding up the parts costs more than SMs without work, or with one program where
    others have two."""
    shortest = 4096 if block_m > 32 else 2048
    if num_tiles < programs // 4:
        shortest = 512
    best, best_fill = 1, 0.0
    for splits in range(1, min(2 * programs // num_tiles, k // shortest) + 1):
        waves = triton.cdiv(num_tiles * splits, programs)
        fill = num_tiles * splits / (waves * programs)
        if fill > best_fill + 0.08:
            best, best_fill = splits, fill
    return best


def _tiles_of_many_rows(
    m: int, n: int, k: int, tuning: DeviceTuning, group: int | None, may_split: bool
) -> LinearTiles:
    tiles = LinearTiles(128, _BLOCKS_M[-1], group or 128, num_warps=8)
    num_tiles = triton.cdiv(n, tiles.block_n) * triton.cdiv(m, tiles.block_m)
    splits = min(tuning.linear_programs // num_tiles, k // 1024) if may_split else 1
    return _fitting(replace(tiles, splits=max(splits, 1)), 1, tuning)


def _fitting(tiles: LinearTiles, resident: int, tuning: DeviceTuning) -> LinearTiles:
    """With as many bytes in flight as with block_k = 128, if they fit beside those of the other
    programs on the SM; at the least two tiles."""
    block_k = max(tiles.block_k, 32)
    stage_bytes = (tiles.block_n + tiles.block_m) * block_k + 4 * tiles.block_m
    wanted = min(tiles.num_stages * max(128 // block_k, 1), 12)
    room = tuning.shared_bytes // resident - 1024
    return replace(tiles, num_stages=max(fitting_stages(wanted, stage_bytes, room), 2))
