"""The embedding as one Triton kernel. The reference is `embed` of reference.py; nothing is rounded.

It is the first kernel of a step, behind the one that writes the token ids: overlapping with that
one, it has only its own start to gain, and lets the first norm fetch its weights meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.launch import pdl_options, warps_for
from minisgl.kernels.tuning import tuning_of


def embed(token_ids: Tensor, weight: Tensor, first: int = 0, *, pdl: bool = True) -> Tensor:
    """As in dispatch; both contiguous. `pdl`: overlap launches where the device can, by the rule of
    launch.py; the ids may come from the launch before."""
    assert token_ids.is_contiguous() and weight.is_contiguous()
    num_rows, size = token_ids.shape[0], weight.shape[1]
    out = weight.new_empty((num_rows, size))
    columns = min(triton.next_power_of_2(size), 1024)
    rows, per_thread = (4, 16) if num_rows >= tuning_of(weight.device).many_rows else (1, 8)
    # One axis, since the others end at 65535; a row's columns are neighbours on it.
    grid = (triton.cdiv(num_rows, rows) * triton.cdiv(size, columns),)
    _embed_tile[grid](
        out,
        token_ids,
        weight,
        num_rows,
        first,
        weight.shape[0],
        size=size,
        rows=rows,
        columns=columns,
        num_warps=warps_for(rows * columns, per_thread),
        **pdl_options(weight.device, pdl),
    )
    return out


# Slices of the step's tables start anywhere: no variant of the kernel for each alignment.
@triton.jit(do_not_specialize=["num_rows", "first"], do_not_specialize_on_alignment=["token_ids"])
def _embed_tile(
    out,
    token_ids,
    weight,
    num_rows,
    first,
    num_ids,
    size: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    pdl: tl.constexpr,
):
    """A tile of [rows, columns] of the result a program."""
    program = tl.program_id(0)
    across = tl.cdiv(size, columns)
    row = (program // across).to(tl.int64) * rows + tl.arange(0, rows)
    column = (program % across) * columns + tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    if pdl:  # for the ids, which the kernel before may write, and the last reader of out's memory
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    place = tl.load(token_ids + row, mask=row < num_rows, other=0) - first
    there = inside & ((place >= 0) & (place < num_ids))[:, None]
    value = tl.load(weight + place[:, None] * size + column[None, :], mask=there, other=0.0)
    tl.store(out + row[:, None] * size + column[None, :], value, mask=inside)
