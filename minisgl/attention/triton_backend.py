"""Paged attention with Triton alone: fast wherever torch is, with no toolkit and no plan per step.

Decode reads page table and lengths on the device, so that its CUDA graphs are good for any lengths.
Prefill uploads a list of its work, once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import ChunkRows, DecodeRows, LayerKV
from minisgl.kernels.triton_attention import (
    DecodeTiles,
    DecodeWorkspace,
    PrefillTiles,
    paged_decode,
    paged_prefill,
)

# Programs that decode aims at for each SM, counted for rows that fall into all their shares. More
# even out rows of different lengths; those that find no share cost what it takes to start them.
PROGRAMS_PER_SM = 16
# A row may be much longer than the others, so even a full batch is split.
MIN_SPLITS, MAX_SPLITS = 2, 64
# Without a GPU there is Triton's interpreter, which runs the programs one after the other.
INTERPRETED_SMS = 4


def decode_tiles(head_dim: int, itemsize: int) -> DecodeTiles:
    """Not measured yet: `scripts/bench_attention.py --tune` tries these and others.

    The bandwidth of an H200 wants some 40 KiB on their way to each SM at any time. A tile has up to
    32 KiB of keys and values; of three stages one is on its way while one is worked on, and shared
    memory has room for three programs. Tensor cores even for a single head, where 15 of their 16
    rows are padding: compiled for sm_90, a tile of 64 keys takes a warp 330 instructions, and 820
    on CUDA cores for one head, 1,120 for two, where full bandwidth leaves time for 1,750.
    """
    block_n = 64 if head_dim <= 128 else 32
    if itemsize == 4:  # on CUDA cores, where larger tiles do not keep their registers
        block_n = 16
    return DecodeTiles(block_n, num_warps=4, num_stages=3, use_dot=True, min_share=128)


def prefill_tiles(head_dim: int, itemsize: int) -> PrefillTiles:
    """Not measured yet. They keep their registers on sm_90, and fit into the 99 KiB of shared
    memory of the smaller GPUs. float32 is multiplied on CUDA cores, exactly."""
    if itemsize == 4:
        if head_dim > 128:
            return PrefillTiles(block_m=16, block_n=16, num_warps=4, num_stages=2)
        return PrefillTiles(block_m=32, block_n=16, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillTiles(block_m=64, block_n=32, num_warps=8, num_stages=2)
    return PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=3)


@dataclass(frozen=True, slots=True)
class _Work:
    """What the chunks of a step are cut into, for every layer of it."""

    rows: ChunkRows
    group: int
    items: Tensor  # as paged_prefill takes them


class TritonAttention:
    """Implements AttentionBackend on a CUDA device, for float32, float16 and bfloat16.

    Calls go on one stream: the splits of decode meet in memory that all calls share. A row's result
    depends on the rows beside it only in the number of splits, which follows from `num_rows`; the
    same rows in the same order give the same bits.
    """

    def __init__(
        self, tiles: DecodeTiles | None = None, programs_per_sm: int = PROGRAMS_PER_SM
    ) -> None:
        """`tiles`: for decode, instead of those that `decode_tiles` chooses."""
        self._tiles = tiles
        self._programs_per_sm = programs_per_sm
        self._num_sms = 0
        # The last one is the largest; captured graphs may hold the others.
        self._workspaces: list[DecodeWorkspace] = []
        self._work: _Work | None = None

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeRows, scale: float) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape. Rows of length 0 are zeros.

        Raises RuntimeError if a graph is captured of more rows than were decoded before.
        """
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = kv.k.shape[2]
        group = num_heads // num_kv_heads
        num_splits = self._num_splits(num_rows * num_kv_heads, q.device)
        return paged_decode(
            q,
            kv.k,
            kv.v,
            rows.page_table,
            rows.lengths,
            scale=scale,
            num_splits=num_splits,
            workspace=self._workspace(num_rows * num_kv_heads, num_splits, group, head_dim, q),
            tiles=self._tiles or decode_tiles(head_dim, q.itemsize),
        )

    def prefill(self, q: Tensor, kv: LayerKV, rows: ChunkRows, scale: float) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        group = q.shape[1] // kv.k.shape[2]
        tiles = prefill_tiles(q.shape[2], q.itemsize)
        work = self._work
        if work is None or work.rows is not rows or work.group != group:
            items = _upload(_cut(rows, tiles.block_m // group), q.device)
            work = self._work = _Work(rows, group, items)
        return paged_prefill(q, kv.k, kv.v, rows.page_table, work.items, scale=scale, tiles=tiles)

    def _num_splits(self, num_items: int, device: torch.device) -> int:
        """num_items: pairs of a row and a KV head."""
        if self._num_sms == 0:
            self._num_sms = INTERPRETED_SMS
            if device.type == "cuda":
                properties = torch.cuda.get_device_properties(device)
                self._num_sms = properties.multi_processor_count
        wanted = -(-self._num_sms * self._programs_per_sm // max(1, num_items))
        return min(max(wanted, MIN_SPLITS), MAX_SPLITS)

    def _workspace(
        self, num_items: int, num_splits: int, group: int, head_dim: int, q: Tensor
    ) -> DecodeWorkspace:
        num_stats = num_items * num_splits * group
        num_accs = num_stats * head_dim
        if self._workspaces:
            last = self._workspaces[-1]
            held = (last.accs.numel(), last.peaks.numel(), last.arrivals.numel())
            if num_accs <= held[0] and num_stats <= held[1] and num_items <= held[2]:
                return last
            num_accs, num_stats = max(num_accs, held[0]), max(num_stats, held[1])
            num_items = max(num_items, held[2])
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            # Its zeros would be written by this graph alone, and others would come to use them.
            raise RuntimeError("decode as many rows once before a graph of them is captured")
        self._workspaces.append(
            DecodeWorkspace.allocate(
                num_accs=num_accs, num_stats=num_stats, num_arrivals=num_items, device=q.device
            )
        )
        return self._workspaces[-1]


def _cut(rows: ChunkRows, tokens_per_item: int) -> list[tuple[int, int, int, int]]:
    """Items of work as paged_prefill takes them; those with most keys first, so that the last
    ones to run are short."""
    items: list[tuple[int, int, int, int]] = []
    row = 0
    for chunk, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        items += [
            (chunk, row + first, start + first, min(tokens_per_item, length - first))
            for first in range(0, length, tokens_per_item)
        ]
        row += length
    return sorted(items, key=lambda item: -item[2])


def _upload(items: list[tuple[int, int, int, int]], device: torch.device) -> Tensor:
    """[num_items, 4] int32 on `device`, in one copy behind what the current stream has queued."""
    on_host = torch.tensor(items, dtype=torch.int32, pin_memory=device.type == "cuda").view(-1, 4)
    return on_host.to(device, non_blocking=True)
