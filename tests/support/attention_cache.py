"""A paged KV cache with the plainest attention over it."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from minisgl.attention.base import LayerKV


class Cache:
    """Pages of a few sequences, scattered; every slot that no sequence wrote is NaN."""

    def __init__(
        self,
        lengths: list[int],
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        shape = (num_kv_heads, head_dim)
        self.keys = [torch.randn(length, *shape).to(dtype) for length in lengths]
        self.values = [torch.randn(length, *shape).to(dtype) for length in lengths]
        counts = [math.ceil(length / page_size) for length in lengths]
        free = random.Random(1).sample(range(1, sum(counts) + 2), sum(counts))
        self.pages = [[free.pop() for _ in range(count)] for count in counts]
        self.kv = LayerKV(
            *torch.full((2, sum(counts) + 2, page_size, *shape), torch.nan, dtype=dtype)
        )
        for pages, keys, values in zip(self.pages, self.keys, self.values, strict=True):
            for position in range(len(keys)):
                page, offset = pages[position // page_size], position % page_size
                self.kv.k[page, offset] = keys[position]
                self.kv.v[page, offset] = values[position]

    def attend(self, query: Tensor, sequence: int, length: int, scale: float) -> Tensor:
        """query: [num_heads, head_dim], over the first `length` tokens, head by head."""
        keys = self.keys[sequence][:length].double()
        values = self.values[sequence][:length].double()
        group = len(query) // keys.shape[1]
        rows = []
        for head, q in enumerate(query.double()):
            weights = torch.softmax(keys[:, head // group] @ q * scale, dim=0)
            rows.append(weights @ values[:, head // group])
        return torch.stack(rows)
