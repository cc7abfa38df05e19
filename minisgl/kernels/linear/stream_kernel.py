"""The stream kernel of linear maps: a pipelined loop over tiles of k."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import apply_norm, wait_for_previous
from minisgl.kernels.linear.delta_parts import before_wait, deltas_of
from minisgl.kernels.linear.gemm_parts import (
    columns_of,
    fetch,
    finish_split,
    load,
    load_residual,
    load_squares,
    multiply,
    next_exchange,
    spread,
    sum_squares,
    total,
    zeros,
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
    delta,
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
    gelu: tl.constexpr,
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
    if gated:
        up_weight = weight + n.to(tl.int64) * k
    if pdl and whole_n and prefetch > 0:
        fetch(weight + first, k, end - first, prefetch, block_n, lanes)
        if gated:
            fetch(up_weight + first, k, end - first, prefetch, block_n, lanes)
    row = m_tile * block_m + tl.arange(0, block_m)
    column = n_tile * block_n + tl.arange(0, block_n)
    if delta is not None:
        adapted = before_wait(
            delta, row, num_rows, part, n_tile * block_n, n, gated, block_n, lanes, pdl
        )
    wait_for_previous(pdl)

    if delta is not None:
        added, added_up = deltas_of(delta, adapted, n_tile * block_n, n, gated, block_n)
    live = (row < num_rows)[:, None] & (column < n)[None, :]
    residual, exchange = squares, row  # placeholders unless they are used
    if squares is not None:
        residual = load_residual(out, row, column, num_rows, n)
    if exchanges is not None:
        exchange = next_exchange(exchanges, row, num_rows)
    if norm_weight is not None:
        if x_squares is None:
            sums = sum_squares(x, row, x_stride, num_rows, k, parts)
        else:
            sums = tl.sum(load_squares(x_squares, row, num_rows, num_parts, parts), 1)
        scale = spread(tl.rsqrt(sums / k + eps), groups)

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
    if delta is not None:
        acc += tl.trans(added)
        if gated:
            up += tl.trans(added_up)
    finish_split(
        out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
        partials, semaphores, split_size, live, row, column, num_rows, n, k, gated, gelu,
    )  # fmt: skip
