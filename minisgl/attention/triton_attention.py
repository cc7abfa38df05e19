"""Paged attention in Triton, without CUDA toolkit and without a plan per step.

Both phases read page tables, lengths and chunk bounds on the device, so a CUDA graph of either
serves any batch that fits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.base import AttentionCall, DecodeBatch, PrefillBatch
from minisgl.config import AttentionSpec
from minisgl.kernels.attention.paged_common import SplitWorkspace, num_groups
from minisgl.kernels.attention.paged_decode import paged_decode
from minisgl.kernels.attention.paged_prefill import (
    MOST_SPLIT_CHUNKS,
    paged_prefill,
    split_room,
)
from minisgl.kernels.tuning import DecodeTiles, DeviceTuning, PrefillTiles, tuning_of

MOST_QUERIES, MOST_WIDE_QUERIES = 32, 16  # of a program, and of one with heads over 128


def decode_tiles(
    num_items: int,
    head_dim: int,
    itemsize: int,
    tuning: DeviceTuning,
    *,
    v_in_k: bool = False,
) -> DecodeTiles:
    """The tiles of a decode batch. num_items: number of (row, KV head) pairs; itemsize: of queries;
    v_in_k: whether values are the first numbers of keys."""
    if itemsize == 4:
        return tuning.float32_decode_tiles
    if head_dim > 128 and not v_in_k:
        return next(tiles for widest, tiles in tuning.wide_decode_tiles if head_dim <= widest)
    table = tuning.latent_decode_tiles if v_in_k else tuning.decode_tiles
    return next(tiles for most, tiles in table if num_items <= most)


def reads_runs_together(num_queries: int, head_dim: int, spec: AttentionSpec) -> bool:
    """Whether the rows of a run read their keys and values once. num_queries: of a run, for each KV
    head. The tensor cores multiply 16 at least; many more would take too many registers. The rows
    of a window begin at different keys, and those of latents have many heads as it is."""
    most = MOST_QUERIES if head_dim <= 128 else MOST_WIDE_QUERIES
    return spec.window is None and not spec.v_in_k and num_queries <= most


def prefill_tiles(
    head_dim: int,
    itemsize: int,
    tuning: DeviceTuning,
    *,
    fp8: bool = False,
    v_in_k: bool = False,
) -> PrefillTiles:
    """The tiles of chunks. fp8: whether the KV cache is in FP8; the others are those of
    decode_tiles."""
    if v_in_k:
        if itemsize == 4:
            return tuning.float32_latent_prefill_tiles
        return tuning.fp8_latent_prefill_tiles if fp8 else tuning.latent_prefill_tiles
    table = tuning.fp8_prefill_tiles if fp8 else tuning.prefill_tiles
    if itemsize == 4:
        table = tuning.float32_prefill_tiles
    return next(tiles for widest, tiles in table if head_dim <= widest)


def prefill_splits(
    num_rows: int,
    num_chunks: int,
    group: int,
    num_kv_heads: int,
    tiles: PrefillTiles,
    tuning: DeviceTuning,
) -> int:
    """The number of KV splits over all items that a step with `num_rows` rows of chunks aims at, of
    each KV head; 0 if none is split: the rows alone may fill the device, or the chunks are many.

    That is decided as if all rows were one chunk, because of a captured step only the room for
    chunks is known. Where they are several, and more items, each is split less on the device.
    """
    most = most_prefill_splits(num_kv_heads, tiles, tuning)
    num_items = -(-num_rows // (tiles.block_m // group))
    return most if num_items < most and num_chunks <= MOST_SPLIT_CHUNKS else 0


def most_prefill_splits(num_kv_heads: int, tiles: PrefillTiles, tuning: DeviceTuning) -> int:
    """The number that `prefill_splits` gives for few rows."""
    return tuning.num_sms * tiles.programs_per_sm // num_kv_heads


class TritonAttention:
    """Implements AttentionBackend and FusedDecode on a CUDA device, for float32, float16, bfloat16.

    For use on one stream: all calls share the memory in which KV splits are merged. Other rows
    affect the result of a row only through the position of its KV splits, which depends on the
    numbers of rows and tokens, of captured steps on the room for rows; equal sets of rows or
    chunks give equal bits, in any order.
    """

    fuses_norm_rope = True

    def __init__(
        self,
        decode: DecodeTiles | None = None,
        prefill: PrefillTiles | None = None,
        *,
        pdl: bool = True,
    ) -> None:
        """decode, prefill: tiles to use instead of the device's tuning. pdl: overlap launches if
        the device supports it, by the rule of launch_options.py."""
        self._decode_tiles = decode
        self._prefill_tiles = prefill
        self._pdl = pdl
        # The last of each is the largest; captured graphs may use the others.
        self._decode_workspaces: list[SplitWorkspace] = []
        self._prefill_workspaces: list[SplitWorkspace] = []

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        """Rows of length 0 are zeros, and write nothing to the cache. Raises RuntimeError if a
        capture needs more memory than the calls before it."""
        heads, kv, spec, norm_rope = call.q, call.kv, call.spec, call.norm_rope
        num_heads = heads.shape[1]
        if norm_rope is not None:
            heads = heads.unflatten(1, (-1, spec.head_dim))
            num_heads = norm_rope.num_heads(heads.shape[1], kv.k.shape[2])
        num_rows, _, head_dim = heads.shape
        v_head_dim = kv.v.shape[3]
        num_kv_heads = num_groups(num_heads, kv.k.shape[2], spec)
        tuning = tuning_of(heads.device)
        run = batch.run
        if not reads_runs_together(run * num_heads // num_kv_heads, head_dim, spec):
            run = 1
        num_rows //= run  # that read keys and values
        tiles = self._decode_tiles or decode_tiles(
            num_rows * num_kv_heads,
            head_dim,
            heads.itemsize,
            tuning,
            v_in_k=spec.v_in_k,
        )
        target_splits = max(1, tuning.num_sms * tiles.programs_per_sm // num_kv_heads)
        num_stats = (target_splits + num_rows) * run * num_heads
        return paged_decode(
            heads,
            kv.k,
            kv.v,
            batch.page_table,
            batch.lengths,
            spec=spec,
            sinks=call.sinks,
            target_splits=target_splits,
            workspace=_workspace(
                self._decode_workspaces,
                heads,
                num_accs=num_stats * v_head_dim,
                num_stats=num_stats,
                num_semaphores=num_rows * num_kv_heads,
            ),
            tiles=tiles,
            norm_rope=norm_rope,
            scales=kv.scales,
            pdl=self._pdl,
            run=run,
        )

    def prefill(
        self, call: AttentionCall, batch: PrefillBatch, last_seen: Tensor | None = None
    ) -> Tensor:
        """last_seen: as of paged_prefill. Raises as `decode` does."""
        q, kv, spec = call.q, call.kv, call.spec
        num_rows, num_heads, head_dim = q.shape
        v_head_dim = kv.v.shape[3]
        num_kv_heads = num_groups(num_heads, kv.k.shape[2], spec)
        tuning = tuning_of(q.device)
        tiles = self._prefill_tiles or prefill_tiles(
            head_dim,
            q.itemsize,
            tuning,
            fp8=kv.k.dtype == torch.float8_e4m3fn,
            v_in_k=spec.v_in_k,
        )
        target_splits, workspace = 0, None
        if last_seen is None:
            # Of one size, and made by the first step, whatever its rows.
            most = most_prefill_splits(num_kv_heads, tiles, tuning)
            room = split_room(most, num_kv_heads, v_head_dim, tiles)
            workspace = _workspace(self._prefill_workspaces, q, **room)
            target_splits = prefill_splits(
                num_rows,
                batch.ends.shape[0],
                num_heads // num_kv_heads,
                num_kv_heads,
                tiles,
                tuning,
            )
        return paged_prefill(
            q,
            kv.k,
            kv.v,
            batch.page_table,
            batch.row_starts,
            batch.ends,
            spec=spec,
            sinks=call.sinks,
            tiles=tiles,
            target_splits=target_splits,
            workspace=workspace,
            scales=kv.scales,
            pdl=self._pdl,
            last_seen=last_seen,
        )


def _workspace(
    workspaces: list[SplitWorkspace],
    q: Tensor,
    *,
    num_accs: int,
    num_stats: int,
    num_semaphores: int,
) -> SplitWorkspace:
    """The last of `workspaces`, to which one is added if that has no room for so many."""
    if workspaces:
        last = workspaces[-1]
        if last.holds(num_accs=num_accs, num_stats=num_stats, num_semaphores=num_semaphores):
            return last
        num_accs = max(num_accs, last.accs.numel())
        num_stats = max(num_stats, last.peaks.numel())
        num_semaphores = max(num_semaphores, last.semaphores.numel())
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        # Each replay would zero the semaphores, which other graphs use.
        raise RuntimeError("attend to a batch of this size once before a graph of it is captured")
    workspaces.append(
        SplitWorkspace.allocate(
            num_accs=num_accs,
            num_stats=num_stats,
            num_semaphores=num_semaphores,
            device=q.device,
        )
    )
    return workspaces[-1]
