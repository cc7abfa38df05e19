"""The gated RMS norm in Triton, with the rounding of `gated_rms_norm` in reference.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.inlined import apply_norm, rms_scale, wait_for_previous
from minisgl.kernels.launch_options import pdl_options, tile_of_rows
from minisgl.kernels.tuning import tuning_of


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pdl: bool = True
) -> Tensor:
    """See delta_net.py. `pdl`: see launch_options.py."""
    assert x.is_contiguous() and gate.shape == x.shape and gate[:1].is_contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    num_norms = x.numel() // size
    if num_norms == 0:
        return out
    tile = tile_of_rows(num_norms // 8, size, tuning_of(x.device))
    _gated_norms[(triton.cdiv(num_norms, tile["rows"]),)](
        out,
        x,
        gate,
        weight,
        num_norms,
        gate.stride(0),
        eps,
        heads=num_norms // x.shape[0],
        size=size,
        **tile,
        **pdl_options(x.device, pdl),
    )
    return out


@triton.jit(do_not_specialize=["num_norms"])
def _gated_norms(
    out,
    x,
    gate,
    weight,
    num_norms,
    gate_stride,
    eps,
    heads: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    pdl: tl.constexpr,
):
    """`rows` heads a program."""
    column = tl.arange(0, block)
    factor = tl.load(weight + column, mask=column < size, other=0.0)
    wait_for_previous(pdl)  # for x and the gate

    norm = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    inside = (norm < num_norms)[:, None] & (column < size)[None, :]
    place = norm[:, None] * size + column[None, :]
    gate_place = (norm // heads * gate_stride + norm % heads * size)[:, None] + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0)
    gates = tl.load(gate + gate_place, mask=inside, other=0.0).to(tl.float32)
    wide = values.to(tl.float32)
    scale = rms_scale(tl.sum(wide * wide, axis=1), size, eps)
    normed = apply_norm(values, scale[:, None], factor[None, :]).to(tl.float32)
    tl.store(out + place, normed * (gates / (1.0 + tl.exp(-gates))), mask=inside)
