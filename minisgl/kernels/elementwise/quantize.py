"""Rounding of activations to FP8 (e4m3) in Triton, alone or in the kernel that computes them.

A row's scale s is the largest magnitude in it / 448, of a group of columns the largest in the
group, and 1 if all are 0; or it is given (static). The row becomes e4m3(clamp(x / s, ±448)), where
x is what the kernels of norm.py and activation.py would have written, rounded as they round it. A
row gets the same bits whatever the other rows and their number: each is one program's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels import device
from minisgl.kernels.device import apply_norm, rms_scale
from minisgl.kernels.launch import pdl_options, warps_for
from minisgl.kernels.rows import Fp8Rows, room

# Columns that a program has at work at a time: of a whole row, or as a part of one.
_WHOLE, _PART = 4096, 1024


def quantize(
    x: Tensor, group: int | None = None, static: Tensor | None = None, *, pdl: bool = True
) -> Fp8Rows:
    """x: [m, k], its rows contiguous.

    group: columns that share a scale, a power of two up to 1024; or static: [1] float32, the scale
    of all; or neither: each row has one. `pdl`: overlap launches where the device can, by the rule
    of launch.py.
    """
    return _quantize(x, x.shape[1], group, static, gated=False, pdl=pdl)


def silu_mul_quantize(
    gate_up: Tensor, group: int | None = None, static: Tensor | None = None, *, pdl: bool = True
) -> Fp8Rows:
    """quantize(silu_mul(gate_up), group, static). gate_up: [m, 2 · k], its rows contiguous."""
    return _quantize(gate_up, gate_up.shape[1] // 2, group, static, gated=True, pdl=pdl)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    group: int | None = None,
    static: Tensor | None = None,
    *,
    pdl: bool = True,
) -> Fp8Rows:
    """quantize(rms_norm(x, weight, eps), group, static). x contiguous."""
    return _norm(x, None, weight, eps, group, static, pdl=pdl)


def add_rms_norm_quantize(
    delta: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: int | None = None,
    static: Tensor | None = None,
    *,
    pdl: bool = True,
) -> Fp8Rows:
    """The same of add_rms_norm(delta, residual, weight, eps). Both contiguous; `residual` receives
    the sum."""
    return _norm(residual, delta, weight, eps, group, static, pdl=pdl)


def _quantize(
    x: Tensor, size: int, group: int | None, static: Tensor | None, *, gated: bool, pdl: bool
) -> Fp8Rows:
    assert x.stride(1) == 1
    num_rows = len(x)
    out = _allocate(num_rows, size, group, x)
    if num_rows == 0:
        return out
    # Only the scale of a whole row takes a program that has all of it.
    whole = group is None and static is None
    columns = _WHOLE if whole else _PART
    pieces = triton.cdiv(size, columns)
    _quantize_rows[(num_rows * (1 if whole else pieces),)](
        out.data,
        out.scale,
        x,
        static,
        x.stride(0),
        out.scale.stride(-1),
        size=size,
        group=group or 0,
        columns=columns,
        pieces=pieces if whole else 1,
        gated=gated,
        num_warps=warps_for(columns, 8),
        **pdl_options(x.device, pdl),
    )
    return out


def _norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int | None,
    static: Tensor | None,
    *,
    pdl: bool,
) -> Fp8Rows:
    assert residual.is_contiguous() and (delta is None or delta.is_contiguous())
    num_rows, size = residual.shape
    out = _allocate(num_rows, size, group, residual)
    if num_rows == 0:
        return out
    block = max(triton.next_power_of_2(size), group or 1)
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
        block=block,
        num_warps=warps_for(block, 8),
        **pdl_options(residual.device, pdl),
    )
    return out


def _allocate(num_rows: int, size: int, group: int | None, like: Tensor) -> Fp8Rows:
    rows, device = room(num_rows), like.device
    data = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=device)
    groups = 1 if group is None else triton.cdiv(size, group)
    scale = torch.empty((groups, rows), dtype=torch.float32, device=device)[:, :num_rows]
    return Fp8Rows(data[:num_rows], scale[0] if group is None else scale.T, like.dtype)


@triton.jit
def _quantize_rows(
    out,
    scales,
    x,
    static,
    x_stride,
    scale_stride,
    size: tl.constexpr,
    group: tl.constexpr,
    columns: tl.constexpr,
    pieces: tl.constexpr,
    gated: tl.constexpr,
    pdl: tl.constexpr,
):
    """`pieces` times `columns` of a row: all of it, or a part if the scale is not that of a row.
    x is the input of silu_mul if `gated`."""
    across: tl.constexpr = (size + columns * pieces - 1) // (columns * pieces)
    row = (tl.program_id(0) // across).to(tl.int64)
    first = tl.program_id(0) % across * columns * pieces
    lane = first + tl.arange(0, columns)
    x += row * x_stride
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    loaded, largest = (), 0.0
    for i in tl.static_range(pieces):
        column = lane + i * columns
        found = tl.load(x + column, mask=column < size, other=0.0)
        if gated:
            up = tl.load(x + size + column, mask=column < size, other=0.0)
            found = device.silu_mul(found, up, found.dtype)
        loaded += (found,)
    if static is None and group == 0:
        for i in tl.static_range(pieces):
            largest = tl.maximum(largest, tl.max(tl.abs(loaded[i].to(tl.float32))))
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
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """A row a program, as norm.py has it."""
    column = tl.arange(0, block)
    inside = column < size
    factor = tl.load(weight + column, mask=inside, other=0.0)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    row = tl.program_id(0).to(tl.int64)
    place = residual + row * size + column
    x = tl.load(place, mask=inside, other=0.0)
    if delta is not None:
        added = tl.load(delta + row * size + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(place, x, mask=inside)
    wide = x.to(tl.float32)
    normed = apply_norm(x, rms_scale(tl.sum(wide * wide), size, eps), factor)
    largest = 0.0
    if static is None and group == 0:
        largest = tl.max(tl.abs(normed.to(tl.float32)))
    _write(
        out, scales, normed, largest, static, row, 0, scale_stride, size, group, block
    )  # fmt: skip


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
        scale = scale_of(tl.max(tl.abs(wide), 1))
        place = first // group + tl.arange(0, columns // group)
        exists = place * group < size
        tl.store(scales + row + place.to(tl.int64) * scale_stride, scale, mask=exists)
        rounded = tl.reshape(round_to_fp8(wide, scale[:, None]), (columns,))
    else:
        scale = scale_of(largest) if static is None else tl.load(static)
        if first == 0:
            tl.store(scales + row, scale)
        rounded = round_to_fp8(wide, scale)
    tl.store(out + row * size + column, rounded, mask=column < size)


@triton.jit
def scale_of(largest):
    return tl.where(largest == 0, 1.0, tl.div_rn(largest, 448.0))


@triton.jit
def round_to_fp8(x, scale):
    quotient = tl.div_rn(x, scale)
    inside = tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return inside.to(tl.float8e4nv)
