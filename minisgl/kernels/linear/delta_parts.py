"""What the kernels of GEMMs do for adapters: v Bᵀ of a tile of sums.

All of it but v is older than the GEMM's wait. So a program finds out before it which B its rows
take, and has them fetched into L2 beside its W.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from minisgl.kernels.adapters import RANK_UNIT, Delta
from minisgl.kernels.inlined import prefetch

_LANES = 8192  # elements of B that a program multiplies at once, at most: 32 registers a thread


def adding(delta: Delta | None, block_n: int) -> tuple[Any, ...] | None:
    """The argument `delta` of a kernel that may add one, whose programs have block_n rows of W."""
    if delta is None:
        return None
    v, weights, rows = delta
    splits, num_rows, width = v.shape
    most = triton.next_power_of_2(min(num_rows, len(weights.ranks)))  # adapters with rows
    together = max(min(most, _LANES // (block_n * RANK_UNIT)), 1)
    tensors = (v, weights.b, weights.ranks, rows.adapters, rows.active)
    numbers = (weights.max_rank, width, num_rows * width, weights.b.stride(0), weights.starts)
    # Numbers that a kernel needs when it is compiled are lengths of tuples of constants.
    return (*tensors, *numbers, (1,) * splits, (1,) * together)


@triton.jit
def sum_of_splits(at, stride, splits: tl.constexpr, mask):
    """v, of splits that follow one another: in their order, so that equal rows have equal bits."""
    v = tl.zeros(at.shape, tl.float32)
    for i in range(splits):  # unrolled by the compiler, with all loads in flight
        v += tl.load(at + i * stride, mask=mask, other=0.0)
    return v


@triton.jit
def _adapters(delta, index, count):
    """Those of the step at these places of `active`, and their ranks; 0: none."""
    ranks, active = delta[2], delta[4]
    mine = tl.load(active + 1 + index, mask=index < count, other=0)
    return mine, tl.load(ranks + mine - 1, mask=mine > 0, other=0)


@triton.jit
def _fetch(delta, count, first, end, block_n: tl.constexpr, lanes: tl.constexpr):
    """Prefetches B for block_n rows of W, which are before `end`: each thread a quarter of that of
    an adapter."""
    b, b_stride = delta[1], delta[8]
    item: tl.constexpr = b.dtype.element_ty.primitive_bitwidth // 8
    lane = tl.arange(0, lanes)
    mine, rank = _adapters(delta, lane // 4, count)
    num_bytes = rank * tl.minimum(block_n, end - first) * item
    size = tl.cdiv(num_bytes, 64) * 16
    start = lane % 4 * size
    at = b + (mine - 1).to(tl.int64) * b_stride + first * rank + start // item
    prefetch(at, tl.maximum(tl.minimum(size, num_bytes - start), 0))


@triton.jit
def before_wait(
    delta,
    row,
    num_rows,
    split,
    first,
    n,
    gated: tl.constexpr,
    block_n: tl.constexpr,
    lanes: tl.constexpr,
    pdl: tl.constexpr,
):
    """What `delta_of` takes of the adapters of the rows of x, and of its first round. Has B fetched
    for block_n rows of W, from `first` on. The first split of k adds all."""
    ranks, adapters, active = delta[2], delta[3], delta[4]
    together: tl.constexpr = len(delta[11])
    adapter = tl.load(adapters + row, mask=row < num_rows, other=0)
    rank = tl.load(ranks + adapter - 1, mask=adapter > 0, other=0)
    count = tl.where(split == 0, tl.load(active), 0)
    mine, rank_of_mine = _adapters(delta, tl.arange(0, together), count)
    if pdl:
        _fetch(delta, count, first, n, block_n, lanes)
        if gated:
            _fetch(delta, count, n + first, 2 * n, block_n, lanes)
    return row, adapter, rank, count, mine, rank_of_mine


@triton.jit
def _part_of(column, starts):
    part = column * 0
    for i in tl.static_range(1, len(starts)):
        part += (column >= starts[i]).to(tl.int32)
    return part


@triton.jit
def delta_of(delta, found, column, end):
    """B vᵀ [block_n, block_m] float32 of the rows of W, which are before `end`, and of x.

    A round multiplies 16 columns of B of each of its adapters at once. v is 0 for the rows that
    have another adapter, which adds 0 to their sums. A round takes the latency of L2 and of the
    tensor cores, some microsecond (e).
    """
    v, b, max_rank, v_stride, split_stride = delta[0], delta[1], delta[5], delta[6], delta[7]
    b_stride, starts = delta[8], delta[9]
    splits: tl.constexpr = len(delta[10])
    together: tl.constexpr = len(delta[11])
    row, adapter, rank_of_row, count, mine, rank = found
    unit: tl.constexpr = 16
    lane = tl.arange(0, unit)
    v_at = v + row[:, None] * v_stride + lane[None, :]
    exists = column < end
    part_of_column = _part_of(column, starts)
    first_part = tl.min(part_of_column)
    last_part = tl.max(tl.where(exists, part_of_column, 0))
    added = tl.zeros((column.shape[0], row.shape[0]), tl.float32)
    for start in tl.range(0, count, together, num_stages=1):
        slot = tl.maximum(mine - 1, 0).to(tl.int64)
        row_size = rank // unit * unit  # so that 16 bytes are loaded at once
        w_at = b + slot[None, :] * b_stride + column[:, None] * row_size[None, :]
        hers = adapter[:, None, None] == mine[None, :, None]
        for first in tl.range(0, tl.max(rank), unit, num_stages=1):
            for part in tl.range(first_part, last_part + 1, num_stages=1):
                inside = (exists & (part_of_column == part))[:, None] & (first < rank)[None, :]
                w = tl.load(
                    w_at[:, :, None] + (first + lane)[None, None, :],
                    mask=inside[:, :, None],
                    other=0.0,
                )
                place = v_at + part * max_rank + first
                some = (first < rank_of_row)[:, None]
                rows = sum_of_splits(place, split_stride, splits, some).to(w.dtype)
                rows = tl.where(hers, rows[:, None, :], 0.0)
                w = tl.reshape(w, (column.shape[0], together * unit))
                rows = tl.reshape(rows, (row.shape[0], together * unit))
                added = tl.dot(w, tl.trans(rows), added, input_precision="ieee")
        mine, rank = _adapters(delta, start + together + tl.arange(0, together), count)
    return added
