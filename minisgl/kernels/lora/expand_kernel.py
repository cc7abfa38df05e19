"""y += v Bᵀ where a library's GEMM has computed y: one launch a product, for all its parts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.adapters import Delta, part_ends
from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.linear.delta_parts import sum_of_splits
from minisgl.kernels.lora.reference import TILE_ROWS

_BLOCK_N = 128


def expand(y: Tensor, delta: Delta, *, pdl: bool = True) -> None:
    """Adds v Bᵀ to y [num_rows, n], whose rows are contiguous, in float32, rounded once.

    A program has up to 16 rows with one adapter and 128 columns of a part: B is read once for such
    a tile, and y of adapted rows is read and written. Rows without an adapter are not touched.
    `pdl`: see launch_options.py; adapters and rows must be older than two launches.
    """
    v, weights, rows = delta
    ends = part_ends(weights)
    assert y.stride(1) == 1 and y.shape == (v.shape[1], ends[-1])
    if len(rows.tiles) == 0:
        return
    widest = max(end - start for start, end in zip(weights.starts, ends, strict=True))
    _expand[(len(rows.tiles), triton.cdiv(widest, _BLOCK_N), len(ends))](
        y,
        v,
        weights.b,
        weights.ranks,
        rows.order,
        rows.tiles,
        weights.starts,
        ends,
        y.stride(0),
        v.stride(1),
        v.stride(0),
        weights.b.stride(0),
        weights.max_rank,
        splits=len(v),
        tile_rows=TILE_ROWS,
        block_n=_BLOCK_N,
        block_r=16 if weights.max_rank % 64 else 64,
        num_warps=4,
        **pdl_options(y.device, pdl),
    )


@triton.jit
def _expand(
    y,
    v,
    b,
    ranks,
    order,
    tiles,
    starts,
    ends,
    y_stride,
    v_stride,
    split_stride,
    b_stride,
    max_rank,
    splits: tl.constexpr,
    tile_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_r: tl.constexpr,
    pdl: tl.constexpr,
):
    """A tile of rows, and block_n columns of a part."""
    tile, part = tl.program_id(0), tl.program_id(2)
    adapter = tl.load(tiles + tile * 3)
    slot = tl.maximum(adapter - 1, 0).to(tl.int64)
    rank = tl.where(adapter > 0, tl.load(ranks + slot), 0)
    start, end = starts[0], ends[0]
    for i in tl.static_range(1, len(starts)):
        start = tl.where(part == i, starts[i], start)
        end = tl.where(part == i, ends[i], end)
    first_column = start + tl.program_id(1) * block_n
    column = first_column + tl.arange(0, block_n)
    index = tl.load(tiles + tile * 3 + 1) + tl.arange(0, tile_rows)
    real = index < tl.load(tiles + tile * 3 + 2)
    row = tl.load(order + index, mask=real, other=0).to(tl.int64)
    lane = tl.arange(0, block_r)
    b_at = b + slot * b_stride + column[:, None] * tl.multiple_of(rank, 16) + lane[None, :]
    v_at = v + row[:, None] * v_stride + part * max_rank + lane[None, :]
    wait_for_previous(pdl)

    if (rank > 0) & (first_column < end):
        y_at = y + row[:, None] * y_stride + column[None, :]
        inside = real[:, None] & (column < end)[None, :]
        before = tl.load(y_at, mask=inside, other=0.0)
        added = tl.zeros((block_n, tile_rows), tl.float32)
        for first in tl.range(0, rank, block_r, num_stages=1):
            some = (first + lane < rank)[None, :]
            w = tl.load(b_at + first, mask=some & (column < end)[:, None], other=0.0)
            rows = sum_of_splits(v_at + first, split_stride, splits, some & real[:, None])
            rows = rows.to(w.dtype)
            added = tl.dot(w, tl.trans(rows), added, input_precision="ieee")
        result = before.to(tl.float32) + tl.trans(added)
        tl.store(y_at, result.to(y.dtype.element_ty), mask=inside)
