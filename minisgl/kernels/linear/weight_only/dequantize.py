"""The kernel that writes quantised weights as weights of the model's dtype."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.linear.weight_only.unpacking import e4m3_planes, half_of, int4_planes
from minisgl.kernels.linear.weight_only.unpacking_e2m1 import e2m1_planes


@triton.jit(do_not_specialize=["n"])
def dequantize_kernel(
    out,
    words,
    scales,
    factors,
    n,
    k,
    scale_stride,
    bits: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    packed: tl.constexpr,
    centred: tl.constexpr,
    pdl: tl.constexpr,
):
    """`rows` rows of W, `columns` columns of k."""
    dtype: tl.constexpr = out.dtype.element_ty
    per_word: tl.constexpr = 16 // bits
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    word = tl.program_id(1) * (columns // per_word) + tl.arange(0, columns // per_word)[None, :]
    inside = (row < n) & (word < k // per_word)
    found = tl.load(words + row.to(tl.int64) * (k // per_word) + word, mask=inside, other=0)
    wait_for_previous(pdl)  # whose result W does not depend on, but which may still read `out`
    if bits == 8:
        scale = half_of(_scales_at(scales, row, word * 2 // group, scale_stride, inside), 0, dtype)
        low, high = e4m3_planes(found, scale, dtype, packed)
        column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
        place = out + row.to(tl.int64) * k + column
        tl.store(place, tl.interleave(low, high), mask=(row < n) & (column < k))
    else:
        chunk = word // 16 * 64
        scale = _scales_at(scales, row, chunk // group, scale_stride, inside)
        if factors is not None:
            factor = tl.load(factors + row, mask=row < n, other=0.0)
            # Not `packed`, which takes for granted that two words of a row share a register: so it
            # is where tensor cores multiply them, but not in a layout that suits the loads here.
            planes = e2m1_planes(found, scale, 16, dtype, False)
        else:
            later = _scales_at(scales, row, (chunk + 32) // group, scale_stride, inside)
            planes = int4_planes(
                found,
                half_of(scale, 0, dtype),
                half_of(scale, 1, dtype),
                half_of(later, 0, dtype),
                half_of(later, 1, dtype),
                dtype,
                packed,
                centred,
            )
        place = out + row.to(tl.int64) * k + chunk + word % 16
        for i in tl.static_range(4):
            plane = planes[i]
            if centred:
                plane = (plane.to(tl.float32) * 65536.0).to(dtype)
            if factors is not None:
                plane = (plane.to(tl.float32) * factor).to(dtype)
            tl.store(place + 16 * i, plane, mask=inside)


@triton.jit
def _scales_at(scales, row, group, stride, inside):
    return tl.load(scales + group * stride + row, mask=inside, other=0)
