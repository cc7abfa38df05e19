"""The small kernel of linear maps: one or two rows on CUDA cores, by many small programs."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import apply_norm, from_here, wait_for_previous
from minisgl.kernels.linear.gemm_parts import finish, load, load_residual, load_squares


@triton.jit(do_not_specialize=["num_rows"])
def small_kernel(
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
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    parts: tl.constexpr,
    pieces: tl.constexpr,
    gated: tl.constexpr,
    gelu: tl.constexpr,
    whole_n: tl.constexpr,
    whole_k: tl.constexpr,
    pdl: tl.constexpr,
):
    """block_n columns of the result. Each thread has some elements of k of all its rows of W, in
    registers before the wait: so few that the programs of the next launch fit beside."""
    m_tile, n_tile = tl.program_id(0), tl.program_id(2)
    column = n_tile * block_n + tl.arange(0, block_n)
    columns = tl.arange(0, block_k)[None, :]
    w_row = column if whole_n else tl.minimum(column, n - 1)
    w_at = weight + w_row.to(tl.int64)[:, None] * k + columns
    up_at = w_at
    if gated:
        up_at += n.to(tl.int64) * k
    w, up_w, factor = (), (), ()
    for i in tl.static_range(pieces):
        inside = i * block_k + columns < k
        w += (load(w_at + i * block_k, inside, whole_k),)
        if gated:
            up_w += (load(up_at + i * block_k, inside, whole_k),)
        if norm_weight is not None:
            factor += (load(norm_weight + i * block_k + columns, inside, whole_k),)
    wait_for_previous(pdl)

    rows, residuals, found = (), (), ()
    for m in tl.static_range(block_m):
        row = m_tile * block_m + m + tl.arange(0, 1)
        for i in tl.static_range(pieces):
            there = (row < num_rows)[:, None]
            if not whole_k:
                there = there & (i * block_k + columns < k)
            x_at = x + row[:, None] * x_stride + i * block_k + columns
            rows += (tl.load(x_at, mask=there, other=0.0),)
        if squares is not None:
            residuals += (load_residual(out, row, column, num_rows, n),)
        if x_squares is not None:
            found += (load_squares(x_squares, row, num_rows, num_parts, parts),)
    tl.debug_barrier()  # all loads are issued

    for m in tl.static_range(block_m):
        row = m_tile * block_m + m + tl.arange(0, 1)
        if norm_weight is not None:
            if x_squares is not None:
                sums = tl.sum(from_here(found[m], pdl), 1)
            else:
                sums = tl.zeros([1], tl.float32)
                for i in tl.static_range(pieces):
                    wide = from_here(rows[m * pieces + i], pdl).to(tl.float32)
                    sums += tl.sum(wide * wide, 1)
            scale = tl.rsqrt(sums / k + eps)[:, None]
        products = tl.zeros([block_n, block_k], tl.float32)
        up_products = products
        for i in tl.static_range(pieces):
            piece = from_here(rows[m * pieces + i], pdl)
            if norm_weight is not None:
                piece = apply_norm(piece, scale, from_here(factor[i], pdl))
            piece = piece.to(tl.float32)
            products += from_here(w[i], pdl).to(tl.float32) * piece
            if gated:
                up_products += from_here(up_w[i], pdl).to(tl.float32) * piece
        acc = tl.sum(products, 1)[None, :]
        up = tl.sum(up_products, 1)[None, :] if gated else acc
        residual = residuals[m] if squares is not None else acc
        finish(
            out, squares, acc, up, bias, residual, None, None, 0, 0,
            row, column, num_rows, n, gated, gelu,
        )  # fmt: skip
