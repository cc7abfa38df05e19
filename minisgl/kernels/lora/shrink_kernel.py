"""v = x Aᵀ of the adapters of a step's rows: one launch a product, for all its parts.

A program multiplies up to 16 rows with one adapter and 16 rows of its A, over some columns. A of
Llama-3.1-8B's products is 0.1 to 0.5 MB an adapter at rank 16: 8 to 24 programs of 16 or 32 KiB,
whose load from memory is issued before the wait, so that x from L2 is what is left. The sums of the
programs are added up by what multiplies with B.

The next launch may start before this one waits: it is a GEMM that has W fetched into L2, which
takes longer than a shrink (launch_options.py).

Where x is a norm, `shrink_norm` computes that, too: programs beside the others write it for the
GEMM, which waits for this launch anyway, and the others norm what they multiply.

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
from minisgl.kernels.inlined import apply_norm
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.linear.epilogue import FusedNorm
from minisgl.kernels.linear.gemm_parts import (
    columns_of,
    load_squares,
    multiply,
    spread,
    total,
    zeros,
)
from minisgl.kernels.lora.reference import TILE_ROWS

_BLOCK_K, _MOST_SPLITS = 512, 16
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


def shrink(x: Tensor, weights: AdapterWeights, rows: AdaptedRows, *, pdl: bool = True) -> Delta:
    """v of each row with an adapter; undefined of other rows, and above the rank of a slot.

    x: [num_rows, k], its rows contiguous. `pdl`: see launch_options.py; weights and rows must be
    older than two launches, for the next launch, too.
    """
    return _launch(x, None, None, weights, rows, pdl)


def shrink_norm(
    x: Tensor, norm: FusedNorm, weights: AdapterWeights, rows: AdaptedRows, *, pdl: bool = True
) -> tuple[Tensor, Delta]:
    """The norm of x, of all rows, and what `shrink` returns of it; x contiguous."""
    assert x.is_contiguous() and norm.squares is not None and norm.squares.is_contiguous()
    normed = torch.empty_like(x)
    return normed, _launch(x, norm, normed, weights, rows, pdl)


def _launch(
    x: Tensor,
    norm: FusedNorm | None,
    normed: Tensor | None,
    weights: AdapterWeights,
    rows: AdaptedRows,
    pdl: bool,
) -> Delta:
    (num_rows, k), (_, num_parts, max_rank, _) = x.shape, weights.a.shape
    assert weights.a.shape[3] == k and x.stride(1) == 1 and num_rows == len(rows.adapters)
    places, splits = num_parts * (max_rank // RANK_UNIT), _Splits.of(k)
    num_tiles = len(rows.tiles)
    spread_over = num_tiles * places <= _MOST_SPREAD
    shape = (splits.num_splits if spread_over else 1, num_rows, num_parts * max_rank)
    v = x.new_empty(shape, dtype=torch.float32)
    if num_tiles == 0:
        return Delta(v, weights, rows)
    of_norm: tuple[object, ...] | None = None
    num_programs = num_tiles
    if norm is not None and norm.squares is not None:
        num_squares = norm.squares.shape[1]
        padded = (1,) * triton.next_power_of_2(num_squares)
        sizes = (num_rows, num_squares, num_tiles, norm.eps, padded)
        of_norm = (normed, norm.weight, norm.squares, *sizes)
        num_programs += triton.cdiv(num_rows, TILE_ROWS)
    _shrink[(num_programs, places, len(v))](
        v,
        x,
        weights.a,
        weights.ranks,
        rows.order,
        rows.tiles,
        of_norm,
        k,
        x.stride(0),
        v.stride(1),
        v.stride(0),
        weights.a.stride(0),
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
def _load_factors(norm, at, k, block_k: tl.constexpr, pieces: tl.constexpr, groups: tl.constexpr):
    """The weights of the norm for the blocks of a split, as a tuple; without a norm empty."""
    found = ()
    if norm is not None:
        for i in tl.static_range(pieces):
            columns = at + i * block_k + columns_of(block_k, groups)
            found += (tl.load(norm[1] + columns, mask=columns < k, other=0.0),)
    return found


@triton.jit
def _squares_of(norm, row, real):
    """What sums up to the squares of rows; without a norm `row`."""
    if norm is None:
        return row
    else:
        row = tl.where(real, row, norm[3])
        return load_squares(norm[2], row, norm[3], norm[4], len(norm[7]))


@triton.jit
def _load_x(
    x,
    norm,
    factors,
    squares,
    i: tl.constexpr,
    at,
    k,
    real,
    block_k: tl.constexpr,
    groups: tl.constexpr,
):
    """Block i of a split of x, or of its norm."""
    columns = at + i * block_k + columns_of(block_k, groups)
    rows = tl.load(x + columns, mask=spread(real, groups) & (columns < k), other=0.0)
    if norm is not None:  # summed up here, so that x is loaded meanwhile
        scale = tl.rsqrt(tl.sum(squares, 1) / k + norm[6])
        rows = apply_norm(rows, spread(scale, groups), factors[i])
    return rows


@triton.jit
def _sum_of_split(
    w,
    x,
    norm,
    factors,
    squares,
    at,
    k,
    real,
    unit: tl.constexpr,
    block_k: tl.constexpr,
    groups: tl.constexpr,
):
    """[rows, unit] float32: the products of x, or of its norm, with the blocks `w` of a split."""
    acc = zeros(unit, real.shape[0], groups)
    for i in tl.static_range(len(w)):
        rows = _load_x(x, norm, factors, squares, i, at, k, real, block_k, groups)
        acc = multiply(w[i], rows, acc, groups)
    return total(acc, groups)


@triton.jit
def _write_norm(
    norm,
    x,
    x_stride,
    k,
    first_row,
    at,
    count,
    tile_rows: tl.constexpr,
    block_k: tl.constexpr,
    pieces: tl.constexpr,
    groups: tl.constexpr,
    pdl: tl.constexpr,
):
    """The norm of some rows, over `count` splits of k from element `at` on."""
    row = (first_row + tl.arange(0, tile_rows)).to(tl.int64)
    real = row < norm[3]
    factors = _load_factors(norm, at, k, block_k, pieces, groups)
    if pdl:
        tl.extra.cuda.gdc_wait()
    squares = _squares_of(norm, row, real)
    x += spread(row * x_stride, groups)
    out = norm[0] + spread(row * k, groups)
    for _ in tl.range(0, count, num_stages=1):
        for i in tl.static_range(pieces):
            rows = _load_x(x, norm, factors, squares, i, at, k, real, block_k, groups)
            columns = at + i * block_k + columns_of(block_k, groups)
            tl.store(out + columns, rows, mask=spread(real, groups) & (columns < k))
        at += block_k * pieces
        if count > 1:
            factors = _load_factors(norm, at, k, block_k, pieces, groups)


@triton.jit
def _shrink(
    v,
    x,
    a,
    ranks,
    order,
    tiles,
    norm,
    k,
    x_stride,
    v_stride,
    split_stride,
    a_stride,
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
    """A tile of rows and `unit` columns of v. `spread_over`: over one split of k. With a `norm`,
    the programs after those of tiles write it."""
    tile, place, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    split_size: tl.constexpr = block_k * pieces
    if norm is not None:  # noqa: SIM102 - decided when compiled, the other when run
        if tile >= norm[5]:
            if place == 0:
                count: tl.constexpr = 1 if spread_over else splits
                first_row = (tile - norm[5]) * tile_rows
                _write_norm(
                    norm, x, x_stride, k, first_row, split * split_size, count,
                    tile_rows, block_k, pieces, groups, pdl,
                )  # fmt: skip
            return
    adapter = tl.load(tiles + tile * 3)
    if (adapter == 0) & (tile > 0):  # those of one tile always wait: then this launch ends after
        return  # the one before, as the next relies on
    slot = tl.maximum(adapter - 1, 0).to(tl.int64)
    part, first_rank = place // (max_rank // unit), place % (max_rank // unit) * unit
    has_work = (adapter > 0) & (first_rank < tl.load(ranks + slot))
    lane = tl.arange(0, unit)
    column = part * max_rank + first_rank + lane
    a += slot * a_stride + spread(column * k, groups)
    some = spread(lane < tl.where(has_work, unit, 0), groups)
    if spread_over:
        w = _load_a(a, split * split_size, k, some, block_k, pieces, groups)
        factors = _load_factors(norm, split * split_size, k, block_k, pieces, groups)
    index = tl.load(tiles + tile * 3 + 1) + tl.arange(0, tile_rows)
    real = index < tl.load(tiles + tile * 3 + 2)
    row = tl.load(order + index, mask=real, other=0).to(tl.int64)
    x_at = x + spread(row * x_stride, groups)
    if pdl:
        tl.extra.cuda.gdc_wait()

    if has_work:
        squares = _squares_of(norm, row, real)
        if spread_over:
            at = split * split_size
            acc = _sum_of_split(w, x_at, norm, factors, squares, at, k, real, unit, block_k, groups)
        else:
            acc = tl.zeros((tile_rows, unit), tl.float32)
            for i in tl.range(0, splits, num_stages=1):
                at = i * split_size
                w = _load_a(a, at, k, some, block_k, pieces, groups)
                factors = _load_factors(norm, at, k, block_k, pieces, groups)
                acc += _sum_of_split(
                    w, x_at, norm, factors, squares, at, k, real, unit, block_k, groups
                )
        v_at = v + split * split_stride + row[:, None] * v_stride + column[None, :]
        tl.store(v_at, acc, mask=real[:, None])
