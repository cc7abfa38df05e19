"""The rows of a step sorted by adapter: one launch a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.adapters import AdaptedRows, tiles_of
from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.lora.reference import TILE_ROWS


def sort_rows(adapters: Tensor, num_slots: int, *, pdl: bool = True) -> AdaptedRows:
    """adapters: [num_rows] int32 contiguous, from 0 to num_slots.

    One program counts, and then places, some rows at a time: 2 microseconds of a decode step (e),
    and some tens of one with thousands of rows, which takes a thousand times as long.
    """
    num_rows, num_tiles = len(adapters), tiles_of(len(adapters), num_slots, TILE_ROWS)
    rows = AdaptedRows(
        adapters=adapters,
        order=torch.empty_like(adapters),
        tiles=adapters.new_empty((num_tiles, 3)),
        active=adapters.new_empty(1 + num_slots),
    )
    if num_rows == 0:
        rows.active.zero_()
        return rows
    _sort_rows[(1,)](
        *rows,
        num_rows,
        num_slots,
        num_tiles,
        block=min(triton.next_power_of_2(num_rows), 256),
        slots=triton.next_power_of_2(1 + num_slots),
        tile_rows=TILE_ROWS,
        num_warps=4,
        **pdl_options(adapters.device, pdl),
    )
    return rows


@triton.jit
def _adapters_of(adapters, row, num_rows, slot):
    """[rows, slots]: 1 where a row has the adapter."""
    mine = tl.load(adapters + row, mask=row < num_rows, other=0)
    return ((mine[:, None] == slot[None, :]) & (slot > 0)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _sort_rows(
    adapters,
    order,
    tiles,
    active,
    num_rows,
    num_slots,
    num_tiles,
    block: tl.constexpr,
    slots: tl.constexpr,
    tile_rows: tl.constexpr,
    pdl: tl.constexpr,
):
    wait_for_previous(pdl)
    slot = tl.arange(0, slots)
    counts = tl.zeros([slots], tl.int32)
    for start in range(0, num_rows, block):
        row = start + tl.arange(0, block)
        counts += tl.sum(_adapters_of(adapters, row, num_rows, slot), 0)
    first = tl.cumsum(counts, 0) - counts

    own_tiles = tl.cdiv(counts, tile_rows)
    first_tile = tl.cumsum(own_tiles, 0) - own_tiles
    for start in range(0, num_tiles, block):
        tile = start + tl.arange(0, block)
        within = tile[:, None] - first_tile[None, :]
        mine = (within >= 0) & (within < own_tiles[None, :])
        begin = tl.sum(tl.where(mine, first[None, :] + within * tile_rows, 0), 1)
        end = tl.sum(tl.where(mine, (first + counts)[None, :], 0), 1)
        at, real = tiles + tile * 3, tile < num_tiles
        tl.store(at, tl.sum(tl.where(mine, slot[None, :], 0), 1), mask=real)
        tl.store(at + 1, begin, mask=real)
        tl.store(at + 2, tl.minimum(begin + tile_rows, end), mask=real)

    present = (counts > 0).to(tl.int32)
    tl.store(active, tl.sum(present, 0))
    tl.store(active + tl.cumsum(present, 0), slot, mask=counts > 0)

    for start in range(0, num_rows, block):
        row = start + tl.arange(0, block)
        mine = _adapters_of(adapters, row, num_rows, slot)
        place = tl.sum(mine * (first[None, :] + tl.cumsum(mine, 0) - 1), 1)
        tl.store(order + place, row, mask=tl.sum(mine, 1) > 0)
        first += tl.sum(mine, 0)
