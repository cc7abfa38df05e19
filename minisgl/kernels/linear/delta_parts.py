"""What the kernels of a GEMM do for adapters: v Bᵀ of a tile, which they add to its sums.

After the wait for v there is a chain of dependent loads, at best some 2 microseconds (e): adapters
of the rows, their ranks, then v and B from L2. At the end of a program each product would pay it.
So the stream kernel does this inside of its loop, when the loads of all tiles that are left are in
flight: they take 2 to 4 microseconds (e) to arrive, and then the chain costs nothing. B itself is
fetched into L2 by the loop's first iteration. Each row takes the B of its own adapter, 2 KiB a tile
at rank 16, mostly from L1 if another row has the same: so there are no rounds over adapters, and 32
adapters take as long as one but for the bytes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from minisgl.kernels.adapters import Delta
from minisgl.kernels.inlined import prefetch, wait_for_previous

UNROLLED = tl.constexpr(64)  # ranks


def adding(delta: Delta | None) -> tuple[Any, ...] | None:
    """The argument `delta` of a kernel that may add one."""
    if delta is None:
        return None
    v, weights, rows = delta
    numbers = (weights.max_rank, v.shape[1], weights.b.stride(0))
    return (v, weights.b, weights.ranks, rows.adapters, *numbers, weights.starts)


@triton.jit
def wait_before_loop(delta, pdl: tl.constexpr):
    """Wait for the previous kernel, unless that is the shrink of a delta: all else is older then,
    and `delta_of` waits before v is read. The next kernel may start at once: v is all that may not
    be complete, and no other kernel reads it."""
    if delta is None:
        wait_for_previous(pdl)
    elif pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _ranks_of(delta, row, num_rows):
    """Slot and rank of the adapter of each row; of no adapter the rank is 0."""
    adapter = tl.load(delta[3] + row, mask=row < num_rows, other=0)
    slot = tl.maximum(adapter - 1, 0)
    rank = tl.load(delta[2] + slot, mask=adapter > 0, other=0)
    return slot.to(tl.int64), tl.multiple_of(rank, [16])  # so that 16 bytes are loaded at once


@triton.jit
def up_columns(column, n):
    """The columns of the other half of a gated product."""
    return tl.where(column < n, column + n, 2 * n)


@triton.jit
def fetch_delta(
    delta,
    m_tile,
    n_tile,
    num_rows,
    first,
    n,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    lanes: tl.constexpr,
):
    """Prefetches what a tile of the n rows of W from `first` takes of B into L2: each thread a
    piece of an adapter's."""
    pieces: tl.constexpr = lanes // block_m if lanes > block_m else 1
    piece: tl.constexpr = block_n // pieces if block_n > pieces else 1
    lane = tl.arange(0, block_m * pieces)
    slot, rank = _ranks_of(delta, m_tile * block_m + lane % block_m, num_rows)
    start = n_tile * block_n + lane // block_m * piece
    count = tl.minimum(tl.maximum(n - start, 0), piece)
    row_bytes = rank * (delta[1].dtype.element_ty.primitive_bitwidth // 8)
    prefetch(delta[1] + slot * delta[6] + (first + start) * rank, row_bytes * count)


@triton.jit
def _part_of(column, starts):
    part = column * 0
    for i in tl.static_range(1, len(starts)):
        part += (column >= starts[i]).to(tl.int32)
    return part


@triton.jit
def _places(delta, row, column, num_rows, end, unit: tl.constexpr):
    """[block_m, block_n, unit] addresses of B and of v, which of the columns exist, and the ranks
    of the rows."""
    lane = tl.arange(0, unit)[None, None, :]
    slot, rank = _ranks_of(delta, row, num_rows)
    w_place = column[None, :, None] * rank[:, None, None] + lane
    v_place = (_part_of(column, delta[7]) * delta[4])[None, :, None] + lane
    w_at = delta[1] + (slot * delta[6])[:, None, None] + w_place
    v_at = delta[0] + (row * delta[5])[:, None, None] + v_place
    return w_at, v_at, (column < end)[None, :, None], rank


@triton.jit
def _terms(w_at, v_at, inside):
    w = tl.load(w_at, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(w * tl.load(v_at, mask=inside, other=0.0).to(tl.float32), 2)


@triton.jit
def delta_of(
    delta,
    first_row,
    block_m: tl.constexpr,
    column,
    num_rows,
    end,
    start: tl.constexpr,
    unrolled: tl.constexpr,
    pdl: tl.constexpr,
):
    """[block_m, block_n] float32: v Bᵀ of rows of x and of W, which are before `end`; of the ranks
    from `start`. `unrolled`: of no more than UNROLLED ranks, and without a loop."""
    block: tl.constexpr = block_m * column.shape[0]
    if block > 2048:  # what a thread needs of such a block does not fit into its registers
        half: tl.constexpr = block_m // 2
        low = delta_of(delta, first_row, half, column, num_rows, end, start, unrolled, pdl)
        second = first_row + half
        high = delta_of(delta, second, half, column, num_rows, end, start, unrolled, pdl)
        both = tl.permute(tl.join(low, high), (2, 0, 1))
        return tl.reshape(both, (block_m, column.shape[0]))
    else:
        unit: tl.constexpr = 4 if block > 1024 else 8
        row = first_row + tl.arange(0, block_m)
        w_at, v_at, there, rank = _places(delta, row, column, num_rows, end, unit)
        most = tl.max(rank)
        added = tl.zeros((block_m, column.shape[0]), tl.float32)
        if pdl:
            tl.extra.cuda.gdc_wait()
        if unrolled:
            for first in tl.static_range(start, UNROLLED, unit):
                if first < most:
                    inside = there & (first < rank)[:, None, None]
                    added += _terms(w_at + first, v_at + first, inside)
        else:
            for first in tl.range(start, most, unit, num_stages=1):
                inside = there & (first < rank)[:, None, None]
                added += _terms(w_at + first, v_at + first, inside)
        return added
