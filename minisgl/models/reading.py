"""Reads weights back by the names that they have in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from minisgl.errors import CheckpointError
from minisgl.models.target import Target, copy
from minisgl.models.targets import Destinations

MAX_NUMBERS = 1 << 20  # that are read at once


class Piece(NamedTuple):
    """What a rank has of a tensor."""

    whole: list[int]  # the shape of the tensor in a checkpoint, up to the rows that were asked for
    starts: list[int]  # of this piece, in each dimension
    shape: list[int]
    numbers: list[float]  # flat


def pieces_of(to: Destinations, name: str | None, num_rows: int) -> list[Piece]:
    """The pieces of a tensor's first rows, by its name in the model; none if it is not here, or is
    kept in another form than that of a checkpoint."""
    targets: Sequence[Target] = ()
    if to.tied_head is not None and name == to.tied_head.name:
        targets = (to.tied_head.target,)
    elif name is not None and (stack := to.stack(name)) is not None:
        targets = stack.targets
    return list(_pieces(targets, num_rows))


def _pieces(targets: Sequence[Target], num_rows: int) -> Iterator[Piece]:
    for target in targets:
        if target.weight is None or target.scalar or target.store is not copy:
            continue
        whole, starts = ([getattr(shard, of) for shard in target.cut] for of in ("whole", "first"))
        shape = [shard.num_real for shard in target.cut]
        if whole:
            whole[0] = min(whole[0], num_rows)
            shape[0] = min(shape[0], whole[0] - starts[0])
        if math.prod(whole) > MAX_NUMBERS:
            allowed = f"allowed: so few rows that they have {MAX_NUMBERS:,}"
            raise CheckpointError(f"{math.prod(whole):,} numbers are too many at once; {allowed}.")
        if min(shape, default=1) > 0:
            part = target.weight[tuple(map(slice, shape))].float().flatten()
            yield Piece(whole, starts, shape, part.tolist())


def joined(name: str, pieces: Sequence[Piece]) -> Any:
    """The pieces of all ranks as nested lists. Raises CheckpointError if some are not there."""
    if pieces:
        tensor = torch.full(pieces[0].whole, torch.nan)
        for _, starts, shape, numbers in pieces:
            at = tuple(slice(a, a + size) for a, size in zip(starts, shape, strict=True))
            tensor[at] = torch.tensor(numbers).view(shape)
        if not bool(tensor.isnan().any()):
            return tensor.tolist()
    raise CheckpointError(
        f"{name:.200} cannot be read: there is no such tensor, or it is kept in another form; "
        "allowed: names of the checkpoint whose numbers are kept as they came."
    )
