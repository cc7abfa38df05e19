"""Rounding of activations to FP8 (e4m3) or INT8 in Triton, alone or in the kernel that computes
them.

A row's scale s is the largest magnitude in it / 448, of a group of columns the largest in the
group, and 1 if all are 0; or it is given (static). The row becomes e4m3(clamp(x / s, ±448)), where
x is what the kernels of norm.py and activation.py would have written, rounded as they round it. A
row gets the same bits whatever the other rows and their number: its sums are one program's. In INT8
the largest is 127, and a row with a NaN has an infinite scale, since integers have no NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels import inlined
from minisgl.kernels.fp8_rows import Fp8Rows, room
from minisgl.kernels.inlined import apply_norm, rms_scale
from minisgl.kernels.launch_options import pdl_options, warps_for
from minisgl.kernels.tuning import tuning_of

_COLUMNS = 1024  # of a row that a program has at work at a time
_WIDE = 4096  # in one that has all of a long row
_SHORT = 8192  # columns of a row that one program takes, be there few rows or many


def quantize(
    x: Tensor,
    group: int | None = None,
    static: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    gated: bool = False,
    gelu: bool = False,
    pdl: bool = True,
) -> Fp8Rows:
    """x: [m, k], its rows contiguous; or gated_mul(x, gelu) if `gated`, of x [m, 2 · k].

    group: columns that share a scale, a power of two up to 1024; or static: [1] float32, the scale
    of all; or neither: each row has one. dtype: of the numbers, e4m3; or int8, where rows have
    scales. `pdl`: see launch_options.py.
    """
    assert x.stride(1) == 1
    num_rows, size = len(x), x.shape[1] // (2 if gated else 1)
    out = _allocate(num_rows, size, group, dtype, x)
    if num_rows == 0:
        return out
    # The scale of a whole row takes a program that has all of it, or a launch that finds it first.
    whole = group is None and static is None
    spread = whole and size > _SHORT and num_rows <= tuning_of(x.device).fp8_spread_rows
    columns = _COLUMNS
    if whole and not spread:
        columns = 2 * _COLUMNS if size <= _SHORT else _WIDE
    across = triton.cdiv(size, columns)
    pieces = across if whole and not spread else 1
    grid = (num_rows * across // pieces,)
    options = {"num_warps": warps_for(columns, 8), **pdl_options(x.device, pdl)}
    parts = None
    if spread:
        parts = torch.empty((num_rows, across), dtype=torch.float32, device=x.device)
        _largest_of_parts[grid](
            parts,
            x,
            x.stride(0),
            size=size,
            columns=columns,
            gated=gated,
            gelu=gelu,
            nan_counts=dtype == torch.int8,
            **options,
        )
    _quantize_rows[grid](
        out.data,
        out.scale,
        x,
        parts,
        static,
        x.stride(0),
        out.scale.stride(-1),
        size=size,
        group=group or 0,
        columns=columns,
        pieces=pieces,
        gated=gated,
        gelu=gelu,
        **options,
    )
    return out


def rms_norm_quantize(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int | None = None,
    static: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    pdl: bool = True,
) -> Fp8Rows:
    """quantize(rms_norm(residual, weight, eps), group, static, dtype=dtype), or with a delta the
    same of add_rms_norm; then `residual` receives the sum. Both contiguous."""
    assert residual.is_contiguous() and (delta is None or delta.is_contiguous())
    num_rows, size = residual.shape
    out = _allocate(num_rows, size, group, dtype, residual)
    if num_rows == 0:
        return out
    _norm_and_quantize_rows[(num_rows,)](
        out.data,
        out.scale,
        residual,
        delta,
        weight,
        static,
        eps,
        out.scale.stride(-1),
        size=size,
        group=group or 0,
        columns=_COLUMNS,
        pieces=triton.cdiv(size, _COLUMNS),
        num_warps=warps_for(_COLUMNS, 8),
        **pdl_options(residual.device, pdl),
    )
    return out


def _allocate(
    num_rows: int, size: int, group: int | None, dtype: torch.dtype, like: Tensor
) -> Fp8Rows:
    rows, device = room(num_rows), like.device
    data = torch.empty((rows, size), dtype=dtype, device=device)
    groups = 1 if group is None else triton.cdiv(size, group)
    scale = torch.empty((groups, rows), dtype=torch.float32, device=device)[:, :num_rows]
    return Fp8Rows(data[:num_rows], scale[0] if group is None else scale.T, like.dtype)


@triton.jit
def _load(x, column, size: tl.constexpr, gated: tl.constexpr, gelu: tl.constexpr):
    """Columns of a row of x, or of gated_mul(x) if `gated`."""
    found = tl.load(x + column, mask=column < size, other=0.0)
    if gated:
        up = tl.load(x + size + column, mask=column < size, other=0.0)
        found = inlined.gated_mul(found, up, gelu, found.dtype)
    return found


@triton.jit
def _largest_of_parts(
    parts,
    x,
    x_stride,
    size: tl.constexpr,
    columns: tl.constexpr,
    gated: tl.constexpr,
    gelu: tl.constexpr,
    nan_counts: tl.constexpr,
    pdl: tl.constexpr,
):
    """The largest magnitude in each `columns` of a row."""
    across: tl.constexpr = (size + columns - 1) // columns
    row = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * columns + tl.arange(0, columns)
    inlined.wait_for_previous(pdl)

    found = _load(x + row * x_stride, column, size, gated, gelu)
    tl.store(parts + tl.program_id(0), tl.max(_magnitude(found, nan_counts)))


@triton.jit
def _quantize_rows(
    out,
    scales,
    x,
    parts,
    static,
    x_stride,
    scale_stride,
    size: tl.constexpr,
    group: tl.constexpr,
    columns: tl.constexpr,
    pieces: tl.constexpr,
    gated: tl.constexpr,
    gelu: tl.constexpr,
    pdl: tl.constexpr,
):
    """`pieces` times `columns` of a row: all of it, or a part if the scale is not that of a row, or
    `parts` has the largest magnitudes of each. x is the input of gated_mul if `gated`."""
    across: tl.constexpr = (size + columns * pieces - 1) // (columns * pieces)
    row = (tl.program_id(0) // across).to(tl.int64)
    first = tl.program_id(0) % across * columns * pieces
    lane = first + tl.arange(0, columns)
    x += row * x_stride
    inlined.wait_for_previous(pdl)

    nan_counts: tl.constexpr = out.dtype.element_ty == tl.int8
    loaded, largest = (), 0.0
    for i in tl.static_range(pieces):
        loaded += (_load(x, lane + i * columns, size, gated, gelu),)
    if parts is not None:
        part = tl.arange(0, triton.next_power_of_2(across))
        found = tl.load(parts + row * across + part, mask=part < across, other=0.0)
        largest = tl.max(found)
    elif static is None and group == 0:
        for i in tl.static_range(pieces):
            largest = tl.maximum(largest, tl.max(_magnitude(loaded[i], nan_counts)))
    for i in tl.static_range(pieces):
        start = first + i * columns
        _write(
            out, scales, loaded[i], largest, static, row, start, scale_stride,
            size, group, columns,
        )  # fmt: skip


@triton.jit
def _norm_and_quantize_rows(
    out,
    scales,
    residual,
    delta,
    weight,
    static,
    eps,
    scale_stride,
    size: tl.constexpr,
    group: tl.constexpr,
    columns: tl.constexpr,
    pieces: tl.constexpr,
    pdl: tl.constexpr,
):
    """A row a program, held in registers as `pieces` times `columns`."""
    nan_counts: tl.constexpr = out.dtype.element_ty == tl.int8
    factors, loaded, normed = (), (), ()
    for i in tl.static_range(pieces):
        column = i * columns + tl.arange(0, columns)
        factors += (tl.load(weight + column, mask=column < size, other=0.0),)
    inlined.wait_for_previous(pdl)

    row = tl.program_id(0).to(tl.int64)
    residual += row * size
    for i in tl.static_range(pieces):
        column = i * columns + tl.arange(0, columns)
        x = tl.load(residual + column, mask=column < size, other=0.0)
        if delta is not None:
            added = tl.load(delta + row * size + column, mask=column < size, other=0.0)
            x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        loaded += (x,)
    squares = tl.zeros((columns,), tl.float32)
    for i in tl.static_range(pieces):
        squares += _squared(loaded[i])
    by = rms_scale(tl.sum(squares), size, eps)
    largest = tl.zeros((columns,), tl.float32)
    for i in tl.static_range(pieces):
        column = i * columns + tl.arange(0, columns)
        if delta is not None:
            tl.store(residual + column, loaded[i], mask=column < size)
        normed += (apply_norm(loaded[i], by, factors[i]),)
        largest = tl.maximum(largest, _magnitude(normed[i], nan_counts))
    if static is None and group == 0:
        largest = tl.max(largest)
    for i in tl.static_range(pieces):
        _write(
            out, scales, normed[i], largest, static, row, i * columns, scale_stride,
            size, group, columns,
        )  # fmt: skip


@triton.jit
def _magnitude(x, nan_counts: tl.constexpr):
    """|x|, and infinity for NaN if that counts."""
    found = tl.abs(x.to(tl.float32))
    return tl.where(found == found, found, float("inf")) if nan_counts else found


@triton.jit
def _squared(x):
    wide = x.to(tl.float32)
    return wide * wide


@triton.jit
def _write(
    out,
    scales,
    x,
    largest,
    static,
    row,
    first,
    scale_stride,
    size: tl.constexpr,
    group: tl.constexpr,
    columns: tl.constexpr,
):
    """Writes x, the columns from `first` on of a row, and their scales. `largest`: of the row, if
    that is what its scale follows from."""
    column = first + tl.arange(0, columns)
    wide = x.to(tl.float32)
    if group > 0:
        wide = tl.reshape(wide, (columns // group, group))
        scale = scale_of(tl.max(tl.abs(wide), 1), 448.0)
        place = first // group + tl.arange(0, columns // group)
        exists = place * group < size
        tl.store(scales + row + place.to(tl.int64) * scale_stride, scale, mask=exists)
        quotient = tl.reshape(_divide(wide, scale[:, None]), (columns,))
    elif static is None:
        scale = scale_of(largest, 127.0 if out.dtype.element_ty == tl.int8 else 448.0)
        if first == 0:
            tl.store(scales + row, scale)
        quotient = _divide(wide, scale)
    else:
        scale = tl.load(static)
        if first == 0:
            tl.store(scales + row, scale)
        quotient = _divide_static(wide, scale)
    if out.dtype.element_ty == tl.int8:
        quotient = (quotient + 12582912.0) - 12582912.0  # 1.5 · 2^23: leaves integers
    tl.store(out + row * size + column, quotient.to(out.dtype.element_ty), mask=column < size)


@triton.jit
def scale_of(largest, stored):
    """The scale by which the largest of some numbers becomes `stored`."""
    return tl.where(largest == 0, 1.0, tl.div_rn(largest, stored))


@triton.jit
def round_to_fp8(x, scale, static: tl.constexpr):
    """x (float32) as e4m3 numbers. The scale follows from the largest of x, or is `static`."""
    quotient = _divide_static(x, scale) if static else _divide(x, scale)
    return quotient.to(tl.float8e4nv)


@triton.jit
def _divide_static(x, scale):
    """x / scale, and ±448 beyond these."""
    beyond = tl.abs(x) >= 512 * scale  # there may be no finite quotient to correct
    quotient = tl.where(beyond, x * float("inf"), _divide(x, scale))
    return tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _divide(x, scale):
    """x / scale as IEEE 754 rounds it, where that is below 512 and not so small that e4m3 has 0.

    A product with the reciprocal, corrected twice by its exact remainder (Markstein, Computation of
    elementary functions on the IBM RISC System/6000 processor, 1990): the same for all x, where
    tl.div_rn branches, and in steps that overlap.
    """
    # By a power of two, so that no remainder is subnormal; and negated, for the sign of zeros.
    by = tl.where(scale < 2.0**-40, 2.0**80, tl.where(scale > 2.0**40, 2.0**-80, 1.0))
    x *= by * -1.0
    scale *= by
    inverse = tl.div_rn(-1.0, scale)
    scale = tl.where(inverse == 0, 1.0, scale)  # finite / inf is 0, not NaN
    quotient = x * inverse
    quotient = tl.fma(tl.fma(quotient, scale, x), inverse, quotient)
    return tl.fma(tl.fma(quotient, scale, x), inverse, quotient)
