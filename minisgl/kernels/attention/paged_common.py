"""What the two paged attention kernels share: paged_decode.py, for rows of one token, and
paged_prefill.py, for chunks.

Both are FlashAttention (Dao, "FlashAttention-2", 2023): an online softmax in float32 over tiles of
keys, in powers of two, with log2(e) folded into the scale. Decode splits the keys of a row over
programs (Dao et al., "Flash-Decoding", 2023). A *group* is the query heads that share a KV head;
one program serves a whole group, so that it reads K and V once. Decode can
also do the work of elementwise/heads.py, which saves a launch a layer in steps that only decode.

The host knows nothing about a step but the maximum number of rows and chunks: each program derives
its work from the tables on the device, so that a CUDA graph of either kernel serves any lengths.
The cache is [num_pages, page_size, num_kv_heads, head_dim], contiguous. Nothing past a row's end is
read, in the page table or the cache.

Both overlap with the kernel before them by the rule of launch.py, for which page tables,
lengths and the bounds of chunks must be two launches old.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
# The running maximum before any score: -inf minus -inf would be NaN where all scores are masked.
LOWEST = tl.constexpr(-3.0e38)
# Rows or chunks that a program searches at once for its own; steps with no more share one variant
# of a kernel.
LOOKED_THROUGH = 256


@triton.jit
def load_pages(
    table,
    start,
    end,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
):
    """The pages of the tile at `start`: one if a tile lies within a page, else one per key."""
    if page_size % block_n == 0:
        return tl.load(table + start // page_size, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, block_n)
        return tl.load(table + keys // page_size, mask=keys < end, other=0)


@triton.jit
def offsets_of(
    pages,
    start,
    row_size: tl.constexpr,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """[block_n, block_d] int64: offsets of the tile at `start` in a cache with `row_size` a
    token."""
    lanes = tl.arange(0, block_n)
    if page_size % block_n == 0:
        kv_slots = pages.to(tl.int64) * page_size + (start % page_size + lanes)
    else:
        kv_slots = pages.to(tl.int64) * page_size + (start + lanes) % page_size
    return kv_slots[:, None] * row_size + tl.arange(0, block_d)[None, :]


@triton.jit
def in_cache(keys, end, head_dim: tl.constexpr, block_d: tl.constexpr):
    """[block_n, block_d or 1] bool: which elements of a tile exist."""
    live = (keys < end)[:, None]
    if head_dim == block_d:
        return live
    else:
        return live & (tl.arange(0, block_d) < head_dim)[None, :]


@triton.jit
def fold(scores, scale, peak):
    """The update of an online softmax by a tile of q · k: (weights of the tile, decay of all
    earlier ones, running maximum). The scale, which is fused into the subtraction, must be
    positive."""
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    return tl.exp2(scores * scale - higher[:, None]), tl.exp2(peak - higher), higher
