"""Paged attention in Triton: one kernel for decode rows, one for chunks.

Both are FlashAttention (Dao, "FlashAttention-2", 2023): an online softmax in float32 over tiles of
keys, in powers of two, with log2(e) folded into the scale. Decode splits the keys of a row over
programs (Dao et al., "Flash-Decoding", 2023). A *group* is the query heads that share a KV head;
one program serves a whole group, so that it reads K and V once. Decode can do the work of
elementwise/heads.py besides, which saves a launch in every layer of a step that only decodes.

Nothing here waits for the device, and nothing about a step is known on the host but how many rows
and chunks it may have: each program finds its share of the work from what the device tables say, so
that a CUDA graph of either kernel is good for any lengths. The cache is [num_pages, page_size,
num_kv_heads, head_dim], contiguous. What lies past a row's end is not read, neither in the page
table nor in the cache.

Both overlap with the kernel before them by the rule of launch.py, for which page tables,
lengths and the bounds of chunks must be two launches old.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
# The peak of scores where all may be masked: from -inf the difference to -inf is not a number.
LOWEST = tl.constexpr(-3.0e38)
# Rows or chunks that a program looks through at once for its own; one variant of a kernel serves
# all steps that have no more.
LOOKED_THROUGH = 256


@triton.jit
def load_pages(
    table,
    start,
    end,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
):
    """The pages of the tile at `start`: one where a tile lies within a page, else one per key."""
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
    """[block_n, block_d] int64: where the tile at `start` lies in a cache of `row_size` a token."""
    lanes = tl.arange(0, block_n)
    if page_size % block_n == 0:
        slots = pages.to(tl.int64) * page_size + (start % page_size + lanes)
    else:
        slots = pages.to(tl.int64) * page_size + (start + lanes) % page_size
    return slots[:, None] * row_size + tl.arange(0, block_d)[None, :]


@triton.jit
def in_cache(keys, end, head_dim: tl.constexpr, block_d: tl.constexpr):
    """[block_n, block_d or 1]: what of a tile may be loaded."""
    live = (keys < end)[:, None]
    if head_dim == block_d:
        return live
    else:
        return live & (tl.arange(0, block_d) < head_dim)[None, :]


@triton.jit
def fold(scores, scale, peak):
    """What a tile of products does to a softmax: its weights, the decay of all before, the peak.
    Multiplied and subtracted at once, which is why the scale is positive."""
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    return tl.exp2(scores * scale - higher[:, None]), tl.exp2(peak - higher), higher
