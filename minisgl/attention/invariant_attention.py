"""Attention whose bits do not depend on other rows (--batch-invariant)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minisgl.attention.base import AttentionCall, DecodeBatch, PrefillBatch
from minisgl.attention.triton_attention import prefill_tiles
from minisgl.kernels.attention.paged_prefill import paged_prefill
from minisgl.kernels.tuning import tuning_of


class InvariantAttention:
    """Implements AttentionBackend on a CUDA device, for layers without windows.

    The kernel of chunks attends for decode rows, too, each of which is a chunk of one token. It
    reads the keys of a token from the first one on in tiles of one size, and splits them over no
    programs. Tiles behind a token, which others in its program see, change none of its bits, and
    nor does how many others there are.
    """

    def __init__(self) -> None:
        self._numbers: Tensor | None = None  # [any] int32: 0, 1, 2, …

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        """Rows of length 0 are zeros. Of each number of rows, the first call must not be
        captured."""
        num_rows = batch.num_rows
        if self._numbers is None or len(self._numbers) <= num_rows:
            numbers = torch.arange(max(1024, num_rows + 1), dtype=torch.int32)
            self._numbers = numbers.to(batch.lengths.device)
        starts = self._numbers[: num_rows + 1]
        chunks = PrefillBatch(batch.page_table, starts, batch.lengths, num_rows, (), ())
        return self._attend(call, chunks, most_queries=64)

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        return self._attend(call, batch)

    def _attend(
        self, call: AttentionCall, batch: PrefillBatch, most_queries: int | None = None
    ) -> Tensor:
        """most_queries: of a program, where it has more as of chunks. A warp has as many."""
        kv, spec = call.kv, call.spec
        assert spec.window is None, "tiles begin with a window, which is that of their first token"
        tiles = prefill_tiles(spec.head_dim, call.q.itemsize, tuning_of(call.q.device))
        if most_queries is not None and tiles.block_m > most_queries:
            num_warps = tiles.num_warps * most_queries // tiles.block_m
            tiles = replace(tiles, block_m=most_queries, num_warps=num_warps)
        return paged_prefill(
            call.q,
            kv.k,
            kv.v,
            batch.page_table,
            batch.row_starts,
            batch.ends,
            spec=spec,
            sinks=call.sinks,
            tiles=tiles,
            scales=kv.scales,
        )
