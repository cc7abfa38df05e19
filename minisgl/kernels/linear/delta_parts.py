"""What the kernels of a GEMM do for adapters: add v Bᵀ to a tile of sums."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from minisgl.kernels.adapters import Delta
from minisgl.kernels.inlined import prefetch, wait_for_previous


def adding(delta: Delta | None) -> tuple[Any, ...] | None:
    """The argument `delta` of a kernel that may add one."""
    if delta is None:
        return None
    v, weights, rows = delta
    numbers = (weights.max_rank, v.shape[1], weights.b.stride(0))
    return (v, weights.b, weights.ranks, rows.adapters, rows.active, *numbers, weights.starts)


@triton.jit
def wait_before_loop(delta, pdl: tl.constexpr):
    """Wait for the previous kernel, unless that is the shrink of a delta: all else is older then,
    and `wait_for_delta` comes before v is read. The next kernel may start at once: v is all that
    may not be complete, and no other kernel reads it."""
    if delta is None:
        wait_for_previous(pdl)
    elif pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_delta(delta, first, end, block_n: tl.constexpr, lanes: tl.constexpr):
    """Prefetches what `add_delta` reads of B for block_n rows of W, of as many adapters as the
    program has lanes: from memory while the loop runs, instead of after it."""
    b, ranks, active, b_stride = delta[1], delta[2], delta[4], delta[7]
    lane = tl.arange(0, lanes)
    mine = tl.load(active + 1 + lane, mask=lane < tl.load(active), other=0)
    rank = tl.load(ranks + mine - 1, mask=mine > 0, other=0)
    row_bytes = rank * (b.dtype.element_ty.primitive_bitwidth // 8)
    prefetch(
        b + (mine - 1).to(tl.int64) * b_stride + first * rank,
        row_bytes * tl.minimum(block_n, end - first),
    )


@triton.jit
def wait_for_delta(pdl: tl.constexpr):
    if pdl:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _part_of(column, starts):
    part = column * 0
    for i in tl.static_range(1, len(starts)):
        part += (column >= starts[i]).to(tl.int32)
    return part


@triton.jit
def add_delta(acc, delta, row, column, num_rows, end):
    """acc [block_m, block_n] with v Bᵀ of the rows of x and of W, which are before `end`.

    64 columns of B at a time are loaded and multiplied: 16 of each of four adapters. v is 0 for the
    rows that have another adapter, which adds 0 to their sums. A round takes the latency of L2,
    half a microsecond (e): one adapter of rank 16 takes one, eight take two, and 32 or eight of
    rank 64 take eight.
    """
    v, b, ranks, adapters, active = delta[0], delta[1], delta[2], delta[3], delta[4]
    max_rank, v_stride, b_stride, starts = delta[5], delta[6], delta[7], delta[8]
    unit: tl.constexpr = 16
    together: tl.constexpr = 4
    lane = tl.arange(0, together * unit)
    real = row < num_rows
    adapter = tl.load(adapters + row, mask=real, other=0)
    exists = column < end
    part_of_column = _part_of(column, starts)
    first_part = tl.min(part_of_column)
    last_part = tl.max(tl.where(exists, part_of_column, 0))
    added = tl.zeros((column.shape[0], row.shape[0]), tl.float32)
    count = tl.load(active)
    for start in tl.range(0, count, together, num_stages=1):
        index = start + lane // unit
        mine = tl.load(active + 1 + index, mask=index < count, other=0)
        mine = tl.max_constancy(mine, [unit])  # so that 16 bytes are loaded at once
        rank = tl.load(ranks + mine - 1, mask=mine > 0, other=0)
        rank = tl.multiple_of(tl.max_constancy(rank, [unit]), [unit])
        b_at = b + (mine - 1).to(tl.int64) * b_stride + lane % unit
        most = tl.max(rank)
        for first in tl.range(0, most, unit, num_stages=1):
            within = (first < rank)[None, :]
            w_at = b_at[None, :] + column[:, None] * rank[None, :] + first
            hers = (adapter[:, None] == mine[None, :]) & within & real[:, None]
            for part in tl.range(first_part, last_part + 1, num_stages=1):
                inside = (exists & (part_of_column == part))[:, None]
                w = tl.load(w_at, mask=inside & within, other=0.0)
                v_at = part * max_rank + first + lane % unit
                rows = tl.load(v + row[:, None] * v_stride + v_at[None, :], mask=hers, other=0.0)
                added = tl.dot(w, tl.trans(rows), added, input_precision="ieee")
    return acc + tl.trans(added)
