"""The burst kernel of linear maps: all tiles of a program in registers at once."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import apply_norm, from_here, wait_for_previous
from minisgl.kernels.linear.delta_parts import before_wait, deltas_of
from minisgl.kernels.linear.gemm_parts import (
    columns_of,
    finish,
    load,
    load_residual,
    load_squares,
    multiply,
    next_exchange,
    spread,
    total,
    total_squares,
    zeros,
)


@triton.jit(do_not_specialize=["num_rows", "max_rows", "rank"])
def burst_kernel(
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
    normed,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    groups: tl.constexpr,
    parts: tl.constexpr,
    pieces: tl.constexpr,
    gated: tl.constexpr,
    gelu: tl.constexpr,
    whole_n: tl.constexpr,
    whole_k: tl.constexpr,
    lanes: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of [block_n, block_m] of the result over all of k, `pieces` tiles in registers. The
    first block of a row also writes its norm to `normed`, if that is not None."""
    m_tile, n_tile = tl.program_id(0), tl.program_id(2)
    row = m_tile * block_m + tl.arange(0, block_m)
    column = n_tile * block_n + tl.arange(0, block_n)
    columns = columns_of(block_k, groups)
    w_row = tl.arange(0, block_n)
    if not whole_n:
        w_row = tl.minimum(w_row, n - 1 - n_tile * block_n)
    weight += n_tile.to(tl.int64) * block_n * k
    if gated:
        up_weight = weight + n.to(tl.int64) * k
    w_place = spread(w_row, groups) * k + columns
    w, up_w, factor, rows = (), (), (), ()
    for i in tl.static_range(pieces):
        at = i * block_k + columns
        w += (load(weight + w_place + i * block_k, at < k, whole_k),)
        if gated:
            up_w += (load(up_weight + w_place + i * block_k, at < k, whole_k),)
        if norm_weight is not None:
            factor += (load(norm_weight + at, at < k, whole_k),)
    if delta is not None:
        adapted = before_wait(
            delta, row, num_rows, 0, n_tile * block_n, n, gated, block_n, lanes, pdl
        )
    wait_for_previous(pdl)

    x += spread(row * x_stride, groups) + columns
    for i in tl.static_range(pieces):
        there = spread(row < num_rows, groups)
        if not whole_k:
            there &= i * block_k + columns < k
        rows += (tl.load(x + i * block_k, mask=there, other=0.0),)
    residual, exchange = squares, row  # placeholders unless they are used
    if squares is not None:
        residual = load_residual(out, row, column, num_rows, n)
    if exchanges is not None:
        exchange = next_exchange(exchanges, row, num_rows)
    if x_squares is not None:
        found = load_squares(x_squares, row, num_rows, num_parts, parts)
    tl.debug_barrier()  # all loads are issued

    if norm_weight is not None:
        if x_squares is None:
            sums = tl.zeros([block_m], tl.float32)
            for i in tl.static_range(pieces):
                wide = from_here(rows[i], pdl).to(tl.float32)
                sums += total_squares(wide, groups)
        else:
            sums = tl.sum(from_here(found, pdl), 1)
        scale = spread(tl.rsqrt(sums / k + eps), groups)
    if delta is not None:
        added, added_up = deltas_of(delta, adapted, n_tile * block_n, n, gated, block_n)
    acc = zeros(block_n, block_m, groups)
    up = acc
    for i in tl.static_range(pieces):
        piece = from_here(rows[i], pdl)
        if norm_weight is not None:
            piece = apply_norm(piece, scale, from_here(factor[i], pdl))
        if normed is not None:  # noqa: SIM102 - decided when compiled, the other when run
            if n_tile == 0:
                element = i * block_k + columns
                exists = spread(row < num_rows, groups) & (element < k)
                tl.store(normed + spread(row * k, groups) + element, piece, mask=exists)
        acc = multiply(from_here(w[i], pdl), piece, acc, groups)
        if gated:
            up = multiply(from_here(up_w[i], pdl), piece, up, groups)
    acc = total(acc, groups)
    up = total(up, groups) if gated else acc
    if delta is not None:
        acc += tl.trans(added)
        if gated:
            up += tl.trans(added_up)
    finish(
        out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
        row, column, num_rows, n, gated, gelu,
    )  # fmt: skip
