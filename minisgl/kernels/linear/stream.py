"""The stream kernel of linear maps: a pipelined loop over tiles of k."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.device import apply_norm, arrive
from minisgl.kernels.linear.device import (
    columns_of,
    finish,
    load,
    load_residual,
    load_squares,
    multiply,
    next_exchange,
    spread,
    total,
    zeros,
)


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
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; }",
        "=r,l,r",
        [w + lane // pieces * k + start, count * 2],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows", "prefetch", "max_rows", "rank"])
def stream_kernel(
    out,
    squares,
    x,
    weight,
    bias,
    norm_weight,
    x_squares,
    num_rows,
    n,
    k,
    x_stride,
    num_parts,
    eps,
    targets,
    exchanges,
    max_rows,
    rank,
    partials,
    semaphores,
    split_size,
    prefetch,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    groups: tl.constexpr,
    parts: tl.constexpr,
    gated: tl.constexpr,
    whole_n: tl.constexpr,
    whole_k: tl.constexpr,
    stages: tl.constexpr,
    lanes: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of [block_n, block_m] of the result, over one split of k."""
    m_tile, part, n_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = part * split_size
    end = tl.minimum(first + split_size, k)
    weight += n_tile.to(tl.int64) * block_n * k
    up_weight = weight + n.to(tl.int64) * k
    if pdl:
        if whole_n and prefetch > 0:
            fetch(weight + first, k, end - first, prefetch, block_n, lanes)
            if gated:
                fetch(up_weight + first, k, end - first, prefetch, block_n, lanes)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    row = m_tile * block_m + tl.arange(0, block_m)
    column = n_tile * block_n + tl.arange(0, block_n)
    live = (row < num_rows)[:, None] & (column < n)[None, :]
    residual, exchange = squares, row  # placeholders unless they are used
    if squares is not None:
        residual = load_residual(out, row, column, num_rows, n)
    if exchanges is not None:
        exchange = next_exchange(exchanges, row, num_rows)
    if x_squares is not None:
        found = load_squares(x_squares, row, num_rows, num_parts, parts)
        scale = spread(tl.rsqrt(tl.sum(found, 1) / k + eps), groups)

    columns = columns_of(block_k, groups)
    w_row = tl.arange(0, block_n)
    if not whole_n:  # rows past the end repeat the last one; they are not written
        w_row = tl.minimum(w_row, n - 1 - n_tile * block_n)
    w_place = spread(w_row, groups) * k + columns
    x_place = spread(row * x_stride, groups) + columns
    real = spread(row < num_rows, groups)
    acc = zeros(block_n, block_m, groups)
    up = acc
    if norm_weight is not None:
        # Loaded once for each row, so that the compiler does not convert the rows to another
        # layout.
        factor_at = norm_weight + tl.broadcast_to(columns, x_place.shape)
        factor = tl.load(factor_at + first, mask=first + columns < end, other=0.0)
    for start in tl.range(first, end, block_k, num_stages=stages):
        inside = start + columns < end
        w = load(weight + start + w_place, inside, whole_k)
        rows = tl.load(x + start + x_place, mask=real if whole_k else real & inside, other=0.0)
        if norm_weight is not None:
            rows = apply_norm(rows, scale, factor)
            ahead = start + block_k  # loaded one tile ahead
            factor = tl.load(factor_at + ahead, mask=ahead + columns < end, other=0.0)
        acc = multiply(w, rows, acc, groups)
        if gated:
            w = load(up_weight + start + w_place, inside, whole_k)
            up = multiply(w, rows, up, groups)

    acc = total(acc, groups)
    up = total(up, groups) if gated else acc
    if partials is not None:
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
            acc = add_up(block_at, live, splits, block, block_m, block_n)
            if gated:
                up = add_up(block_at + block_m * block_n, live, splits, block, block_m, block_n)
            else:
                up = acc
            finish(
                out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
                row, column, num_rows, n, gated,
            )  # fmt: skip
    else:
        finish(
            out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
            row, column, num_rows, n, gated,
        )  # fmt: skip


@triton.jit
def add_up(
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
