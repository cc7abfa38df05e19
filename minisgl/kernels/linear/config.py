"""Which tiles a linear map of few rows takes, and when its kernels are worth it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from minisgl.kernels.launch import fitting_stages, shared_bytes_of

MAX_ROWS = 128  # with more, is_worth_it says no


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a linear map is shared out. Sizes of blocks are powers of two."""

    block_n: int  # rows of W in a program; of a gated map, rows of either half
    block_m: int  # rows of x
    block_k: int  # elements of k in a tile, of all groups together
    splits: int = 1  # programs that share a tile's k
    groups: int = 1  # parts of block_k that different warps take
    num_warps: int = 4
    num_stages: int = 4  # tiles in flight, the one at work included
    burst: bool = False  # all tiles of k at once, in registers
    prefetch: int = 0  # elements of k, a multiple of 128, that L2 fetches before the wait


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """Where the programs that share a tile leave their parts. `arrivals` is zero between launches.

    One launch at a time may use it, or launches that overlap by the rule of launch.py.
    """

    partials: Tensor  # [any] float32
    arrivals: Tensor  # [any] int32

    @classmethod
    def allocate(
        cls, shapes: Iterable[tuple[int, int]], max_rows: int, device: torch.device
    ) -> LinearWorkspace:
        """Room for maps of these (n, k), plain or gated (n counting both halves)."""
        shared_bytes = shared_bytes_of(device)
        sizes = [
            workspace_size(m, n, k, tiles(m, n, k, shared_bytes, gated=gated), gated=gated)
            for n, k in shapes
            for m in _block_rows(max_rows)
            for gated in (False, True)
        ]
        return cls(
            partials=torch.empty(
                max((size[0] for size in sizes), default=0), dtype=torch.float32, device=device
            ),
            arrivals=torch.zeros(
                max((size[1] for size in sizes), default=0), dtype=torch.int32, device=device
            ),
        )


def workspace_size(m: int, n: int, k: int, how: Tiles, *, gated: bool = False) -> tuple[int, int]:
    """The elements of `partials` and of `arrivals` that a call takes."""
    splits, _ = shares_of(k, how)
    if splits == 1 or how.burst:
        return 0, 0
    halves = 2 if gated else 1
    num_tiles = triton.cdiv(n // halves, how.block_n) * triton.cdiv(m, how.block_m)
    return num_tiles * splits * how.block_n * how.block_m * halves, num_tiles


_NUM_SMS = 132


def tiles(
    m: int, n: int, k: int, shared_bytes: int, *, gated: bool = False, may_split: bool = True
) -> Tiles:
    """For half precision on an H200, by scripts/bench_linear.py --tune and by the time of whole
    steps; where a program may have less than its shared memory, with what fits. n counts both
    halves of a gated map."""
    halves = 2 if gated else 1
    n //= halves
    if m > 64:
        return _tiles_of_many_rows(m, n, k, halves, shared_bytes, may_split)
    if m <= 16 and (how := _burst_tiles(m, n, k, halves, shared_bytes)) is not None:
        return how

    block_m = max(16, triton.next_power_of_2(m))
    num_tiles = triton.cdiv(n, 64)
    resident = splits = 1
    if may_split and num_tiles < _NUM_SMS:
        # As many programs on each multiprocessor as leave the fewest of their places empty, but
        # each with a few tiles at least.
        most_resident = 1 if gated else 3 if m <= 16 else 2
        most_splits = max(k // (384 if m <= 32 else 512), 1)
        found = [
            (min(_NUM_SMS * resident // num_tiles, most_splits), resident)
            for resident in range(1, most_resident + 1)
        ]
        splits, resident = max(found, key=lambda pair: pair[0] / pair[1])
    # The last programs of a gated map would have the device to themselves: let all run at once.
    narrow = resident == 3 or (gated and _NUM_SMS < num_tiles <= _NUM_SMS * 3 // 2)
    how = Tiles(64, block_m, 64 if narrow else 128, splits=splits)
    # Deep pipelines where a program has its place to itself, as gated ones have at any depth.
    alone = resident == 1 and (num_tiles <= _NUM_SMS or (gated and num_tiles > 2 * _NUM_SMS))
    stage_bytes = (64 * halves + block_m) * how.block_k * 2
    deep = (narrow or alone) and stage_bytes * 6 <= shared_bytes
    return replace(
        how,
        num_stages=6 if deep else fitting_stages(4, stage_bytes, shared_bytes),
        prefetch=256 if num_tiles * splits <= _NUM_SMS * resident else 0,
    )


def _burst_tiles(m: int, n: int, k: int, halves: int, shared_bytes: int) -> Tiles | None:
    """For at most 96 KiB of W in a program, and two programs on a multiprocessor. All of it and a
    tile of x pass through shared memory, on their way to the threads that multiply them."""
    block_k = min(max(triton.next_power_of_2(k), 128), 1024)
    block_m = 8 if m <= 8 else 16
    num_tiles = triton.cdiv(k, block_k) * halves
    if num_tiles > 3 or triton.cdiv(n, 16) > 2 * _NUM_SMS:
        return None
    if (16 * num_tiles + block_m) * block_k * 2 > shared_bytes:
        return None
    return Tiles(16, block_m, block_k, groups=8, num_warps=8, burst=True)


def _tiles_of_many_rows(
    m: int, n: int, k: int, halves: int, shared_bytes: int, may_split: bool
) -> Tiles:
    stage_bytes = (64 * halves + 64) * 128 * 2
    how = Tiles(64, 64, 128, num_stages=fitting_stages(4, stage_bytes, shared_bytes))
    num_tiles = triton.cdiv(n, how.block_n) * triton.cdiv(m, how.block_m)
    if not may_split:
        return how
    return replace(how, splits=max(min(_NUM_SMS // num_tiles, k // (how.block_k * 4)), 1))


def is_worth_it(m: int, n: int, k: int, *, gated: bool) -> bool:
    """Whether this is faster than the best of cuBLAS's algorithms, by the time of whole decode
    steps of Qwen3-0.6B and 14B on an H200. n counts both halves of a gated map."""
    if k % 64 != 0 or m > MAX_ROWS:
        return False
    if m > 32:  # cuBLAS is slow where W is small and, up to 64 rows, k the longer side
        return not gated and n * k <= 1 << 22 and (m > 64 or k > n)
    return n * k <= 1 << (26 if m <= 16 else 24)


def is_norm_worth_it(m: int, n: int, k: int, *, gated: bool) -> bool:
    """Whether this is faster than a norm by itself and what `is_worth_it` says behind it: where x
    is long, norming it in each program holds up the reading of W."""
    return m <= 32 and k <= 2048 and is_worth_it(m, n, k, gated=gated)


def can_leave_norm(m: int, n: int, k: int, *, device: torch.device) -> bool:
    """Whether `linear` can leave the norm, and that is faster than two launches."""
    if not is_norm_worth_it(m, n, k, gated=False):
        return False
    return tiles(m, n, k, shared_bytes_of(device)).burst


def _block_rows(max_rows: int) -> list[int]:
    """The numbers of rows up to `max_rows` that take most room, one for each kind of tiles."""
    powers = [1 << i for i in range(max_rows.bit_length()) if 1 << i <= max_rows]
    return [*powers, max_rows]


def shares_of(k: int, how: Tiles) -> tuple[int, int]:
    """Splits that have something to do, and the elements of k of each, in whole tiles."""
    num_tiles = triton.cdiv(k, how.block_k)
    share = triton.cdiv(num_tiles, min(how.splits, num_tiles))
    return triton.cdiv(num_tiles, share), share * how.block_k
