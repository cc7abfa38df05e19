"""What the kernels of GEMMs do for adapters: v Bᵀ of a tile of sums.

All of it but v is older than the GEMM's wait. So a program finds out before it which B its rows
take, loads those that it multiplies first, and has the others fetched into L2 beside its W.
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
    v, weights, rows, _ = delta
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
def wait_for_x(ready, pdl: tl.constexpr):
    """Wait for what a shrink tells that is past its wait, and then let the next launch start.

    The shrink lets this one start only when all its programs run, so that they never wait for
    those that poll here. All that is older than the shrink is complete afterwards.
    """
    while tl.atomic_add(ready, 0, sem="acquire", scope="gpu") == 0:
        pass
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_v(pdl: tl.constexpr):
    """Wait for the shrink itself, before anything is written."""
    if pdl:
        tl.extra.cuda.gdc_wait()


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
    """What `delta_of` takes of the adapters of the rows of x, and of its first two rounds, and the
    numbers of B that it multiplies first. Has B fetched for block_n rows of W, from `first` on. The
    first split of k adds all."""
    ranks, adapters, active = delta[2], delta[3], delta[4]
    together: tl.constexpr = len(delta[11])
    adapter = tl.load(adapters + row, mask=row < num_rows, other=0)
    rank = tl.load(ranks + adapter - 1, mask=adapter > 0, other=0)
    count = tl.where(split == 0, tl.load(active), 0)
    place = tl.arange(0, together)
    current, following = _adapters(delta, place, count), _adapters(delta, together + place, count)
    column = first + tl.arange(0, block_n)
    w = _load_b(delta, current[0], current[1], column, n, _part_of(first, delta[9]), 0)
    up = w
    if gated:
        part = _part_of(n + first, delta[9])
        up = _load_b(delta, current[0], current[1], n + column, 2 * n, part, 0)
    if pdl:
        _fetch(delta, count, first, n, block_n, lanes)
        if gated:
            _fetch(delta, count, n + first, 2 * n, block_n, lanes)
    return row, adapter, rank, count, current, following, w, up


@triton.jit
def _part_of(column, starts):
    part = column * 0
    for i in tl.static_range(1, len(starts)):
        part += (column >= starts[i]).to(tl.int32)
    return part


@triton.jit
def _load_b(delta, mine, rank, column, end, part, first):
    """[block_n, together, 16]: columns of B from `first` on of adapters of these ranks, and rows of
    a part, which are before `end`."""
    b, b_stride, starts = delta[1], delta[8], delta[9]
    unit: tl.constexpr = 16
    slot = tl.maximum(mine - 1, 0).to(tl.int64)
    row_size = rank // unit * unit  # so that 16 bytes are loaded at once
    at = b + slot[None, :] * b_stride + column[:, None] * row_size[None, :] + first
    inside = (column < end) & (_part_of(column, starts) == part)
    inside = inside[:, None] & (first < rank)[None, :]
    lane = tl.arange(0, unit)[None, None, :]
    return tl.load(at[:, :, None] + lane, mask=inside[:, :, None], other=0.0)


@triton.jit
def _span(column, end, starts):
    """The part of the first column, and how many parts all those before `end` have."""
    part = _part_of(column, starts)
    first = tl.min(part)
    return first, tl.max(tl.where(column < end, part - first, 0)) + 1


@triton.jit
def _load_v(delta, row, rank, part, exists, first):
    """[block_m, 16]: columns of v of a part, from `first` on; 0: above the rank of a row."""
    v, max_rank, v_stride, split_stride = delta[0], delta[5], delta[6], delta[7]
    splits: tl.constexpr = len(delta[10])
    lane = tl.arange(0, 16)
    at = v + row[:, None] * v_stride + part * max_rank + first + lane[None, :]
    v = sum_of_splits(at, split_stride, splits, ((first < rank) & exists)[:, None])
    return v.to(delta[1].dtype.element_ty)


@triton.jit
def _add(added, w, v, hers):
    """added + w vᵀ, each row with the columns of its adapter alone."""
    together: tl.constexpr = w.shape[1] * w.shape[2]
    v = tl.reshape(tl.where(hers, v[:, None, :], 0.0), (v.shape[0], together))
    w = tl.reshape(w, (w.shape[0], together))
    return tl.dot(w, tl.trans(v), added, input_precision="ieee")


@triton.jit
def delta_of(delta, found, column, n, gated: tl.constexpr):
    """B vᵀ [block_n, block_m] float32 of the rows of W, which are before n, and of x; and of the
    same rows of the other half if gated.

    A round multiplies 16 columns of B of each of its adapters at once. v is 0 for the rows that
    have another adapter, which adds 0 to their sums. A round takes one latency of L2 and of the
    tensor cores, some microsecond (e).
    """
    starts = delta[9]
    together: tl.constexpr = len(delta[11])
    row, adapter, rank_of_row, count, current, following, w, up = found
    mine, rank = current
    next_mine, next_rank = following
    first_part, num_parts = _span(column, n, starts)
    up_part, up_parts = first_part, num_parts
    if gated:
        up_part, up_parts = _span(n + column, 2 * n, starts)
    added = tl.zeros((column.shape[0], row.shape[0]), tl.float32)
    added_up = added
    for start in tl.range(0, count, together, num_stages=1):
        ahead = start + 2 * together + tl.arange(0, together)
        later_mine, later_rank = _adapters(delta, ahead, count)
        hers = adapter[:, None, None] == mine[None, :, None]
        for first in tl.range(0, tl.max(rank), 16, num_stages=1):
            for i in tl.range(0, tl.maximum(num_parts, up_parts), num_stages=1):
                if start + first + i > 0:
                    w = _load_b(delta, mine, rank, column, n, first_part + i, first)
                    if gated:
                        up = _load_b(delta, mine, rank, n + column, 2 * n, up_part + i, first)
                v = _load_v(delta, row, rank_of_row, first_part + i, i < num_parts, first)
                if gated:
                    v_up = _load_v(delta, row, rank_of_row, up_part + i, i < up_parts, first)
                added = _add(added, w, v, hers)
                if gated:
                    added_up = _add(added_up, up, v_up, hers)
        mine, rank, next_mine, next_rank = next_mine, next_rank, later_mine, later_rank
    return added, added_up
