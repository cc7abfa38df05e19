"""How the GEMMs of all kinds of weights are tiled, and the memory in which k is split.

m: rows of x; n: rows of W, in a gated map those of both halves; k: columns of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor


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
    small: bool = False  # the same on CUDA cores, for few rows of W
    prefetch: int = 0  # elements of k, a multiple of 128, to fetch into L2 before the wait


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """Memory through which the programs of a split-k GEMM add up their results.

    One launch at a time may use it, or launches that overlap by the rule of launch_options.py.
    """

    partials: Tensor  # [any] float32: partial sums
    semaphores: Tensor  # [any] int32, one a tile of the result: zero between launches

    @classmethod
    def allocate(cls, sizes: Iterable[tuple[int, int]], device: torch.device) -> LinearWorkspace:
        """Room for any one of the calls that take these `workspace_size`s."""
        partials, semaphores = zip((0, 0), *sizes, strict=True)
        return cls(
            partials=torch.empty(max(partials), dtype=torch.float32, device=device),
            semaphores=torch.zeros(max(semaphores), dtype=torch.int32, device=device),
        )

    def takes(self, size: tuple[int, int]) -> bool:
        """Whether there is room for a call that takes this `workspace_size`."""
        return size[0] <= self.partials.numel() and size[1] <= self.semaphores.numel()


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


def split_arguments(
    m: int,
    n: int,
    k: int,
    tiles: LinearTiles,
    workspace: LinearWorkspace | None,
    *,
    gated: bool = False,
) -> tuple[int, tuple[Tensor | None, Tensor | None, int]]:
    """The number of splits of k, and a kernel's arguments `partials`, `semaphores` and
    `split_size`."""
    splits, split_size = split_k(k, tiles)
    if splits == 1:
        return splits, (None, None, split_size)
    assert workspace is not None
    assert workspace.takes(workspace_size(m, n, k, tiles, gated=gated))
    return splits, (workspace.partials, workspace.semaphores, split_size)
