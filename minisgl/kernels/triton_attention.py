"""Paged attention in Triton: one kernel for decode rows, one for chunks.

Both are FlashAttention (Dao, "FlashAttention-2", 2023): an online softmax in float32 over tiles of
keys, in powers of two, with log2(e) folded into the scale. Decode splits the keys of a row over
programs (Dao et al., "Flash-Decoding", 2023). A *group* is the query heads that share a KV head;
one program serves a whole group, so that it reads K and V once.

Nothing here waits for the device. The cache is [num_pages, page_size, num_kv_heads, head_dim],
contiguous. What lies past a row's end is not read, neither in the page table nor in the cache.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
# The peak of scores where all may be masked: from -inf the difference to -inf is not a number.
_LOWEST = tl.constexpr(-3.0e38)


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How a program of decode works."""

    block_n: int  # keys in a tile
    num_warps: int
    num_stages: int  # tiles in flight, the one at work included
    use_dot: bool  # tensor cores; without: CUDA cores, for groups of one and two
    min_share: int  # keys under which a row is not split any further


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How a program of prefill works."""

    block_m: int  # pairs of a token and a head
    block_n: int  # keys in a tile
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Where the splits of a row leave what they have, for the last of them to merge.

    One launch at a time may use it. `arrivals` is zero between launches.
    """

    accs: Tensor  # [num_partials * group * head_dim] float32
    peaks: Tensor  # [num_partials * group] float32, and so the next
    totals: Tensor
    arrivals: Tensor  # [num_rows * num_kv_heads] int32

    @classmethod
    def allocate(
        cls, *, num_accs: int, num_stats: int, num_arrivals: int, device: torch.device
    ) -> DecodeWorkspace:
        return cls(
            accs=torch.empty(num_accs, dtype=torch.float32, device=device),
            peaks=torch.empty(num_stats, dtype=torch.float32, device=device),
            totals=torch.empty(num_stats, dtype=torch.float32, device=device),
            arrivals=torch.zeros(num_arrivals, dtype=torch.int32, device=device),
        )


def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    num_splits: int,
    workspace: DecodeWorkspace,
    tiles: DecodeTiles,
) -> Tensor:
    """q: [num_rows, num_heads, head_dim]; page_table: [num_rows, max_pages] int32, and lengths:
    [num_rows] int32, on the device. Returns the shape of q; rows of length 0 are zeros.

    The workspace has room for num_rows * num_kv_heads * num_splits partials. The grid depends on
    shapes and `num_splits` alone, so that a CUDA graph of it is good for any lengths.
    """
    num_rows, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    assert k.is_contiguous() and v.is_contiguous() and q.stride()[1:] == (head_dim, 1)
    assert page_table.stride(1) == 1 and lengths.stride(0) == 1
    assert tiles.use_dot or group <= 2
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    _decode_kernel[(num_kv_heads, num_rows, num_splits)](
        out,
        q,
        k,
        v,
        page_table,
        lengths,
        workspace.accs,
        workspace.peaks,
        workspace.totals,
        workspace.arrivals,
        q.stride(0),
        page_table.stride(0),
        scale * _LOG2_E,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        min_share=tiles.min_share,
        # The tensor cores multiply no fewer than 16 rows at a time.
        block_h=max(16, triton.next_power_of_2(group)) if tiles.use_dot else group,
        block_n=tiles.block_n,
        block_d=max(16, triton.next_power_of_2(head_dim)),
        use_dot=tiles.use_dot,
        stages=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    return out


def paged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    work: Tensor,
    *,
    scale: float,
    tiles: PrefillTiles,
) -> Tensor:
    """q: [num_rows, num_heads, head_dim], chunks one behind the other; page_table: [num_chunks,
    max_pages] int32. Returns the shape of q.

    work: [num_items, 4] int32 on the device. An item is up to block_m // group tokens of a chunk:
    the chunk, the first token's row in q and its position, the number of tokens.
    """
    _, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    assert k.is_contiguous() and v.is_contiguous() and q.stride()[1:] == (head_dim, 1)
    assert page_table.stride(1) == 1 and work.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(work) == 0:
        return out
    _prefill_kernel[(num_kv_heads, len(work))](
        out,
        q,
        k,
        v,
        page_table,
        work,
        q.stride(0),
        page_table.stride(0),
        scale * _LOG2_E,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_d=max(16, triton.next_power_of_2(head_dim)),
        stages=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    return out


# -- keys and pages --------------------------------------------------------------------------------


@triton.jit
def _load_pages(
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
) -> tl.tensor:
    """The pages of the tile at `start`: one where a tile lies within a page, else one per key."""
    if page_size % block_n == 0:
        return tl.load(table + start // page_size, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, block_n)
        return tl.load(table + keys // page_size, mask=keys < end, other=0)


@triton.jit
def _offsets(
    pages: tl.tensor,
    start: tl.tensor,
    row_size: tl.constexpr,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
) -> tl.tensor:
    """[block_n, block_d] int64: where the tile at `start` lies in a cache of `row_size` a token."""
    lanes = tl.arange(0, block_n)
    if page_size % block_n == 0:
        slots = pages.to(tl.int64) * page_size + (start % page_size + lanes)
    else:
        slots = pages.to(tl.int64) * page_size + (start + lanes) % page_size
    return slots[:, None] * row_size + tl.arange(0, block_d)[None, :]


@triton.jit
def _in_cache(
    keys: tl.tensor, end: tl.tensor, head_dim: tl.constexpr, block_d: tl.constexpr
) -> tl.tensor:
    """[block_n, block_d or 1]: what of a tile may be loaded."""
    live = (keys < end)[:, None]
    if head_dim == block_d:
        return live
    else:
        return live & (tl.arange(0, block_d) < head_dim)[None, :]


# -- decode ----------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_table", "lengths"]
)
def _decode_kernel(
    out: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    page_table: tl.tensor,
    lengths: tl.tensor,
    accs: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    arrivals: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    min_share: tl.constexpr,
    block_h: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    use_dot: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """One program: a KV head of a row, with its group, over one share of the row's keys.

    KV heads are neighbours in the grid as they are in memory. The row's length says into how many
    shares it falls; programs past these leave. The last program to arrive merges them, which costs
    less than a second launch where a step is short, and a row of one share needs no merging.
    """
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    wanted = tl.minimum(tl.num_programs(2), tl.cdiv(length, min_share))
    share = tl.cdiv(tl.cdiv(length, tl.maximum(wanted, 1)), block_n) * block_n
    first = split * share
    if (split > 0) & (first >= length):
        return
    end = tl.minimum(first + share, length)

    heads, dims = tl.arange(0, block_h), tl.arange(0, block_d)
    table = page_table + row * table_stride
    queries = q + row.to(tl.int64) * q_stride + kv_head * group * head_dim
    k += kv_head * head_dim
    v += kv_head * head_dim
    row_size: tl.constexpr = num_kv_heads * head_dim
    if use_dot:
        acc, peak, total = _attend_by_dot(
            queries, k, v, table, first, end, scale,
            group, head_dim, row_size, page_size, block_h, block_n, block_d, stages,
        )  # fmt: skip
    else:
        acc, peak, total = _attend_by_lane(
            queries, k, v, table, first, end, scale,
            group, head_dim, row_size, page_size, block_n, block_d, stages,
        )  # fmt: skip

    real = (heads < group)[:, None] & (dims < head_dim)[None, :]
    within = heads[:, None] * head_dim + dims[None, :]  # a group's [head, dim]
    item = row * num_kv_heads + kv_head
    result = out + item.to(tl.int64) * group * head_dim + within
    count = tl.maximum(tl.cdiv(length, tl.maximum(share, 1)), 1)
    if count == 1:
        tl.store(result, acc / tl.where(total > 0, total, 1.0)[:, None], mask=real)
        return

    partials = item * tl.num_programs(2)
    mine = partials + split
    tl.store(accs + mine * group * head_dim + within, acc, mask=real)
    tl.store(peaks + mine * group + heads, peak, mask=heads < group)
    tl.store(totals + mine * group + heads, total, mask=heads < group)
    # One thread does the atomic: the others' stores must come before it. It releases them, and
    # acquires those of the programs that came earlier.
    tl.debug_barrier()
    earlier = tl.atomic_add(arrivals + item, 1, sem="acq_rel", scope="gpu")
    if earlier == count - 1:
        tl.store(arrivals + item, 0)  # for the next launch
        acc = tl.zeros((block_h, block_d), tl.float32)
        peak = tl.full((block_h,), _LOWEST, tl.float32)
        total = tl.zeros((block_h,), tl.float32)
        for partial in tl.range(partials, partials + count, num_stages=4):
            stats = partial * group + heads
            its_peak = tl.load(peaks + stats, heads < group, 0.0)
            its_total = tl.load(totals + stats, heads < group, 0.0)
            its_acc = tl.load(accs + partial * group * head_dim + within, real, 0.0)
            higher = tl.maximum(peak, its_peak)
            decay, its_weight = tl.exp2(peak - higher), tl.exp2(its_peak - higher)
            acc = acc * decay[:, None] + its_acc * its_weight[:, None]
            total = total * decay + its_total * its_weight
            peak = higher
        tl.store(result, acc / tl.where(total > 0, total, 1.0)[:, None], mask=real)


@triton.jit
def _attend_by_dot(
    queries: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    row_size: tl.constexpr,
    page_size: tl.constexpr,
    block_h: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """On tensor cores, the group padded to block_h. Returns acc [block_h, block_d] unscaled, peak
    and total [block_h]."""
    heads, dims = tl.arange(0, block_h), tl.arange(0, block_d)
    real = (heads < group)[:, None] & (dims < head_dim)[None, :]
    query = tl.load(queries + heads[:, None] * head_dim + dims[None, :], real, 0.0)
    acc = tl.zeros((block_h, block_d), tl.float32)
    peak = tl.full((block_h,), _LOWEST, tl.float32)
    totals = tl.zeros((block_h, block_n), tl.float32)  # by lane: summed once, not in every tile
    pages = _load_pages(table, first, end, page_size, block_n)
    for start in tl.range(first, end, block_n, num_stages=stages):
        offsets = _offsets(pages, start, row_size, page_size, block_n, block_d)
        # A tile ahead, so that no load of keys waits for a load of pages.
        pages = _load_pages(table, start + block_n, end, page_size, block_n)
        keys = start + tl.arange(0, block_n)
        mask = _in_cache(keys, end, head_dim, block_d)
        tile = tl.load(k + offsets, mask, 0.0)
        scores = tl.dot(query, tl.trans(tile), input_precision="ieee") * scale
        scores = tl.where((keys < end)[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        decay, weights = tl.exp2(peak - higher), tl.exp2(scores - higher[:, None])
        tile = tl.load(v + offsets, mask, 0.0)
        acc = tl.dot(weights.to(tile.dtype), tile, acc * decay[:, None], input_precision="ieee")
        totals = totals * decay[:, None] + weights
        peak = higher
    return acc, peak, tl.sum(totals, 1)


@triton.jit
def _attend_by_lane(
    queries: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    row_size: tl.constexpr,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """On CUDA cores, for one head or two. Each of the block_n lanes has a softmax of its own over
    every block_n-th key, so that the warps exchange nothing before the end. Returns acc
    [group, block_d] unscaled, peak and total [group]."""
    dims = tl.arange(0, block_d)
    query_a = tl.load(queries + dims, dims < head_dim, 0.0).to(tl.float32) * scale
    query_b = query_a
    if group == 2:
        query_b = tl.load(queries + head_dim + dims, dims < head_dim, 0.0).to(tl.float32) * scale
    acc_a = tl.zeros((block_n, block_d), tl.float32)
    peak_a = tl.full((block_n,), _LOWEST, tl.float32)
    total_a = tl.zeros((block_n,), tl.float32)
    acc_b, peak_b, total_b = acc_a, peak_a, total_a
    pages = _load_pages(table, first, end, page_size, block_n)
    for start in tl.range(first, end, block_n, num_stages=stages):
        offsets = _offsets(pages, start, row_size, page_size, block_n, block_d)
        pages = _load_pages(table, start + block_n, end, page_size, block_n)
        live = start + tl.arange(0, block_n) < end
        mask = _in_cache(start + tl.arange(0, block_n), end, head_dim, block_d)
        keys = tl.load(k + offsets, mask, 0.0).to(tl.float32)
        values = tl.load(v + offsets, mask, 0.0).to(tl.float32)
        acc_a, peak_a, total_a = _fold_lanes(acc_a, peak_a, total_a, query_a, keys, values, live)
        if group == 2:
            acc_b, peak_b, total_b = _fold_lanes(
                acc_b, peak_b, total_b, query_b, keys, values, live
            )
    acc, peak, total = _merge_lanes(acc_a, peak_a, total_a)
    acc, peak, total = acc[None, :], peak[None], total[None]
    if group == 2:
        other_acc, other_peak, other_total = _merge_lanes(acc_b, peak_b, total_b)
        second = tl.arange(0, 2) == 1
        acc = tl.where(second[:, None], other_acc[None, :], acc)
        peak = tl.where(second, other_peak, peak)
        total = tl.where(second, other_total, total)
    return acc, peak, total


@triton.jit
def _fold_lanes(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    live: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One key and value into each lane: acc [lanes, dims], peak and total [lanes]."""
    scores = tl.where(live, tl.sum(keys * query[None, :], 1), -float("inf"))
    higher = tl.maximum(peak, scores)
    decay, weights = tl.exp2(peak - higher), tl.exp2(scores - higher)
    return acc * decay[:, None] + weights[:, None] * values, higher, total * decay + weights


@triton.jit
def _merge_lanes(
    acc: tl.tensor, peak: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    highest = tl.max(peak, 0)
    weights = tl.exp2(peak - highest)
    return tl.sum(acc * weights[:, None], 0), highest, tl.sum(total * weights, 0)


# -- prefill ---------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_table", "work"]
)
def _prefill_kernel(
    out: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    page_table: tl.tensor,
    work: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """One program: a KV head of one item of work. The rows of its tile are pairs of a token and a
    head of the group, so that short chunks fill it too, and long ones mask little."""
    kv_head, item = tl.program_id(0), work + tl.program_id(1) * 4
    chunk, position = tl.load(item), tl.load(item + 2)
    row, num_tokens = tl.load(item + 1).to(tl.int64), tl.load(item + 3)

    pairs, dims = tl.arange(0, block_m), tl.arange(0, block_d)
    tokens = pairs // group
    heads = kv_head * group + pairs % group
    real = (tokens < num_tokens)[:, None] & (dims < head_dim)[None, :]
    within = heads[:, None] * head_dim + dims[None, :]
    query = tl.load(q + ((row + tokens) * q_stride)[:, None] + within, real, 0.0)

    table = page_table + chunk * table_stride
    k += kv_head * head_dim
    v += kv_head * head_dim
    row_size: tl.constexpr = num_kv_heads * head_dim
    acc = tl.zeros((block_m, block_d), tl.float32)
    peak = tl.full((block_m,), _LOWEST, tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    # Tiles that every token sees whole, then those on the diagonal.
    diagonal = (position + 1) // block_n * block_n
    acc, peak, total = _attend_tiles(
        acc, peak, total, query, position + tokens, k, v, table, 0, diagonal, scale,
        head_dim, row_size, page_size, block_n, block_d, False, stages,
    )  # fmt: skip
    acc, peak, total = _attend_tiles(
        acc, peak, total, query, position + tokens, k, v, table, diagonal, position + num_tokens,
        scale, head_dim, row_size, page_size, block_n, block_d, True, stages,
    )  # fmt: skip
    result = out + ((row + tokens) * (num_kv_heads * group * head_dim))[:, None] + within
    tl.store(result, acc / total[:, None], mask=real)


@triton.jit
def _attend_tiles(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    positions: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    head_dim: tl.constexpr,
    row_size: tl.constexpr,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    masked: tl.constexpr,
    stages: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys first..end into acc [block_m, block_d], peak and total [block_m]. Unless `masked`, they
    are whole tiles, and every query sees them all."""
    pages = _load_pages(table, first, end, page_size, block_n)
    for start in tl.range(first, end, block_n, num_stages=stages):
        offsets = _offsets(pages, start, row_size, page_size, block_n, block_d)
        # A tile ahead, so that no load of keys waits for a load of pages.
        pages = _load_pages(table, start + block_n, end, page_size, block_n)
        keys = start + tl.arange(0, block_n)
        if masked or head_dim != block_d:
            mask = _in_cache(keys, end, head_dim, block_d)
            tile, values = tl.load(k + offsets, mask, 0.0), tl.load(v + offsets, mask, 0.0)
        else:
            tile, values = tl.load(k + offsets), tl.load(v + offsets)
        scores = tl.dot(query, tl.trans(tile), input_precision="ieee") * scale
        if masked:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        decay, weights = tl.exp2(peak - higher), tl.exp2(scores - higher[:, None])
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        peak = higher
    return acc, peak, total
