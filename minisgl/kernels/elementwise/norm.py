"""RMS norm in Triton, with the rounding of `rms_norm` and `add_rms_norm` in reference.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.inlined import apply_norm, rms_scale, wait_for_previous
from minisgl.kernels.launch_options import pdl_options, tile_of_rows
from minisgl.kernels.tuning import tuning_of


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = True) -> Tensor:
    """See dispatch.py; x contiguous. `pdl`: see launch_options.py."""
    out = torch.empty_like(x)
    _launch(out, x, None, weight, eps, pdl=pdl)
    return out


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = True
) -> tuple[Tensor, Tensor]:
    """See dispatch.py; both contiguous. Returns a new tensor, and `residual`, which holds the
    sum."""
    out = torch.empty_like(residual)
    _launch(out, residual, delta, weight, eps, pdl=pdl)
    return out, residual


def _launch(
    out: Tensor, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, pdl: bool
) -> None:
    assert residual.is_contiguous() and (delta is None or delta.is_contiguous())
    num_rows, size = residual.shape
    tile = tile_of_rows(num_rows, size, tuning_of(residual.device))
    _norm_rows[(triton.cdiv(num_rows, tile["rows"]),)](
        out,
        residual,
        delta,
        weight,
        num_rows,
        eps,
        size=size,
        **tile,
        **pdl_options(residual.device, pdl),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rows(
    out,
    residual,
    delta,
    weight,
    num_rows,
    eps,
    size: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    pdl: tl.constexpr,
):
    """`rows` whole rows a program, held in registers from load to store."""
    column = tl.arange(0, block)
    factor = tl.load(weight + column, mask=column < size, other=0.0)
    wait_for_previous(pdl)  # for delta and residual; the weight is old, and far away

    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * size + column[None, :]
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    x = tl.load(residual + place, mask=inside, other=0.0)
    if delta is not None:
        added = tl.load(delta + place, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(residual + place, x, mask=inside)

    wide = x.to(tl.float32)
    scale = rms_scale(tl.sum(wide * wide, axis=1), size, eps)
    normed = apply_norm(x, scale[:, None], factor[None, :])
    tl.store(out + place, normed, mask=inside)
