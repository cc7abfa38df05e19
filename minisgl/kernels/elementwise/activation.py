"""The activation of the gated MLP as one Triton kernel, with the rounding of `gated_mul` in
reference.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels import inlined
from minisgl.kernels.launch_options import pdl_options, warps_for
from minisgl.kernels.tuning import tuning_of

# A divisor of the usual intermediate sizes, so that no lane is idle.
_COLUMNS = 1024


def gated_mul(gate_up: Tensor, gelu: bool = False, *, pdl: bool = True) -> Tensor:
    """See dispatch.py; gate_up contiguous. `pdl`: see launch_options.py."""
    assert gate_up.is_contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, size))
    rows, per_thread = (4, 16) if num_rows >= tuning_of(gate_up.device).many_rows else (1, 8)
    # One axis of the grid, since the others end at 65,535; a row's blocks of columns are
    # neighbours.
    grid = (triton.cdiv(num_rows, rows) * triton.cdiv(size, _COLUMNS),)
    _gated_mul_tile[grid](
        out,
        gate_up,
        num_rows,
        size=size,
        rows=rows,
        columns=_COLUMNS,
        gelu=gelu,
        num_warps=warps_for(rows * _COLUMNS, per_thread),
        **pdl_options(gate_up.device, pdl),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_mul_tile(
    out,
    gate_up,
    num_rows,
    size: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    gelu: tl.constexpr,
    pdl: tl.constexpr,
):
    """A tile of [rows, columns] of the result a program."""
    program = tl.program_id(0)
    across = tl.cdiv(size, columns)
    row = (program // across).to(tl.int64) * rows + tl.arange(0, rows)
    column = (program % across) * columns + tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    gate_place = row[:, None] * (2 * size) + column[None, :]
    inlined.wait_for_previous(pdl)  # for gate_up, without which there is nothing to do

    gate = tl.load(gate_up + gate_place, mask=inside, other=0.0)
    up = tl.load(gate_up + gate_place + size, mask=inside, other=0.0)
    product = inlined.gated_mul(gate, up, gelu, gate.dtype)
    tl.store(out + row[:, None] * size + column[None, :], product, mask=inside)
