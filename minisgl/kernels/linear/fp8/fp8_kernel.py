"""The kernel of FP8 and INT8 linear maps: a pipelined loop over tiles of k, on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.linear.delta_parts import before_wait, deltas_of
from minisgl.kernels.linear.gemm_parts import fetch, finish_split, load, next_exchange


@triton.jit
def scale_row(n_tile, w_row, block_n: tl.constexpr, scale_rows: tl.constexpr):
    """The row of scales of each row of a tile of W: one number if they share it."""
    if scale_rows % block_n == 0:
        return n_tile * block_n // scale_rows
    else:
        return (n_tile * block_n + w_row) // scale_rows


@triton.jit
def down(scale):
    """Scales of the rows of a tile, or their common one, in a shape that broadcasts."""
    if scale.type.is_block():
        return scale[:, None]
    else:
        return scale


@triton.jit
def no_sums(weight, block_n: tl.constexpr, block_m: tl.constexpr):
    """Zeros of the type in which products with a W are summed up: those of integers are exact."""
    kind: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    return tl.zeros((block_n, block_m), kind)


@triton.jit
def add_product(acc, w, x, exact_k: tl.constexpr):
    return tl.dot(w, x, acc, max_num_imprecise_acc=exact_k, out_dtype=acc.dtype)


@triton.jit(do_not_specialize=["num_rows", "prefetch", "max_rows", "rank"])
def fp8_kernel(
    out,
    x,
    x_scale,
    weight,
    w_scale,
    bias,
    num_rows,
    n,
    k,
    scale_stride,
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
    scale_rows: tl.constexpr,
    exact_k: tl.constexpr,
    whole_n: tl.constexpr,
    whole_k: tl.constexpr,
    whole_m: tl.constexpr,
    stages: tl.constexpr,
    lanes: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of [block_n, block_m] of the transposed result, over one split of k.

    With `scale_rows` each tile of k has scales of its own: of each row of x, and of every
    `scale_rows` rows of W. Without it, whole rows have. `whole_m`: the memory of x's scales goes on
    to the end of the tile. `exact_k`: the sums of the tensor cores have some 14 bits; after so many
    products they are added to one of float32.
    """
    m_tile, part, n_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = part * split_size
    end = tl.minimum(first + split_size, k)
    weight += n_tile.to(tl.int64) * block_n * k
    if pdl and whole_n and prefetch > 0:
        fetch(weight + first, k, end - first, prefetch, block_n, lanes)
    row = m_tile * block_m + tl.arange(0, block_m)
    column = n_tile * block_n + tl.arange(0, block_n)
    if delta is not None:
        adapted = before_wait(
            delta, row, num_rows, part, n_tile * block_n, n, False, block_n, lanes, pdl
        )
    wait_for_previous(pdl)

    if delta is not None:
        added, _ = deltas_of(delta, adapted, n_tile * block_n, n, False, block_n)
    live = (row < num_rows)[:, None] & (column < n)[None, :]
    exchange = row  # a placeholder unless it is used
    if exchanges is not None:
        exchange = next_exchange(exchanges, row, num_rows)

    w_row = tl.arange(0, block_n)
    if not whole_n:  # rows past the end repeat the last one; they are not written
        w_row = tl.minimum(w_row, n - 1 - n_tile * block_n)
    columns = tl.arange(0, block_k if block_k > 32 else 32)[None, :]  # of fewer, the rest is masked
    w_place = w_row[:, None] * k + columns
    x_row = tl.minimum(row, num_rows - 1)  # as above
    x_place = x_row.to(tl.int64)[:, None] * k + columns
    if scale_rows > 0:
        w_scale += scale_row(n_tile, w_row, block_n, scale_rows) * tl.cdiv(k, block_k)
        by_w = tl.load(w_scale + first // block_k)
    acc = no_sums(weight, block_n, block_m)
    for start in tl.range(first, end, block_k, num_stages=stages):
        inside = (columns < block_k) & (start + columns < end)
        w = load(weight + start + w_place, inside, whole_k)
        rows = load(x + start + x_place, inside, whole_k)
        if scale_rows > 0:
            # The scales of W are loaded one tile ahead, those of x by the pipeline.
            ahead = tl.minimum(start + block_k, end - 1) // block_k
            by_x_at = x_scale + start // block_k * scale_stride + row
            by_x = load(by_x_at, row < num_rows, whole_m)
            acc += tl.dot(w, tl.trans(rows)) * (down(by_w) * by_x[None, :])
            by_w = tl.load(w_scale + ahead)
        else:
            acc = add_product(acc, w, tl.trans(rows), exact_k)
    if scale_rows == 0:
        acc = acc.to(tl.float32) * tl.load(w_scale + n_tile * block_n + w_row)[:, None]
        acc *= tl.load(x_scale + x_row)[None, :]

    if delta is not None:
        acc += added
    acc = tl.trans(acc)
    finish_split(
        out, None, acc, acc, bias, acc, targets, exchange, max_rows, rank,
        partials, semaphores, split_size, live, row, column, num_rows, n, k, False, False,
    )  # fmt: skip
