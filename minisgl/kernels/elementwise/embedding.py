"""The embedding lookup as one Triton kernel; the reference is `embed` of reference.py.

It is the first kernel of a step, right after the one that writes the token ids. Overlap hides its
own start, and lets the first norm load its weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options, warps_for
from minisgl.kernels.tuning import tuning_of


def embed(token_ids: Tensor, weight: Tensor, first: int = 0, *, pdl: bool = True) -> Tensor:
    """See dispatch.py; both contiguous. `pdl`: see launch_options.py; the ids may come from the
    launch before."""
    assert token_ids.is_contiguous() and weight.is_contiguous()
    num_rows, size = token_ids.shape[0], weight.shape[1]
    out = weight.new_empty((num_rows, size))
    columns = min(triton.next_power_of_2(size), 1024)
    rows, per_thread = (4, 16) if num_rows >= tuning_of(weight.device).many_rows else (1, 8)
    # One axis of the grid, since the others end at 65,535; a row's blocks of columns are
    # neighbours.
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


# Slices of a step's tables have any alignment: do not compile a variant for each.
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
    # For the ids, which the previous kernel may write, and the last reader of out's memory.
    wait_for_previous(pdl)

    source = tl.load(token_ids + row, mask=row < num_rows, other=0) - first
    held = inside & ((source >= 0) & (source < num_ids))[:, None]
    value = tl.load(weight + source[:, None] * size + column[None, :], mask=held, other=0.0)
    tl.store(out + row[:, None] * size + column[None, :], value, mask=inside)
