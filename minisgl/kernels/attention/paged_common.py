"""What the callers of the paged attention kernels share: paged_decode.py, for rows of one token or
runs of a few, and paged_prefill.py, for chunks. Their loop over tiles of keys is tile_loop.py.

All are FlashAttention (Dao, "FlashAttention-2", 2023): an online softmax in float32 over tiles of
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
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from minisgl.config import AttentionSpec, KVScales
from minisgl.kernels.attention.tile_loop import LOG2_E, padded
from minisgl.kernels.tuning import DecodeTiles, PrefillTiles

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
class Sizes:
    """What a kernel is compiled for. These are fields, and not properties, because Triton's cache
    of compiled kernels knows this argument by its repr."""

    num_kv_heads: int
    num_groups: int
    group: int  # query heads of each
    run: int  # tokens of a decode row
    searched: int  # rows or chunks that a program looks through for its own, or more
    head_dim: int
    key_dim: int  # without the tail
    v_head_dim: int
    block_v: int  # v_head_dim in a tile
    block_m: int  # queries in a tile
    block_n: int  # keys in a tile
    stages: int  # tiles in flight
    page_size: int
    in_page: bool  # whether each tile lies within a page
    fp8: bool
    paired: bool  # whether FP8 is loaded as pairs of dimensions: see tile_loop.in_parts

    @classmethod
    def of(
        cls,
        num_heads: int,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        tiles: DecodeTiles | PrefillTiles,
        *,
        searched: int,
        run: int = 1,
    ) -> Sizes:
        _, page_size, num_kv_heads, head_dim = k.shape
        number = num_groups(num_heads, num_kv_heads, spec)
        group = num_heads // number
        fp8 = k.dtype == torch.float8_e4m3fn
        paired = fp8 and isinstance(tiles, DecodeTiles)
        return cls(
            num_kv_heads=num_kv_heads,
            num_groups=number,
            group=group,
            run=run,
            searched=triton.next_power_of_2(searched),
            head_dim=head_dim,
            key_dim=v.shape[3] if spec.v_in_k else head_dim,
            v_head_dim=v.shape[3],
            block_v=padded(v.shape[3], paired),
            # The tensor cores multiply 16 rows at least.
            block_m=tiles.block_m
            if isinstance(tiles, PrefillTiles)
            else max(16, triton.next_power_of_2(run * group)),
            block_n=tiles.block_n,
            stages=tiles.num_stages,
            page_size=page_size,
            # With a window, tiles begin with it, and not at multiples of their size.
            in_page=spec.window is None and page_size % tiles.block_n == 0,
            fp8=fp8,
            paired=paired,
        )


class Scoring(NamedTuple):
    """How scores become weights, and values a result."""

    scale: float  # of scores, in powers of two
    v_scale: float | None  # of values in FP8
    softcap: float | None  # in powers of two
    sinks: Tensor | None  # [num_heads] float32

    @classmethod
    def of(cls, spec: AttentionSpec, scales: KVScales, sinks: Tensor | None, k: Tensor) -> Scoring:
        assert spec.sinks == (sinks is not None) and (sinks is None or sinks.is_contiguous())
        return cls(
            scale=spec.scale * scales.k * LOG2_E.value,
            v_scale=scales.v if k.dtype == torch.float8_e4m3fn else None,
            softcap=None if spec.softcap is None else spec.softcap * LOG2_E.value,
            sinks=sinks,
        )


class Tensors(NamedTuple):
    """What a kernel reads and writes."""

    out: Tensor
    q: Tensor
    q_stride: int
    k: Tensor
    v: Tensor | None  # None: the keys hold the values


class SplitWorkspace(NamedTuple):
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
