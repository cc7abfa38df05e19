"""The stream kernel of linear maps whose weights are quantised and whose x is not."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import apply_norm, finished_sums, wait_for_previous
from minisgl.kernels.linear.delta_parts import before_wait, deltas_of
from minisgl.kernels.linear.gemm_parts import (
    fetch,
    finish_split,
    load_residual,
    load_squares,
    next_exchange,
)
from minisgl.kernels.linear.weight_only.unpacking import joined_planes, planes_of
from minisgl.kernels.linear.weight_only.unpacking_e2m1 import left_out


@triton.jit
def _rows_of_x(x, norm_weight, scale, columns, row_place, real):
    """These columns of the rows, or of their norm: [block_m, span]."""
    rows = tl.load(x + row_place + columns, mask=real, other=0.0)
    if norm_weight is not None:
        there = tl.broadcast_to(columns, rows.shape)
        rows = apply_norm(rows, scale, tl.load(norm_weight + there))
    return rows


@triton.jit
def _added(
    acc,
    rows,
    words,
    scales,
    at,
    stride,
    span: tl.constexpr,
    group: tl.constexpr,
    bits: tl.constexpr,
    packed: tl.constexpr,
    centred: tl.constexpr,
    e2m1: tl.constexpr,
):
    """acc + W xᵀ of a span of k that starts at column `at`. words: addresses [block_n, any]; the
    others as for `planes_of`."""
    planes = planes_of(
        tl.load(words), scales, at, stride, span, group, bits, rows.dtype, packed, centred, e2m1
    )
    return tl.dot(joined_planes(planes, bits), tl.trans(rows), acc)


@triton.jit(do_not_specialize=["num_rows", "prefetch", "max_rows", "rank"])
def weight_only_kernel(
    out,
    squares,
    x,
    words,
    scales,
    factors,
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
    scale_stride,
    bits: tl.constexpr,
    group: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    span: tl.constexpr,
    parts: tl.constexpr,
    gated: tl.constexpr,
    gelu: tl.constexpr,
    whole_n: tl.constexpr,
    stages: tl.constexpr,
    lanes: tl.constexpr,
    packed: tl.constexpr,
    centred: tl.constexpr,
    on_gpu: tl.constexpr,
    pdl: tl.constexpr,
):
    """A block of [block_n, block_m] of the result, over one split of k, which is a multiple of
    block_k. A tile is taken in spans of k."""
    m_tile, part, n_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    per_word: tl.constexpr = 16 // bits
    first = part * split_size
    end = tl.minimum(first + split_size, k)
    row_words = tl.multiple_of(k // per_word, 16)
    words += n_tile.to(tl.int64) * block_n * row_words
    up_words = words + n.to(tl.int64) * row_words
    if pdl and whole_n and prefetch > 0:
        length = (end - first) // per_word
        fetch(words + first // per_word, row_words, length, prefetch, block_n, lanes)
        if gated:
            fetch(up_words + first // per_word, row_words, length, prefetch, block_n, lanes)
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
    residual, exchange, norm_scale = squares, row, row  # placeholders unless they are used
    if squares is not None:
        residual = load_residual(out, row, column, num_rows, n)
    if exchanges is not None:
        exchange = next_exchange(exchanges, row, num_rows)
    if x_squares is not None:
        sums = load_squares(x_squares, row, num_rows, num_parts, parts)
        norm_scale = tl.rsqrt(tl.sum(sums, 1) / k + eps)[:, None]

    w_row = tl.arange(0, block_n)
    if not whole_n:  # rows past the end repeat the last one; they are not written
        w_row = tl.minimum(w_row, n - 1 - n_tile * block_n)
    w_place = w_row[:, None] * row_words + tl.arange(0, span // per_word)[None, :]
    scales += n_tile * block_n + w_row
    e2m1: tl.constexpr = factors is not None
    factor, up_factor = w_row, w_row  # placeholders, too
    if e2m1:
        factor_at = factors + n_tile * block_n + w_row
        factor = tl.load(factor_at)[:, None] * left_out(16, packed)
        if gated:
            up_factor = tl.load(factor_at + n)[:, None] * left_out(16, packed)
    row_place = row[:, None] * x_stride
    real = (row < num_rows)[:, None]
    acc = tl.zeros((block_n, block_m), tl.float32)
    up = acc
    for start in tl.range(first, end, block_k, num_stages=stages):
        for i in tl.static_range(block_k // span):
            at = start + i * span
            at_word = tl.multiple_of(at // per_word, 16)  # so that 16 bytes are copied at once
            columns = at + tl.arange(0, span)[None, :]
            rows = _rows_of_x(x, norm_weight, norm_scale, columns, row_place, real)
            acc = _added(
                acc, rows, words + at_word + w_place, scales, at, scale_stride,
                span, group, bits, packed, centred, e2m1,
            )  # fmt: skip
            if gated:
                up = _added(
                    up, rows, up_words + at_word + w_place, scales + n, at, scale_stride,
                    span, group, bits, packed, centred, e2m1,
                )  # fmt: skip
        acc = finished_sums(acc, on_gpu)
        if gated:
            up = finished_sums(up, on_gpu)

    if centred:
        acc *= 65536.0
        up *= 65536.0
    if e2m1:
        acc *= factor
        if gated:
            up *= up_factor
    if delta is not None:
        acc += added
        if gated:
            up += added_up
    acc = tl.trans(acc)
    up = tl.trans(up) if gated else acc
    finish_split(
        out, squares, acc, up, bias, residual, targets, exchange, max_rows, rank,
        partials, semaphores, split_size, live, row, column, num_rows, n, k, gated, gelu,
    )  # fmt: skip
