"""Paged caches at random, hostile on purpose, and what a backend makes of them.

Pages are scattered, what no sequence wrote is NaN, and the undefined columns of a page table point
outside the cache. TorchAttention on the same device is the reference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from paged import UNDEFINED_PAGE
from torch import Tensor

from minisgl.attention.base import AttentionBackend, ChunkRows, DecodeRows, LayerKV
from minisgl.attention.torch_backend import TorchAttention

# Relative to the largest output; half precision rounds weights and outputs to 11 or 8 bits.
ERRORS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Shape:
    """What a model and the options fix."""

    group: int
    head_dim: int
    page_size: int
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def scale(self) -> float:
        """Peaked: over random keys the model's own scale gives nearly uniform weights."""
        return 2 * self.head_dim**-0.5

    def queries(self, num_rows: int) -> Tensor:
        """A part of a wider tensor, as of one projection to q, k and v."""
        heads = self.num_kv_heads * self.group
        wide = torch.randn(num_rows, heads + 3, self.head_dim, device=self.device)
        return wide.to(self.dtype)[:, 1 : heads + 1]


def paged_cache(shape: Shape, lengths: Sequence[int], seed: int = 0) -> tuple[LayerKV, Tensor]:
    """The cache of sequences this long, and their page table."""
    torch.manual_seed(seed)
    counts = [-(-length // shape.page_size) for length in lengths]
    num_pages = sum(counts) + 3
    free = random.Random(seed).sample(range(1, num_pages), sum(counts))
    table = torch.full((len(lengths), max(counts) + 2), UNDEFINED_PAGE, dtype=torch.int32)
    written = torch.zeros(num_pages, shape.page_size, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(pages, dtype=torch.int32)
        slots = torch.zeros(count * shape.page_size, dtype=torch.bool)
        slots[:length] = True
        written[pages] = slots.view(count, shape.page_size)
    size = (num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    unwritten = ~written[:, :, None, None].to(shape.device)
    k, v = (
        torch.randn(size, device=shape.device).to(shape.dtype).masked_fill_(unwritten, torch.nan)
        for _ in range(2)
    )
    return LayerKV(k, v), table.to(shape.device)


def check_decode(
    backend: AttentionBackend, shape: Shape, lengths: Sequence[int], seed: int = 0
) -> Tensor:
    kv, table = paged_cache(shape, lengths, seed)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=shape.device)
    rows = DecodeRows(table, on_device, max(lengths))
    q = shape.queries(len(lengths))
    out = backend.decode(q, kv, rows, shape.scale)
    assert_close(out, TorchAttention().decode(*in_float32(q, kv), rows, shape.scale), shape)
    return out


def check_prefill(
    backend: AttentionBackend, shape: Shape, chunks: Sequence[tuple[int, int]], seed: int = 0
) -> Tensor:
    """chunks: (tokens before it, tokens in it)."""
    kv, table = paged_cache(shape, [sum(chunk) for chunk in chunks], seed)
    starts, lengths = zip(*chunks, strict=True)
    rows = ChunkRows.of(table, starts, lengths)
    q = shape.queries(rows.num_rows)
    out = backend.prefill(q, kv, rows, shape.scale)
    assert_close(out, TorchAttention().prefill(*in_float32(q, kv), rows, shape.scale), shape)
    return out


def in_float32(q: Tensor, kv: LayerKV) -> tuple[Tensor, LayerKV]:
    return q.float(), replace(kv, k=kv.k.float(), v=kv.v.float())


def assert_close(out: Tensor, expected: Tensor, shape: Shape) -> None:
    assert out.shape == expected.shape and out.dtype == shape.dtype
    assert out.is_contiguous() and out.isfinite().all()
    error = (out.float() - expected).abs().max()
    assert error <= ERRORS[shape.dtype] * expected.abs().max().clamp(min=1), error
