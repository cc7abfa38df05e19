"""The kernel that writes quantised weights as weights of the model's dtype."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.linear.weight_only.device import (
    e4m3_planes,
    half_of,
    int4_bias,
    int4_planes,
)


@triton.jit(do_not_specialize=["n"])
def dequantize_kernel(
    out,
    words,
    scales,
    n,
    k,
    scale_stride,
    bits: tl.constexpr,
    group: tl.constexpr,
    paired: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    packed: tl.constexpr,
    pdl: tl.constexpr,
):
    """`rows` rows of W, `columns` columns of k."""
    dtype: tl.constexpr = out.dtype.element_ty
    per_word: tl.constexpr = 16 // bits
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    word = tl.program_id(1) * (columns // per_word) + tl.arange(0, columns // per_word)[None, :]
    inside = (row < n) & (word < k // per_word)
    found = tl.load(words + row.to(tl.int64) * (k // per_word) + word, mask=inside, other=0)
    if pdl:  # W does not depend on the previous kernel, but that may still read `out`
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if bits == 8:
        column = word * 2
        scale, _ = _scale_at(scales, row, column // group, scale_stride, inside, dtype, 8, paired)
        low, high = e4m3_planes(found, scale, dtype, packed)
        column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
        place = out + row.to(tl.int64) * k + column
        tl.store(place, tl.interleave(low, high), mask=(row < n) & (column < k))
    else:
        column = word // 16 * 64 + word % 16
        chunk = word // 16 * 64
        scale, offset = _scale_at(
            scales, row, chunk // group, scale_stride, inside, dtype, 4, paired
        )
        next_scale, next_offset = _scale_at(
            scales, row, (chunk + 32) // group, scale_stride, inside, dtype, 4, paired
        )
        planes = int4_planes(found, scale, offset, next_scale, next_offset, dtype, packed)
        place = out + row.to(tl.int64) * k + column
        for i in tl.static_range(4):
            tl.store(place + 16 * i, planes[i], mask=inside)


@triton.jit
def _scale_at(
    scales,
    row,
    number,
    stride,
    inside,
    dtype: tl.constexpr,
    bits: tl.constexpr,
    paired: tl.constexpr,
):
    """Scale and offset of each row and group `number`, as int4_planes takes them."""
    if paired:
        word = tl.load(scales + number // 2 * stride + row, mask=inside, other=0)
        word = word >> (number % 2 * 16)
    else:
        word = tl.load(scales + number * stride + row, mask=inside, other=0)
    scale = half_of(word, 0, dtype)
    if bits == 8:
        return scale, scale
    elif paired:
        return scale, tl.full(scale.shape, -8.0 - int4_bias(dtype), tl.float32).to(dtype)
    else:
        return scale, half_of(word, 1, dtype)
