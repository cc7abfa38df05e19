"""v = A x of the adapters (LoRA) of pairs, in a launch before each product of experts, whose GEMM
adds B v to its sums (pair_deltas.py). One program adds up all of v of a pair, whatever the other
pairs are."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.adapters import RANK_UNIT, StackedAdapters
from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.moe.many_rows import Listed, PairGemm
from minisgl.kernels.moe.pair_deltas import next_adapter

_MOST_PAIRS = 64  # in a tile of v


def shrink_pairs(
    gemm: PairGemm, pairs: Listed, weights: StackedAdapters, adapters: Tensor
) -> tuple[Any, ...]:
    """v of all pairs that have an adapter, as the argument `delta` of the kernel of a GEMM.
    adapters: [num_rows] int32, those of the rows of the step; 0: none."""
    source, tiles, (a, b, ranks) = gemm.source, gemm.tiles, weights
    _, num_parts, num_experts, max_rank, k = a.shape
    assert source.shape[1] == k and num_parts == 1 + gemm.gated and len(adapters) == pairs.num_rows
    num_pairs, top_k = len(gemm.target), pairs.weights.shape[1]
    assert num_pairs * num_parts * max_rank < 1 << 31, "with_deltas has offsets of 32 bits"
    v = source.new_empty((num_pairs, num_parts * max_rank), dtype=torch.float32)
    block_m = min(max(tiles.block_m, 16), _MOST_PAIRS)
    places = tiles.places * max(tiles.block_m // block_m, 1)
    row_bytes = 512 if block_m == 16 else 256
    _shrink_pairs[(max_rank // RANK_UNIT * places, num_experts)](
        v,
        source,
        a,
        ranks,
        adapters,
        pairs.counts,
        pairs.lists,
        pairs.num_rows,
        top_k,
        gemm.shared,
        a.stride(0),
        num_experts,
        max_rank,
        places,
        k=k,
        num_parts=num_parts,
        block_m=block_m,
        block_k=min(row_bytes // a.itemsize, max(triton.next_power_of_2(k), 16)),
        num_warps=4,
        **pdl_options(source.device, gemm.pdl),
    )
    return v, b, ranks, adapters, top_k, b.stride(0), num_experts, max_rank


@triton.jit(do_not_specialize=["num_rows", "places"])
def _shrink_pairs(
    v,
    source,
    a,
    ranks,
    adapters,
    counts,
    lists,
    num_rows,
    top_k,
    shared,
    slot_stride,
    num_experts,
    max_rank,
    places,
    k: tl.constexpr,
    num_parts: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    pdl: tl.constexpr,
):
    """16 rows of A of each part, for some of an expert's pairs."""
    wait_for_previous(pdl)
    place, first_lane = tl.program_id(0) % places, tl.program_id(0) // places * 16
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    lists += expert * num_rows
    index = tl.arange(0, 16 * num_parts)
    part, lane = index // 16, first_lane + index % 16
    a_row = (part.to(tl.int64) * num_experts + expert) * max_rank + lane
    columns = tl.arange(0, block_k)
    a_at = a + a_row[:, None] * k + columns[None, :]
    for first in range(place * block_m, count, places * block_m):
        member = first + tl.arange(0, block_m)
        inside = member < count
        pair = tl.load(lists + member, mask=inside, other=0)
        adapter = tl.load(adapters + pair // top_k, mask=inside, other=0)
        x_at = source + (pair // shared).to(tl.int64)[None, :] * k + columns[:, None]
        v_at = v + pair.to(tl.int64)[None, :] * (num_parts * max_rank)
        v_at += (part * max_rank + lane)[:, None]
        now = next_adapter(adapter, 0)
        while now < 1 << 30:
            slot, mine = (now - 1).to(tl.int64), (adapter == now)[None, :]
            if first_lane < tl.load(ranks + slot):
                total = tl.zeros([16 * num_parts, block_m], tl.float32)
                for start in tl.range(0, k, block_k, num_stages=3):
                    some = start + columns < k
                    w = tl.load(a_at + slot * slot_stride + start, mask=some[None, :], other=0.0)
                    x = tl.load(x_at + start, mask=some[:, None] & mine, other=0.0)
                    total = tl.dot(w, x, total, input_precision="ieee")
                tl.store(v_at + tl.zeros_like(total).to(tl.int32), total, mask=mine)
            now = next_adapter(adapter, now)
