"""v = x Aᵀ of the adapters of a step's rows: one launch a product, for all its parts.

A program multiplies up to 16 rows with one adapter and 16 rows of its A, over 512 columns or some
thousands. A of Llama-3.1-8B's products is 0.1 to 0.5 MB an adapter at rank 16: 24 to 64 programs of
16 KiB, whose load from memory is issued before the wait, so that x from L2 and the sum of the
splits, some 3 microseconds (e), are what is left. A GEMM of ours that takes the result
(linear/epilogue.py) runs its loop meanwhile and waits only before it adds v Bᵀ. Together they make
a product of one row 4.0 to 5.5 microseconds longer (one H200, `bench_kernels.py lora`).

The sum of a row is that of its splits in their order, whichever programs computed them, and a tile
of tensor cores does not mix its rows: the bits of v depend on x, the adapter and k alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.adapters import RANK_UNIT, AdaptedRows, AdapterWeights, Delta
from minisgl.kernels.inlined import arrive, wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.linear.gemm_parts import columns_of, multiply, spread, total, zeros
from minisgl.kernels.linear.tiles import LinearWorkspace
from minisgl.kernels.lora.reference import TILE_ROWS

_BLOCK_K, _MOST_SPLITS = 512, 32
_MOST_SPREAD = 512  # tiles of v up to which each split has a program


class _Splits(NamedTuple):
    """How k is split: by k alone."""

    block_k: int
    pieces: int  # blocks of a split
    num_splits: int

    @classmethod
    def of(cls, k: int) -> _Splits:
        block_k = min(max(triton.next_power_of_2(k), 64), _BLOCK_K)
        pieces = triton.next_power_of_2(triton.cdiv(k, block_k * _MOST_SPLITS))
        return cls(block_k, pieces, triton.cdiv(k, block_k * pieces))


def allocate_workspace(device: torch.device) -> LinearWorkspace:
    """Room for any product; 17 MB. It must not be that of the GEMMs, which run meanwhile."""
    size = (_MOST_SPREAD * _MOST_SPLITS * TILE_ROWS * RANK_UNIT, _MOST_SPREAD)
    return LinearWorkspace.allocate([size], device)


def shrink(
    x: Tensor,
    weights: AdapterWeights,
    rows: AdaptedRows,
    workspace: LinearWorkspace,
    *,
    pdl: bool = True,
) -> Delta:
    """v of each row with an adapter, rounded to x's dtype; undefined of other rows, and above the
    rank of a slot.

    x: [num_rows, k], its rows contiguous. `pdl`: see launch_options.py; weights and rows must be
    older than two launches.
    """
    (num_rows, k), (_, num_parts, max_rank, _) = x.shape, weights.a.shape
    assert weights.a.shape[3] == k and x.stride(1) == 1 and num_rows == len(rows.adapters)
    v = x.new_empty((num_rows, num_parts * max_rank))
    places, splits = num_parts * (max_rank // RANK_UNIT), _Splits.of(k)
    num_tiles = len(rows.tiles)
    if num_tiles == 0:
        return Delta(v, weights, rows)
    spread_over = num_tiles * places <= _MOST_SPREAD
    _shrink[(num_tiles, places, splits.num_splits if spread_over else 1)](
        v,
        x,
        weights.a,
        weights.scales,
        weights.ranks,
        rows.order,
        rows.tiles,
        workspace.partials,
        workspace.semaphores,
        k,
        x.stride(0),
        weights.a.stride(0),
        num_parts,
        max_rank,
        tile_rows=TILE_ROWS,
        unit=RANK_UNIT,
        block_k=splits.block_k,
        pieces=splits.pieces,
        splits=splits.num_splits,
        spread_over=spread_over,
        groups=4,
        num_warps=4,
        **pdl_options(x.device, pdl),
    )
    return Delta(v, weights, rows)


@triton.jit
def _load_a(a, at, k, real, block_k: tl.constexpr, pieces: tl.constexpr, groups: tl.constexpr):
    """The blocks of a split of 16 rows of A, as a tuple."""
    found = ()
    for i in tl.static_range(pieces):
        columns = at + i * block_k + columns_of(block_k, groups)
        found += (tl.load(a + columns, mask=real & (columns < k), other=0.0),)
    return found


@triton.jit
def _sum_of_split(
    w, x, at, k, real, unit: tl.constexpr, block_k: tl.constexpr, groups: tl.constexpr
):
    """[rows, unit] float32: the products of x with the blocks `w` of a split."""
    acc = zeros(unit, real.shape[0], groups)
    for i in tl.static_range(len(w)):
        columns = at + i * block_k + columns_of(block_k, groups)
        mask = spread(real, groups) & (columns < k)
        acc = multiply(w[i], tl.load(x + columns, mask=mask, other=0.0), acc, groups)
    return total(acc, groups)


@triton.jit
def _shrink(
    v,
    x,
    a,
    scales,
    ranks,
    order,
    tiles,
    partials,
    semaphores,
    k,
    x_stride,
    a_stride,
    num_parts,
    max_rank,
    tile_rows: tl.constexpr,
    unit: tl.constexpr,
    block_k: tl.constexpr,
    pieces: tl.constexpr,
    splits: tl.constexpr,
    spread_over: tl.constexpr,
    groups: tl.constexpr,
    pdl: tl.constexpr,
):
    """A tile of rows and `unit` columns of v. `spread_over`: over one split of k, and the last
    program of a tile adds them up."""
    tile, place, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    split_size: tl.constexpr = block_k * pieces
    adapter = tl.load(tiles + tile * 3)
    slot = tl.maximum(adapter - 1, 0).to(tl.int64)
    part, first_rank = place // (max_rank // unit), place % (max_rank // unit) * unit
    has_work = (adapter > 0) & (first_rank < tl.load(ranks + slot))
    lane = tl.arange(0, unit)
    a_row = part * max_rank + first_rank + lane
    a += slot * a_stride + spread(a_row * k, groups)
    some = spread(lane < tl.where(has_work, unit, 0), groups)
    if spread_over:
        w = _load_a(a, split * split_size, k, some, block_k, pieces, groups)
    index = tl.load(tiles + tile * 3 + 1) + tl.arange(0, tile_rows)
    real = index < tl.load(tiles + tile * 3 + 2)
    row = tl.load(order + index, mask=real, other=0).to(tl.int64)
    x_at = x + spread(row * x_stride, groups)
    # All programs wait, since the next launch relies on the end of the one before.
    wait_for_previous(pdl)

    if has_work:
        acc = tl.zeros((tile_rows, unit), tl.float32)
        last = True
        if spread_over:
            acc = _sum_of_split(w, x_at, split * split_size, k, real, unit, block_k, groups)
            if splits > 1:
                index_of_tile = tile * tl.num_programs(1) + place
                within = tl.arange(0, tile_rows)[:, None] * unit + lane[None, :]
                block_at = partials + index_of_tile * (splits * tile_rows * unit) + within
                tl.store(block_at + split * (tile_rows * unit), acc)
                last = arrive(semaphores, index_of_tile) == splits - 1
                if last:
                    tl.store(semaphores + index_of_tile, 0)
                    parts = ()
                    for i in tl.static_range(splits):  # all loads are in flight
                        at = block_at + i * (tile_rows * unit)
                        parts += (tl.load(at, cache_modifier=".cg"),)
                    acc = tl.zeros((tile_rows, unit), tl.float32)
                    for i in tl.static_range(splits):
                        acc += parts[i]
        else:
            for i in tl.range(0, splits, num_stages=1):
                w = _load_a(a, i * split_size, k, some, block_k, pieces, groups)
                acc += _sum_of_split(w, x_at, i * split_size, k, real, unit, block_k, groups)
        if last:
            result = acc * tl.load(scales + slot * num_parts + part)
            column = part * max_rank + first_rank + lane
            v_at = v + row[:, None] * (num_parts * max_rank) + column[None, :]
            tl.store(v_at, result.to(v.dtype.element_ty), mask=real[:, None])
