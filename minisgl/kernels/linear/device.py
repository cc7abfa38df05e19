"""What the stream and the burst kernel have in common."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.comm.mailbox import send
from minisgl.kernels.device import silu_mul


@triton.jit
def columns_of(block_k: tl.constexpr, groups: tl.constexpr):
    """The elements of k of a tile: [1, block_k], or [groups, 1, block_k / groups]."""
    if groups == 1:
        return tl.arange(0, block_k)[None, :]
    else:
        size: tl.constexpr = block_k // groups
        lanes = tl.arange(0, size)[None, None, :]
        return tl.arange(0, groups)[:, None, None] * size + lanes


@triton.jit
def spread(row, groups: tl.constexpr):
    """What a row of a tile has, in the shape that goes with `_columns`."""
    if groups == 1:
        return row[:, None]
    else:
        return row[None, :, None]


@triton.jit
def load(at, inside, whole: tl.constexpr):
    if whole:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def multiply(w, x, acc, groups: tl.constexpr):
    """acc + w xᵀ, of each group by itself."""
    if groups == 1:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(w, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")


@triton.jit
def zeros(block_n: tl.constexpr, block_m: tl.constexpr, groups: tl.constexpr):
    if groups == 1:
        return tl.zeros((block_n, block_m), tl.float32)
    else:
        return tl.zeros((groups, block_n, block_m), tl.float32)


@triton.jit
def total(acc, groups: tl.constexpr):
    """[block_m, block_n], the groups added up."""
    if groups > 1:
        acc = tl.sum(acc, 0)
    return tl.trans(acc)


@triton.jit
def load_squares(
    squares,
    row,
    num_rows,
    num_parts,
    parts: tl.constexpr,
):
    part = tl.arange(0, parts)
    inside = (row < num_rows)[:, None] & (part < num_parts)[None, :]
    return tl.load(squares + row[:, None] * num_parts + part[None, :], mask=inside, other=0.0)


@triton.jit
def load_residual(out, row, column, num_rows, n):
    """The block of `out` that `finish` adds to."""
    live = (row < num_rows)[:, None] & (column < n)[None, :]
    return tl.load(out + row[:, None] * n + column[None, :], mask=live, other=0.0)


@triton.jit
def next_exchange(exchanges, row, num_rows):
    """The number of the exchange of each row, in which `finish` sends it."""
    return tl.load(exchanges + row, mask=row < num_rows, other=0) + 1


@triton.jit
def finish(
    out,
    squares,
    acc,
    up,
    bias,
    residual,
    targets,
    exchange,
    max_rows,
    rank,
    row,
    column,
    num_rows,
    n,
    gated: tl.constexpr,
):
    """Write the block at rows `row` and columns `column`. `up` is looked at if gated, `residual`,
    what is added to, if there are squares to be written, and `exchange` of each row if there are
    `targets`, inboxes."""
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        acc += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if gated:
        acc = silu_mul(acc, up, dtype)
    result = acc.to(dtype)
    inside = (row < num_rows)[:, None] & (column < n)[None, :]
    if squares is not None:
        result = (residual.to(tl.float32) + result.to(tl.float32)).to(dtype)
        wide = tl.where(inside, result.to(tl.float32), 0.0)
        place = squares + row * tl.num_programs(2) + tl.program_id(2)
        tl.store(place, tl.sum(wide * wide, 1), mask=row < num_rows)
    if targets is not None:
        line = ((exchange & 1) * len(targets) + rank) * max_rows + row
        there = line[:, None] * n + column[None, :]
        send(targets, there, result, exchange[:, None], inside)
    else:
        tl.store(out + row[:, None] * n + column[None, :], result, mask=inside)
