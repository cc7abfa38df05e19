"""What the kernels of LoRA compute, by torch: it defines the rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.adapters import (
    AdaptedRows,
    AdapterWeights,
    Delta,
    b_of,
    places_of_parts,
    tiles_of,
)
from minisgl.kernels.elementwise.reference import rms_norm
from minisgl.kernels.linear.epilogue import FusedNorm

TILE_ROWS = 16  # of `tiles`


def sort_rows(adapters: Tensor, num_slots: int) -> AdaptedRows:
    """adapters: [num_rows] int32, from 0 to num_slots."""
    found, counts = torch.unique(adapters[adapters > 0], return_counts=True)
    order, tiles = torch.zeros_like(adapters), []
    sorted_rows = torch.argsort(adapters, stable=True).int()
    sorted_rows = sorted_rows[adapters[sorted_rows.long()] > 0]
    order[: len(sorted_rows)] = sorted_rows
    end = 0
    for adapter, count in zip(found.tolist(), counts.tolist(), strict=True):
        first, end = end, end + count
        tiles += [(adapter, at, min(at + TILE_ROWS, end)) for at in range(first, end, TILE_ROWS)]
    tiles += [(0, 0, 0)] * (tiles_of(len(adapters), num_slots, TILE_ROWS) - len(tiles))
    active = torch.zeros(1 + num_slots, dtype=torch.int32, device=adapters.device)
    active[0], active[1 : 1 + len(found)] = len(found), found
    made = torch.tensor(tiles, dtype=torch.int32, device=adapters.device).view(-1, 3)
    return AdaptedRows(adapters, order, made, active)


def shrink(x: Tensor, weights: AdapterWeights, rows: AdaptedRows) -> Delta:
    """v = x Aᵀ of each row's adapter, in one split; of other rows undefined."""
    num_parts = len(weights.starts)
    v = x.new_zeros((len(x), num_parts, weights.max_rank), dtype=torch.float32)
    for adapter in _active(rows):
        slot, mine = adapter - 1, rows.adapters == adapter
        rank = int(weights.ranks[slot])
        a = weights.a[slot, :, :rank].float()
        v[mine, :, :rank] = torch.einsum("mk,prk->mpr", x[mine].float(), a)
    return Delta(v.flatten(1).unsqueeze(0), weights, rows)


def shrink_norm(
    x: Tensor, norm: FusedNorm, weights: AdapterWeights, rows: AdaptedRows
) -> tuple[Tensor, Delta]:
    """The norm of x, and the shrink of that."""
    normed = rms_norm(x, norm.weight, norm.eps)
    return normed, shrink(normed, weights, rows)


def expand(y: Tensor, delta: Delta) -> None:
    """Adds v Bᵀ to y [num_rows, n], in float32, rounded once."""
    v, weights, rows = delta
    parts = v.sum(0).to(y.dtype).unflatten(1, (-1, weights.max_rank))
    for adapter in _active(rows):
        slot, mine = adapter - 1, rows.adapters == adapter
        rank = int(weights.ranks[slot])
        b = b_of(weights, slot, rank).float()
        for part, columns in enumerate(places_of_parts(weights)):
            added = parts[mine, part, :rank].float() @ b[columns].T
            y[mine, columns] = (y[mine, columns].float() + added).to(y.dtype)


def _active(rows: AdaptedRows) -> list[int]:
    count, *found = rows.active.tolist()
    return found[:count]
