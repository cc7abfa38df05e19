"""Convolutions over the rows of a request, of each channel by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minisgl.kernels.segments import Runs
from minisgl.layers.linear import parameter
from minisgl.layers.step import Step
from minisgl.shards import Shard


class Convolution(nn.Module):
    """`parts`: what a rank holds of the channels, of each of several maps one after the other.
    `width`: number of rows that a result depends on."""

    weight: nn.Parameter  # [channels, 1, width], the newest row's last

    def __init__(self, parts: Sequence[Shard], width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = tuple(parts)
        channels = sum(part.size for part in parts)
        self.weight = parameter(torch.empty((channels, 1, width), dtype=dtype))


def runs_of(step: Step, keeps_rows: bool) -> Runs:
    """The decode rows of a step, for a layer that keeps those of the last run or does not."""
    slots, num_kept, size = step.batch.slots.decodes, None, 1
    if keeps_rows:
        num_kept, size = step.batch.slots.num_kept, step.batch.decodes.num_rows // len(slots)
        assert num_kept is not None
    return Runs(slots, num_kept, size)
