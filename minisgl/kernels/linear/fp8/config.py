"""Which tiles an FP8 linear map takes, as a function of its shape alone.

m: rows of x; n: rows of W; k: columns of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import triton

from minisgl.kernels.linear.config import LinearTiles, LinearWorkspace, split_k, workspace_size
from minisgl.kernels.tuning import DeviceTuning, fitting_stages, tuning_of

_BLOCKS_M = (16, 32, 64, 128)
_PREFETCHED = 512  # bytes of each row of W
_IN_FLIGHT = 112 << 10  # bytes on an SM


def allocate_workspace(
    shapes: Iterable[tuple[int, int, int | None]], device: torch.device
) -> LinearWorkspace:
    """Room for maps of these (n, k, group), with any number of rows."""
    tuning = tuning_of(device)
    most_rows = _BLOCKS_M[-1] * tuning.linear_programs  # with more, k is not split
    sizes = [
        workspace_size(m, n, k, choose_tiles(m, n, k, tuning, group=group))
        for n, k, group in shapes
        for m in (*_BLOCKS_M, *range(_BLOCKS_M[-1], most_rows + 1, _BLOCKS_M[-1]))
    ]
    num_partials = max((size[0] for size in sizes), default=0)
    num_semaphores = max((size[1] for size in sizes), default=0)
    return LinearWorkspace(
        partials=torch.empty(num_partials, dtype=torch.float32, device=device),
        semaphores=torch.zeros(num_semaphores, dtype=torch.int32, device=device),
    )


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
    """A tile of k is one group, if there are groups. Any number of rows has tiles."""
    block_m = next((size for size in _BLOCKS_M if m <= size), _BLOCKS_M[-1])
    if block_m == _BLOCKS_M[-1]:
        return _tiles_of_many_rows(m, n, k, tuning, group, may_split)
    # All programs are to run at once, so that they share the bandwidth and end together, and to
    # leave the fewest places on the SMs empty; but the fewer an SM has, the longer are their parts.
    best, best_fill = None, 0.0
    most_splits = max(k // (768 if m <= 32 else 1024), 1) if may_split else 1
    for resident in (1, 2, 3, 4) if m <= 32 else (1, 2, 3):
        places = tuning.linear_programs * resident
        for block_n in (64, 128):
            num_tiles = triton.cdiv(n, block_n)
            splits = min(max(places // num_tiles, 1), most_splits)
            tiles = LinearTiles(block_n, block_m, group or 128, splits, prefetch=_PREFETCHED)
            fill = num_tiles * split_k(k, tiles)[0] / places
            if best_fill + 0.08 < fill <= 1:
                best, best_fill = _deep(tiles, tuning, resident), fill
    return best or _deep(LinearTiles(64, block_m, group or 128), tuning, 2)


def _tiles_of_many_rows(
    m: int, n: int, k: int, tuning: DeviceTuning, group: int | None, may_split: bool
) -> LinearTiles:
    tiles = LinearTiles(128, _BLOCKS_M[-1], group or 128, num_warps=8)
    num_tiles = triton.cdiv(n, tiles.block_n) * triton.cdiv(m, tiles.block_m)
    splits = min(tuning.linear_programs // num_tiles, k // 1024) if may_split else 1
    return _deep(replace(tiles, splits=max(splits, 1)), tuning, 1)


def _deep(tiles: LinearTiles, tuning: DeviceTuning, resident: int) -> LinearTiles:
    """With as many tiles in flight as cover the memory's latency, if they fit beside those of the
    other programs on the SM; at the least two."""
    stage_bytes = (tiles.block_n + tiles.block_m) * max(tiles.block_k, 32) + 4 * tiles.block_m
    wanted = triton.cdiv(_IN_FLIGHT // resident, stage_bytes) + 1
    room = tuning.shared_bytes // resident - 1024
    return replace(tiles, num_stages=max(fitting_stages(wanted, stage_bytes, room), 2))
