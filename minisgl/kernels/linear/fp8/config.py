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


def allocate_workspace(
    shapes: Iterable[tuple[int, int, int | None]], device: torch.device
) -> LinearWorkspace:
    """Room for maps of these (n, k, group), with any number of rows."""
    tuning = tuning_of(device)
    sizes = [
        workspace_size(m, n, k, choose_tiles(m, n, k, tuning, group=group))
        for n, k, group in shapes
        for m in _BLOCKS_M
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
    # leave the fewest places on the SMs empty. More programs on an SM have shallower pipelines.
    best, best_fill = None, -1.0
    most_splits = max(k // (768 if m <= 32 else 1024), 1) if may_split else 1
    for resident in (1, 2, 3, 4) if m <= 32 else (1, 2):
        places = tuning.linear_programs * resident
        for block_n in (64, 128):
            num_tiles = triton.cdiv(n, block_n)
            splits = min(max(places // num_tiles, 1), most_splits)
            block_k = group or (256 if block_n == 64 else 128)
            tiles = LinearTiles(block_n, block_m, block_k, splits=splits)
            programs = num_tiles * split_k(k, tiles)[0]
            fill = programs / (triton.cdiv(programs, places) * places)
            if fill > best_fill + 0.03:
                stages = _stages(tiles, tuning.shared_bytes // resident)
                prefetch = _PREFETCHED if programs <= places else 0
                best = replace(tiles, num_stages=stages, prefetch=prefetch)
                best_fill = fill
    assert best is not None
    return best


def _tiles_of_many_rows(
    m: int, n: int, k: int, tuning: DeviceTuning, group: int | None, may_split: bool
) -> LinearTiles:
    tiles = LinearTiles(128, _BLOCKS_M[-1], group or 128, num_warps=8)
    num_tiles = triton.cdiv(n, tiles.block_n) * triton.cdiv(m, tiles.block_m)
    splits = min(tuning.linear_programs // num_tiles, k // 1024) if may_split else 1
    return replace(tiles, splits=max(splits, 1), num_stages=_stages(tiles, tuning.shared_bytes))


def _stages(tiles: LinearTiles, shared_bytes: int) -> int:
    """As many tiles in flight as fit, up to six; at the least two."""
    stage_bytes = (tiles.block_n + tiles.block_m) * max(tiles.block_k, 32)
    stage_bytes += (tiles.block_n + tiles.block_m) * 4  # scales
    return max(fitting_stages(6, stage_bytes, shared_bytes - 2048), 2)
