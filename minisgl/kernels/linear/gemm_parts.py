"""Helpers of the kernels of linear maps."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.comm.mailbox import send
from minisgl.kernels.inlined import arrive, gated_mul, prefetch


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
    """Values of the rows of a tile, in a shape that broadcasts with `columns_of`."""
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
    """[block_m, block_n]: the sum of the groups, transposed."""
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
def sum_squares(x, row, x_stride, num_rows, k, block: tl.constexpr):
    """[block_m]: those of whole rows of x, `block` elements at a time."""
    sums = tl.zeros([row.shape[0]], tl.float32)
    for start in range(0, k, block):
        column = start + tl.arange(0, block)
        inside = (row < num_rows)[:, None] & (column < k)[None, :]
        some = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        wide = some.to(tl.float32)
        sums += tl.sum(wide * wide, 1)
    return sums


@triton.jit
def total_squares(rows, groups: tl.constexpr):
    """[block_m]: those of a tile of x in float32."""
    sums = tl.sum(rows * rows, 1 if groups == 1 else 2)
    if groups > 1:
        sums = tl.sum(sums, 0)
    return sums


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
def fetch(
    w,
    k,
    length,
    size,
    block_n: tl.constexpr,
    lanes: tl.constexpr,
):
    """Prefetches the first `size` elements of block_n rows, which have `length`, into L2: each
    thread a piece of a row."""
    pieces: tl.constexpr = lanes // block_n if lanes > block_n else 1
    piece = size // pieces
    lane = tl.arange(0, block_n * pieces)
    start = lane % pieces * piece
    count = tl.minimum(tl.maximum(length - start, 0), piece)
    address = w + lane // pieces * k + start
    prefetch(address, count * (w.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def _add_up(
    partials,
    live,
    splits,
    stride: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """The sum of the partial sums of all splits, of small blocks with four loads in flight."""
    acc = tl.zeros((block_m, block_n), tl.float32)
    if block_m * block_n > 4096:  # more than one does not fit into the registers
        for i in range(splits):
            acc += tl.load(partials + i * stride, mask=live, other=0.0, cache_modifier=".cg")
    else:
        for i in range(0, splits, 4):
            at = partials + i * stride
            left = splits - i - tl.arange(0, 1)[:, None]  # the interpreter does not broadcast masks
            a = tl.load(at, mask=live, other=0.0, cache_modifier=".cg")
            b = tl.load(at + stride, mask=live & (left > 1), other=0.0, cache_modifier=".cg")
            c = tl.load(at + 2 * stride, mask=live & (left > 2), other=0.0, cache_modifier=".cg")
            d = tl.load(at + 3 * stride, mask=live & (left > 3), other=0.0, cache_modifier=".cg")
            acc += (a + b) + (c + d)
    return acc


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
    gelu: tl.constexpr,
):
    """Writes the block at rows `row` and columns `column`. `up` is used if gated, `residual` if
    there are squares to write, `exchange` of each row if there are `targets`, the addresses of
    inboxes."""
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        acc += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if gated:
        acc = gated_mul(acc, up, gelu, dtype)
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


@triton.jit
def finish_split(
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
    partials,
    semaphores,
    split_size,
    live,
    row,
    column,
    num_rows,
    n,
    k,
    gated: tl.constexpr,
    gelu: tl.constexpr,
):
    """Finish a block of sums. With `partials` they are those of one split of k: the programs of a
    block store theirs there, and the last one adds them up and finishes. `live`: what of the block
    exists."""
    if partials is not None:
        m_tile, part, n_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        block_m: tl.constexpr = acc.shape[0]
        block_n: tl.constexpr = acc.shape[1]
        tile = n_tile * tl.cdiv(num_rows, block_m) + m_tile
        splits = tl.cdiv(k, split_size)
        block: tl.constexpr = block_m * block_n * (2 if gated else 1)
        within = tl.arange(0, block_m)[:, None] * block_n + tl.arange(0, block_n)[None, :]
        block_at = partials + tile * splits * block + within
        tl.store(block_at + part * block, acc, mask=live)
        if gated:
            tl.store(block_at + part * block + block_m * block_n, up, mask=live)
        if arrive(semaphores, tile) == splits - 1:
            tl.store(semaphores + tile, 0)  # for the next launch
            acc = _add_up(block_at, live, splits, block, block_m, block_n)
            if gated:
                up = _add_up(block_at + block_m * block_n, live, splits, block, block_m, block_n)
            else:
                up = acc
            finish(
                out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
                row, column, num_rows, n, gated, gelu,
            )  # fmt: skip
    else:
        finish(
            out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
            row, column, num_rows, n, gated, gelu,
        )  # fmt: skip
