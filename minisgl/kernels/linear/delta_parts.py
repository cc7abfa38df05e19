"""What the kernels of GEMMs do for adapters: v Bᵀ of a tile of sums.

All of it but v is older than the GEMM's wait. So a program finds out before it which B its rows
take, loads those of the first adapters, and has the others fetched into L2 beside its W.
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
    return (*tensors, *numbers, (1,) * splits, (1,) * together, (1,) * (1 + (most > together)))


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
    """What `deltas_of` takes of the adapters of the rows of x, and B of its first round, for
    block_n rows of W from `first` on; if gated, also for those from n + first on. Has the rest of B
    fetched. The first split of k adds all."""
    ranks, adapters, active = delta[2], delta[3], delta[4]
    together: tl.constexpr = len(delta[11])
    adapter = tl.load(adapters + row, mask=row < num_rows, other=0)
    rank = tl.load(ranks + adapter - 1, mask=adapter > 0, other=0)
    count = tl.where(split == 0, tl.load(active), 0)
    mine, rank_of_mine = _adapters(delta, tl.arange(0, together), count)
    most = tl.where(count > 0, tl.max(rank), 0)
    found = (row, adapter, rank, count, most, mine, rank_of_mine)
    if pdl:
        _fetch(delta, count, first, n, block_n, lanes)
        if gated:
            _fetch(delta, count, n + first, 2 * n, block_n, lanes)
    w = _load_b(delta, first, n, 0, _part_of(first, delta[9]), mine, rank_of_mine, block_n)
    up_w = w
    if gated:
        up = n + first
        up_w = _load_b(delta, up, 2 * n, 0, _part_of(up, delta[9]), mine, rank_of_mine, block_n)
    return found, w, up_w


@triton.jit
def _part_of(column, starts):
    part = column * 0
    for i in tl.static_range(1, len(starts)):
        part += (column >= starts[i]).to(tl.int32)
    return part


@triton.jit
def _load_b(delta, first, end, lane, part, mine, rank, block_n: tl.constexpr):
    """[block_n, adapters, 16]: columns `lane` to `lane` + 15 of B of the adapters `mine`, of rows
    of W from `first` on that are of a part and before `end`; else 0."""
    b, b_stride = delta[1], delta[8]
    unit: tl.constexpr = 16
    column = first + tl.arange(0, block_n)
    slot = tl.maximum(mine - 1, 0).to(tl.int64)
    row_size = rank // unit * unit  # so that 16 bytes are loaded at once
    at = b + slot[None, :] * b_stride + column[:, None] * row_size[None, :] + lane
    inside = ((column < end) & (_part_of(column, delta[9]) == part))[:, None]
    inside &= (lane < rank)[None, :]
    lanes = tl.arange(0, unit)[None, None, :]
    return tl.load(at[:, :, None] + lanes, mask=inside[:, :, None], other=0.0)


@triton.jit
def _multiply(w, rows, mine, adapter, added):
    """added + w vᵀ, with v = 0 for the rows of other adapters than those of w."""
    hers = adapter[:, None, None] == mine[None, :, None]
    theirs = tl.where(hers, rows, 0.0)
    theirs = tl.reshape(theirs, (theirs.shape[0], theirs.shape[1] * theirs.shape[2]))
    w = tl.reshape(w, (w.shape[0], w.shape[1] * w.shape[2]))
    return tl.dot(w, tl.trans(theirs), added, input_precision="ieee")


@triton.jit
def _rows_of(delta, found, lane, part):
    """[block_m, 1, 16]: v of a part, in x's dtype, from column `lane` on."""
    v, b, max_rank, v_stride, split_stride = delta[0], delta[1], delta[5], delta[6], delta[7]
    splits: tl.constexpr = len(delta[10])
    row, _, rank, count, _, _, _ = found
    place = part * max_rank + lane + tl.arange(0, 16)[None, None, :]
    some = (lane < tl.where(count > 0, rank, 0))[:, None, None]
    at = v + row[:, None, None] * v_stride + place
    return sum_of_splits(at, split_stride, splits, some).to(b.dtype.element_ty)


@triton.jit
def _add_part(delta, found, w, rows, mine, lane, part, first, end, added, block_n: tl.constexpr):
    """`added`, and what 16 columns of B add to the rows of W of a part, from v of these columns and
    B of the first round."""
    together: tl.constexpr = len(delta[11])
    _, adapter, _, count, _, _, _ = found
    added = _multiply(w, rows, mine, adapter, added)
    if len(delta[12]) > 1:
        for start in tl.range(together, count, together, num_stages=1):
            mine, rank = _adapters(delta, start + tl.arange(0, together), count)
            w = _load_b(delta, first, end, lane, part, mine, rank, block_n)
            added = _multiply(w, rows, mine, adapter, added)
    return added


@triton.jit
def _delta_of(delta, found, w, rows, first, end, block_n: tl.constexpr):
    """B vᵀ [block_n, block_m] float32 of the rows of x, and of W from `first` on that are before
    `end`. w, rows: B and v of the first round.

    A round multiplies 16 columns of B of some adapters at once. v is 0 for the rows that have
    another adapter, which adds 0 to their sums: it is loaded once for all rounds, as a row has one
    adapter.
    """
    row, _, _, count, most, mine, _ = found
    first_part = _part_of(first, delta[9])
    last_part = _part_of(tl.minimum(first + block_n, end) - 1, delta[9])
    added = tl.zeros((block_n, row.shape[0]), tl.float32)
    if most > 0:
        added = _add_part(delta, found, w, rows, mine, 0, first_part, first, end, added, block_n)
    for lane in tl.range(0, most, 16, num_stages=1):
        other = tl.where(lane == 0, first_part + 1, first_part)
        for part in tl.range(other, last_part + 1, num_stages=1):
            # Loaded anew, so that no address is kept in registers for what few adapters need.
            mine, rank = _adapters(delta, tl.arange(0, len(delta[11])), count)
            w = _load_b(delta, first, end, lane, part, mine, rank, block_n)
            rows = _rows_of(delta, found, lane, part)
            added = _add_part(delta, found, w, rows, mine, lane, part, first, end, added, block_n)
    return added


@triton.jit
def deltas_of(delta, before, first, n, gated: tl.constexpr, block_n: tl.constexpr):
    """B vᵀ of block_n rows of W from `first` on, and of those from n + first on if gated, else the
    same again. before: of `before_wait`. All v of first rounds are in flight at once."""
    found, w, up_w = before
    v = _rows_of(delta, found, 0, _part_of(first, delta[9]))
    if gated:
        up = n + first
        up_v = _rows_of(delta, found, 0, _part_of(up, delta[9]))
        added_up = _delta_of(delta, found, up_w, up_v, up, 2 * n, block_n)
        return _delta_of(delta, found, w, v, first, n, block_n), added_up
    else:
        added = _delta_of(delta, found, w, v, first, n, block_n)
        return added, added
