"""From the layouts in which checkpoints store quantised weights to those of
kernels/linear/quantized.py.

A rank reads a range of each dimension of a stored tensor. Where several rows or columns share an
element (8 INT4 numbers, a scale), it reads all elements that its range touches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.errors import CheckpointError
from minisgl.kernels.linear.quantized import Fp8Weights, quantize_rows
from minisgl.shards import Shard

PER_INT32 = 8  # INT4 numbers
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the place in an int32 of each of 8 neighbours


def covering(shard: Shard, step: int) -> Shard:
    """The elements that hold a range of entries, if each holds `step`."""
    first, end = shard.first // step, -(-(shard.first + shard.size) // step)
    return Shard(first, end - first, -(-shard.whole // step))


def spread(values: Tensor, dim: int, shard: Shard, step: int, finer: int) -> Tensor:
    """Repeats scales for steps of `finer` entries, which divide those of `step` that were read."""
    end = shard.first + shard.size
    entries = torch.arange(shard.first, end, finer, device=values.device)
    return values.index_select(dim, entries // step - shard.first // step)


def numbers(packed: Tensor, order: list[int] | None = None) -> Tensor:
    """8 numbers from 0 to 15 of each int32, the lowest bits first, or in another order of places.

    packed: [..., n] int32; returns [..., 8 · n] uint8.
    """
    places = torch.tensor(order or range(PER_INT32), dtype=torch.int32, device=packed.device)
    return (packed[..., None] >> (4 * places) & 15).to(torch.uint8).flatten(-2)


def numbers_of(packed: Tensor, outputs: Shard, order: list[int] | None = None) -> Tensor:
    """Those of the range `outputs` of the last dimension, which was packed."""
    first = outputs.first % PER_INT32  # of those that `covering` reads
    return numbers(packed, order)[..., first : first + outputs.size]


def block_scales(
    scale: Tensor, cut: Sequence[Shard], stored: tuple[int, int], block: tuple[int, int]
) -> Tensor:
    """Scales of blocks that begin where the ranges of rows and columns do, from those of `stored`
    rows and columns that begin where the whole matrix does."""
    checked(scale)
    for dim in range(2):
        scale = spread(scale, dim, cut[dim], stored[dim], block[dim])
    return scale


def finite(scale: Tensor) -> Tensor:
    """Raises CheckpointError for a scale that no weight can have."""
    if not torch.isfinite(scale).all():
        raise CheckpointError("holds scales that are not finite")
    return scale


def checked(scale: Tensor) -> Tensor:
    """The same where exporters write no negative scales either."""
    if (finite(scale) < 0).any():
        raise CheckpointError("holds negative scales")
    return scale


def quantize_into(weights: Fp8Weights, stored: Tensor, inputs: Shard) -> None:
    """Quantise rows of which all columns were read, and keep the range `inputs` of the columns. The
    scale is that of the whole row, so that it does not depend on the ranks.

    stored: [n, whole], or with a leading dimension the matrices of experts.
    """
    if stored.dim() == 3:
        for expert, matrix in enumerate(stored):
            quantize_into(weights.expert(expert), matrix, inputs)
        return
    data, scale = quantize_rows(stored.to(weights.data.device))
    kept = data[:, inputs.first : inputs.first + inputs.size]
    weights.data.copy_(kept)
    weights.scale.copy_(scale)
