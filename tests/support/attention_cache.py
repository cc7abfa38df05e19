"""A paged KV cache with the plainest attention over it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from support.paged import UNDEFINED_PAGE
from torch import Tensor

from minisgl.attention.state import PagedKV
from minisgl.config import AttentionSpec


class Cache:
    """Pages of a few sequences, scattered; every slot that no sequence wrote is NaN.

    unseen: how many tokens of each sequence no query sees, because they lie before all windows.
    They are NaN, too, and pages without any other token are undefined in the page table.
    """

    def __init__(
        self,
        lengths: list[int],
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        v_head_dim: int | None = None,
        unseen: list[int] | None = None,
    ) -> None:
        v_head_dim = v_head_dim or head_dim
        self.keys = [torch.randn(n, num_kv_heads, head_dim).to(dtype) for n in lengths]
        self.values = [torch.randn(n, num_kv_heads, v_head_dim).to(dtype) for n in lengths]
        counts = [math.ceil(length / page_size) for length in lengths]
        free = random.Random(1).sample(range(1, sum(counts) + 2), sum(counts))
        self.pages = [[free.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 2, page_size, num_kv_heads)
        self.kv = PagedKV(
            torch.full((*shape, head_dim), torch.nan, dtype=dtype),
            torch.full((*shape, v_head_dim), torch.nan, dtype=dtype),
        )
        for pages, keys, values, first in zip(
            self.pages, self.keys, self.values, unseen or [0] * len(lengths), strict=True
        ):
            for position in range(first, len(keys)):
                page, offset = pages[position // page_size], position % page_size
                self.kv.k[page, offset] = keys[position]
                self.kv.v[page, offset] = values[position]
            num_freed = first // page_size
            pages[:num_freed] = [UNDEFINED_PAGE] * num_freed

    def attend(
        self,
        query: Tensor,
        sequence: int,
        length: int,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query: [num_heads, head_dim], the last of the first `length` tokens, head by head."""
        first = 0 if spec.window is None else max(0, length - spec.window)
        keys = self.keys[sequence][first:length].double()
        values = self.values[sequence][first:length].double()
        group = len(query) // keys.shape[1]
        rows = []
        for head, q in enumerate(query.double()):
            scores = keys[:, head // group] @ q * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            exponentials = (scores - scores.max()).exp()
            total = exponentials.sum()
            if sinks is not None:
                total += (sinks[head].double() - scores.max()).exp()
            rows.append(exponentials / total @ values[:, head // group])
        return torch.stack(rows)


def blocks_of(chunks: Sequence[tuple[int, int]], seed: int = 0) -> list[int]:
    """The last position that each row sees, where some of the rows of the chunks see each other in
    blocks of 1 to 40. chunks: (cached tokens, new tokens) of each."""
    rng = random.Random(seed)
    found: list[int] = []
    for start, length in chunks:
        position, end = start, start + length
        while position < end:
            stop = min(position + rng.randint(1, 40), end)
            own = range(position, stop)
            found += own if rng.random() < 0.4 else [stop - 1] * len(own)
            position = stop
    return found
