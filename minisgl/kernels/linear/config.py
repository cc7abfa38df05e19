"""Which kernel and which tiles a linear map of few rows takes, as a function of its shape alone.

m: rows of x; n: rows of W, in a gated map those of both halves; k: columns of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from minisgl.kernels.tuning import H200, DeviceTuning, fitting_stages, tuning_of

MAX_ROWS = H200.linear_weights[-1][0]  # with more rows, should_use says no


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """How a linear map is tiled. Sizes of blocks are powers of two."""

    block_n: int  # rows of W in a program; of a gated map, rows of either half
    block_m: int  # rows of x
    block_k: int  # elements of k in a tile, of all warp groups together
    splits: int = 1  # programs that share a tile's k (split-k)
    groups: int = 1  # parts of block_k that different warps take
    num_warps: int = 4
    num_stages: int = 4  # tiles in flight, the one at work included
    burst: bool = False  # all tiles of k at once, in registers
    prefetch: int = 0  # elements of k, a multiple of 128, to fetch into L2 before the wait


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """Memory through which the programs of a split-k GEMM add up their results.

    One launch at a time may use it, or launches that overlap by the rule of launch.py.
    """

    partials: Tensor  # [any] float32: partial sums
    semaphores: Tensor  # [any] int32, one a tile of the result: zero between launches

    @classmethod
    def allocate(
        cls, shapes: Iterable[tuple[int, int]], max_rows: int, device: torch.device
    ) -> LinearWorkspace:
        """Room for maps of these (n, k), plain or gated, with up to max_rows rows."""
        tuning = tuning_of(device)
        sizes = [
            workspace_size(m, n, k, choose_tiles(m, n, k, tuning, gated=gated), gated=gated)
            for n, k in shapes
            for m in _block_rows(max_rows)
            for gated in (False, True)
        ]
        num_partials = max((size[0] for size in sizes), default=0)
        num_semaphores = max((size[1] for size in sizes), default=0)
        return cls(
            partials=torch.empty(num_partials, dtype=torch.float32, device=device),
            semaphores=torch.zeros(num_semaphores, dtype=torch.int32, device=device),
        )


def workspace_size(
    m: int, n: int, k: int, tiles: LinearTiles, *, gated: bool = False
) -> tuple[int, int]:
    """The elements of `partials` and of `semaphores` that a call takes."""
    splits, _ = split_k(k, tiles)
    if splits == 1 or tiles.burst:
        return 0, 0
    halves = 2 if gated else 1
    num_tiles = triton.cdiv(n // halves, tiles.block_n) * triton.cdiv(m, tiles.block_m)
    return num_tiles * splits * tiles.block_n * tiles.block_m * halves, num_tiles


def split_k(k: int, tiles: LinearTiles) -> tuple[int, int]:
    """The number of splits that have something to do, and the elements of k in each, a multiple of
    block_k."""
    num_tiles = triton.cdiv(k, tiles.block_k)
    tiles_per_split = triton.cdiv(num_tiles, min(tiles.splits, num_tiles))
    return triton.cdiv(num_tiles, tiles_per_split), tiles_per_split * tiles.block_k


def choose_tiles(
    m: int, n: int, k: int, tuning: DeviceTuning, *, gated: bool = False, may_split: bool = True
) -> LinearTiles:
    """The tiles for half precision. Measured on an H200 by scripts/bench_linear.py --tune and by
    the time of whole steps; with less shared memory, as many tiles in flight as fit."""
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
        prefetch=256 if num_tiles * splits <= programs * resident else 0,
    )


def _burst_tiles(m: int, n: int, k: int, halves: int, tuning: DeviceTuning) -> LinearTiles | None:
    """For at most 96 KiB of W in a program, and two programs on an SM. W and a tile of x pass
    through shared memory, on their way to the threads that multiply them."""
    block_k = min(max(triton.next_power_of_2(k), 128), 1024)
    block_m = 8 if m <= 8 else 16
    num_tiles = triton.cdiv(k, block_k) * halves
    if num_tiles > 3 or triton.cdiv(n, 16) > 2 * tuning.linear_programs:
        return None
    if (16 * num_tiles + block_m) * block_k * 2 > tuning.shared_bytes:
        return None
    return LinearTiles(16, block_m, block_k, groups=8, num_warps=8, burst=True)


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


def should_use(tuning: DeviceTuning, m: int, n: int, k: int, *, gated: bool) -> bool:
    """Whether our kernels are faster than the best of cuBLAS's algorithms."""
    if k % 64 != 0:
        return False
    # cuBLAS is slow where W is small and, up to 64 rows, k the longer side.
    if m > tuning.linear_gated_rows and (gated or (m <= 64 and k <= n)):
        return False
    return any(m <= rows and n * k <= size for rows, size in tuning.linear_weights)


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
