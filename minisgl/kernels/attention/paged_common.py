"""What the two paged attention kernels share: paged_decode.py, for rows of one token, and
paged_prefill.py, for chunks.

Both are FlashAttention (Dao, "FlashAttention-2", 2023): an online softmax in float32 over tiles of
keys, in powers of two, with log2(e) folded into the scale. Decode splits the keys of a row over
programs (Dao et al., "Flash-Decoding", 2023), and so does a step whose chunks are few. A *group* is
the query heads that share a KV head; one program serves a whole group, so that it reads K and V
once. Decode can also do the work of elementwise/heads.py, which saves a launch a layer in steps
that only decode.

The host knows nothing about a step but the maximum number of rows and chunks: each program derives
its work from the tables on the device, so that a CUDA graph of either kernel serves any lengths.
The cache is [num_pages, page_size, num_kv_heads, head_dim], contiguous; values may have another
width than keys. Nothing past a row's end or before its window is read, in the page table or the
cache, and tiles before the window are skipped: a decode row of a layer with a window w reads
min(length, w) keys and values, a chunk of n tokens min(end, w + n - 1) with each of its tiles.

Values may be the first numbers of the keys: `v` is None in the kernels then. A tile of these is
loaded once for both, and one of the *tail* behind it. There is a single KV head, whose query heads
are divided into groups, each of which reads it.

What a layer has beyond plain attention is None where it has not, and compiles to nothing: a
*window*, the number of keys that a query sees; a *soft cap* c, by which scores become c · tanh(s /
c) before they are masked; *sinks*, a logit for each head that takes part in the softmax with a
value of 0 (Xiao et al., arXiv 2309.17453), added in the first split of an output.

Both overlap with the kernel before them by the rule of launch_options.py, for which page tables,
lengths and the bounds of chunks must be two launches old.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.config import AttentionSpec

LOG2_E = tl.constexpr(1.4426950408889634)
# The running maximum before any score: -inf minus -inf would be NaN where all scores are masked.
LOWEST = tl.constexpr(-3.0e38)
# Rows or chunks that a program searches at once for its own; steps with no more share one variant
# of a kernel.
LOOKED_THROUGH = 256
# Query heads in a group of one KV head that holds the values, too.
_MOST_HEADS = 32


def num_groups(num_heads: int, num_kv_heads: int, spec: AttentionSpec) -> int:
    """The number of groups of query heads: one for each KV head, or more of a single one whose keys
    hold the values."""
    if not spec.v_in_k:
        return num_kv_heads
    assert num_kv_heads == 1, "keys that hold the values are those of all heads"
    return next(
        number
        for number in range(1, num_heads + 1)
        if num_heads % number == 0 and num_heads // number <= _MOST_HEADS
    )


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Memory through which the KV splits of an output are merged. One launch at a time may use
    it."""

    accs: Tensor  # float32: partial outputs of each split
    peaks: Tensor  # float32: running maxima of its queries
    totals: Tensor  # float32: their denominators
    semaphores: Tensor  # int32, one an output, zero between launches

    @classmethod
    def allocate(
        cls, *, num_accs: int, num_stats: int, num_semaphores: int, device: torch.device
    ) -> SplitWorkspace:
        return cls(
            accs=torch.empty(num_accs, dtype=torch.float32, device=device),
            peaks=torch.empty(num_stats, dtype=torch.float32, device=device),
            totals=torch.empty(num_stats, dtype=torch.float32, device=device),
            semaphores=torch.zeros(num_semaphores, dtype=torch.int32, device=device),
        )

    def holds(self, *, num_accs: int, num_stats: int, num_semaphores: int) -> bool:
        """Whether there is room for so many."""
        return (
            num_accs <= self.accs.numel()
            and num_stats <= self.peaks.numel()
            and num_semaphores <= self.semaphores.numel()
        )


@triton.jit
def load_pages(
    table,
    start,
    end,
    page_size: tl.constexpr,
    in_page: tl.constexpr,
    block_n: tl.constexpr,
):
    """The pages of the tile at `start`: one if each tile lies within a page, else one per key."""
    if in_page:
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
    in_page: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """[block_n, block_d] int64: offsets of the tile at `start` in a cache with `row_size` a
    token."""
    lanes = tl.arange(0, block_n)
    if in_page:
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
def to_multiply(query, scale, fp8: tl.constexpr):
    """The query, [rows, dims], and the scale of its scores, as the loops over the keys take them.
    With a cache in FP8 the scale becomes one a row.

    The tensor cores have no product of a query in half precision and e4m3. e4m3 is converted to
    float16, which holds it and takes one instruction for two elements; to bfloat16 it would take
    four. A query in bfloat16 becomes float16, too, each row multiplied by a power of two that
    brings its largest element to 2^13 or more. That is exact down to 2^-28 of the largest.
    """
    if fp8:
        power = tl.full((query.shape[0],), 1.0, tl.float32)
        if query.dtype == tl.bfloat16:
            wide = query.to(tl.float32)
            power, inverse = _power_of_two(tl.max(tl.abs(wide), 1))
            query = (wide * inverse[:, None] * 8192.0).to(tl.float16)
            scale /= 8192.0
        return query, power * scale
    else:
        return query, scale


@triton.jit
def both_to_multiply(query, tail, scale, fp8: tl.constexpr):
    """As to_multiply, of queries in two parts: (query, tail, scale)."""
    if fp8:
        power = tl.full((query.shape[0],), 1.0, tl.float32)
        if query.dtype == tl.bfloat16:
            wide, wide_tail = query.to(tl.float32), tail.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(wide), 1), tl.max(tl.abs(wide_tail), 1))
            power, inverse = _power_of_two(largest)
            query = (wide * inverse[:, None] * 8192.0).to(tl.float16)
            tail = (wide_tail * inverse[:, None] * 8192.0).to(tl.float16)
            scale /= 8192.0
        return query, tail, power * scale
    else:
        return query, tail, scale


@triton.jit
def _power_of_two(largest):
    """The power of two of `largest`, and its inverse, by their exponents: from 2^-60, for the scale
    not to become 0, to 2^126."""
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 67), 253)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    return power, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def capped(exponents, softcap):
    """softcap · tanh(exponents / softcap), both in powers of two. Of 1 - 2 / (e^2x + 1), which is
    tanh x, the error is one of float32 near 1."""
    return softcap - 2.0 * softcap / (1.0 + tl.exp2(exponents * (2.0 * LOG2_E / softcap)))


@triton.jit
def fold(scores, visible, scale, softcap, peak, fp8: tl.constexpr):
    """The update of an online softmax by a tile of q · k: (weights of the tile, decay of all
    earlier ones, running maximum). The scale, which is fused into the subtraction, must be
    positive. visible: bool, of the scores; None: all.

    With FP8, where it is one a row, the running maximum stays 14 behind: weights of up to 2^14 make
    full use of float16, and it does not matter to a softmax what its exponents are relative to."""
    if softcap is not None:
        scores = capped(scores * (scale[:, None] if fp8 else scale), softcap)
        scale = tl.full((scores.shape[0],), 1.0, tl.float32) if fp8 else 1.0
    if visible is not None:
        scores = tl.where(visible, scores, -float("inf"))
    higher = tl.max(scores, 1) * scale
    if fp8:
        higher = tl.maximum(peak, higher - 14.0)
        scores = scores * scale[:, None]
        return tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher), higher
    else:
        higher = tl.maximum(peak, higher)
        return tl.exp2(scores * scale - higher[:, None]), tl.exp2(peak - higher), higher


@triton.jit
def add_sinks(acc, peak, total, sinks):
    """(acc [rows, dims], peak, total) of an online softmax to which each row's sink is added.
    sinks: [rows], natural logits; -inf adds nothing."""
    sinks *= LOG2_E
    higher = tl.maximum(peak, sinks)
    decay = tl.exp2(peak - higher)
    return acc * decay[:, None], higher, total * decay + tl.exp2(sinks - higher)
