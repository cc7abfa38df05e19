"""What the kernels of LoRA read: the adapters of a product, and which rows of a step have which."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

RANK_UNIT = 16  # of which the rank of a slot is a multiple: smaller ones are padded with zeros


class AdapterWeights(NamedTuple):
    """What adapters 1, 2, .. add to the W of one product: adapter i is in slot i - 1.

    The product has parts, such as q, k and v, whose rows of W follow one another. Each has an A of
    its own; where all have one A, they are one part. Numbers above the rank of a slot are never
    read, so that a slot costs the bytes of its adapter.
    """

    # Of x's dtype; numbers of other products may lie between two slots.
    a: Tensor  # [num_slots, num_parts, max_rank, k]
    # [num_slots, n · max_rank], likewise: of a slot of rank r the first n · r are B [n, r].
    b: Tensor
    ranks: Tensor  # [num_slots] int32, multiples of RANK_UNIT; 0: the slot adds nothing
    starts: tuple[int, ...]  # first row of W of each part

    @property
    def max_rank(self) -> int:
        return self.a.shape[2]


class StackedAdapters(NamedTuple):
    """What adapters 1, 2, .. add to one of both products of experts; as AdapterWeights but where it
    says otherwise."""

    a: Tensor  # [num_slots, num_parts, num_experts, max_rank, k]
    b: Tensor  # [num_slots, num_parts, num_experts, n, max_rank]: numbers above the rank are zeros
    ranks: Tensor


class ExpertAdapters(NamedTuple):
    gate_up: StackedAdapters  # two parts, the gates and the ups
    down: StackedAdapters  # one


class AdaptedRows(NamedTuple):
    """The rows of a step by their adapters, as sort_rows leaves them."""

    adapters: Tensor  # [num_rows] int32: of each row; 0: none
    order: Tensor  # [num_rows] int32: the rows with an adapter, by adapter and then by row
    # [any, 3] int32: adapter, first and end in `order` of each tile of rows; adapter 0: no tile.
    tiles: Tensor
    active: Tensor  # [1 + num_slots] int32: how many adapters have rows, and these, ascending


class Delta(NamedTuple):
    """What adapters add to a product: v Bᵀ, with v = x Aᵀ of `shrink`."""

    # [any, num_rows, num_parts · max_rank] float32: of each split of k. Their sum is rounded to x's
    # dtype before it is multiplied.
    v: Tensor
    weights: AdapterWeights
    rows: AdaptedRows


def tiles_of(num_rows: int, num_slots: int, tile_rows: int) -> int:
    """The most tiles that rows take, whatever adapters they have: all slots have a tile that is not
    full."""
    partly = min(num_rows, num_slots)
    return partly + (num_rows - partly) // tile_rows


def part_ends(weights: AdapterWeights) -> tuple[int, ...]:
    n = weights.b.shape[1] // weights.max_rank
    return (*weights.starts[1:], n)


def places_of_parts(weights: AdapterWeights) -> list[slice]:
    """The columns of y of each part."""
    return [slice(*pair) for pair in zip(weights.starts, part_ends(weights), strict=True)]


def b_of(weights: AdapterWeights, slot: int, rank: int) -> Tensor:
    """A view of B [n, rank] of a slot of this rank."""
    n = weights.b.shape[1] // weights.max_rank
    return weights.b[slot, : n * rank].view(n, rank)


def allocate(
    num_slots: int,
    max_rank: int,
    k: int,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> AdapterWeights:
    """Slots without adapters, for parts with so many rows of W."""
    assert max_rank % RANK_UNIT == 0
    a = torch.empty((num_slots, len(widths), max_rank, k), dtype=dtype, device=device)
    b = torch.empty((num_slots, sum(widths) * max_rank), dtype=dtype, device=device)
    ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
    return AdapterWeights(a, b, ranks, (0, *accumulate(widths[:-1])))
