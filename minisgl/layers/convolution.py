"""The weights of a convolution over the rows of a request, of each channel by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minisgl.layers.linear import parameter
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
