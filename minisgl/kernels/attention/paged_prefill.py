"""Paged attention of chunks in Triton; see paged_common.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.config import UNSCALED, AttentionSpec, KVScales
from minisgl.kernels.attention.paged_common import (
    LOG2_E,
    LOOKED_THROUGH,
    LOWEST,
    SplitWorkspace,
    add_sinks,
    both_to_multiply,
    fold,
    in_cache,
    load_pages,
    num_groups,
    offsets_of,
    to_multiply,
)
from minisgl.kernels.inlined import arrive
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.tuning import PrefillTiles

# Of a step whose keys are split: one warp finds the split of a program.
MOST_SPLIT_CHUNKS = 32


def paged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    row_starts: Tensor,
    ends: Tensor,
    *,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    tiles: PrefillTiles,
    target_splits: int = 0,
    workspace: SplitWorkspace | None = None,
    scales: KVScales = UNSCALED,
    pdl: bool = True,
) -> Tensor:
    """Causal attention from the rows of chunks to the cache, which holds their K and V.

    q: [num_rows, num_heads, head_dim]; k and v: [num_pages, page_size, num_kv_heads, width]
    contiguous, of q's dtype, or float8_e4m3fn with these `scales`; sinks: [num_heads] float32, if
    the spec has them; the others as in PrefillBatch. v may be a view of the first numbers of k, if
    the spec says so. Returns a new tensor, [num_rows, num_heads,
    width of v]; rows of no chunk are neither read nor written.

    With `target_splits`, for up to MOST_SPLIT_CHUNKS chunks, the keys of long ones are divided into
    splits of about equal size, up to so many in all and of `tiles.min_split` keys or more; the
    first tokens of a chunk, which see fewer keys than the last, may have splits of half of that.
    The workspace must have the room that `split_room` gives.
    """
    num_rows, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k.shape[1:3]
    v_head_dim = v.shape[3]
    num_chunks = ends.shape[0]
    num_kv_heads = num_groups(num_heads, num_kv_heads, spec)
    group = num_heads // num_kv_heads
    assert k.is_contiguous() and q.stride()[1:] == (head_dim, 1)
    assert spec.v_in_k or v.is_contiguous()
    assert page_table.stride(1) == 1 and row_starts.stride(0) == ends.stride(0) == 1
    assert spec.sinks == (sinks is not None) and (sinks is None or sinks.is_contiguous())
    block_chunks = max(LOOKED_THROUGH, triton.next_power_of_2(num_chunks))
    if target_splits:
        assert num_chunks <= MOST_SPLIT_CHUNKS
        block_chunks = MOST_SPLIT_CHUNKS
        assert workspace is not None and workspace.holds(
            **split_room(target_splits, num_kv_heads, v_head_dim, tiles)
        )
    parts = workspace if target_splits else None
    out = torch.empty((num_rows, num_heads, v_head_dim), dtype=q.dtype, device=q.device)
    if num_rows == 0 or num_chunks == 0:
        return out
    num_items = num_rows // (tiles.block_m // group) + num_chunks
    _prefill_kernel[(num_kv_heads, num_items + target_splits)](
        out,
        q,
        k,
        None if spec.v_in_k else v,
        page_table,
        row_starts,
        ends,
        *((parts.accs, parts.peaks, parts.totals, parts.semaphores) if parts else (None,) * 4),
        num_chunks,
        target_splits if parts else None,
        max(tiles.min_split, target_splits) if parts else None,  # see _find_split
        q.stride(0),
        page_table.stride(0),
        spec.scale * scales.k * LOG2_E.value,
        scales.v if k.dtype == torch.float8_e4m3fn else None,
        spec.window,
        None if spec.softcap is None else spec.softcap * LOG2_E.value,
        sinks,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_size=page_size,
        block_chunks=block_chunks,
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        # Of the tail, where the values are the first numbers of the keys.
        block_d=max(16, triton.next_power_of_2(head_dim - (v_head_dim if spec.v_in_k else 0))),
        block_v=max(16, triton.next_power_of_2(v_head_dim)),
        stages=tiles.num_stages,
        num_warps=tiles.num_warps,
        **pdl_options(q.device, pdl),
    )
    return out


def split_room(
    target_splits: int, num_kv_heads: int, v_head_dim: int, tiles: PrefillTiles
) -> dict[str, int]:
    """The sizes of the workspace for up to so many splits, whatever their chunks, as
    SplitWorkspace.allocate takes them."""
    num_tiles = target_splits * num_kv_heads
    num_stats = num_tiles * tiles.block_m
    return {
        "num_accs": num_stats * v_head_dim,
        "num_stats": num_stats,
        "num_semaphores": num_tiles,
    }


@triton.jit(
    do_not_specialize=["num_chunks", "target_splits", "min_split", "table_stride", "window"],
    do_not_specialize_on_alignment=["page_table", "row_starts", "ends"],
)
def _prefill_kernel(
    out,
    q,
    k,
    v,
    page_table,
    row_starts,
    ends,
    accs,
    peaks,
    totals,
    semaphores,
    num_chunks,
    target_splits,
    min_split,
    q_stride,
    table_stride,
    scale,
    v_scale,
    window,
    softcap,
    sinks,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_chunks: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_v: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program: a KV head of up to block_m // group tokens of a chunk. The rows of its tile are
    pairs of a token and a head of the group, so that short chunks fill it and long ones mask
    little.

    Chunk c, whose rows begin at s, has the work items from s // tokens + c on, which are enough for
    any s; so a chunk is found without a sum over the items of earlier chunks. Its last tokens come
    first: they see most keys, and the last programs to run should be short.

    With a window the tiles of keys begin with the first key that a token of the item sees. Those
    that a later token sees only in part are masked, like those on the diagonal.

    Where the keys hold the values, `block_d` is the width of the tail alone.

    With a workspace a program has one split of the keys of an item, which it finds by such sums
    (_find_split). The splits of an item are equal in whole tiles, and the last one has those on the
    diagonal, too. The last program to finish merges them.
    """
    kv_head, item = tl.program_id(0), tl.program_id(1)
    most_tokens: tl.constexpr = block_m // group
    if accs is None:
        chunks = tl.arange(0, block_chunks)
        first_items = tl.load(row_starts + chunks, chunks < num_chunks, 0) // most_tokens + chunks
        chunk = tl.sum(((first_items <= item) & (chunks < num_chunks)).to(tl.int32)) - 1
        first_row, end_row = tl.load(row_starts + chunk), tl.load(row_starts + chunk + 1)
        end = tl.load(ends + chunk)
    else:
        chunk, item, first_slot, split_size = _find_split(
            row_starts, ends, item, num_chunks, target_splits, min_split, window, most_tokens,
            block_chunks,
        )  # fmt: skip
        live = chunk < num_chunks  # otherwise there is no token left
        first_row = tl.load(row_starts + chunk, live, 0)
        end_row = tl.load(row_starts + chunk + 1, live, 0)
        end = tl.load(ends + chunk, live, 0)
    if pdl:  # for q, k and v, and for the last reader of `out`; also programs without tokens wait
        tl.extra.cuda.gdc_wait()
    if accs is None:
        first_item = first_row // most_tokens + chunk
        left = tl.cdiv(end_row - first_row, most_tokens) - 1 - (item - first_item)
    else:
        most_splits = _num_splits(_most_visible(end, window, most_tokens), split_size)
        split = item % most_splits
        left = tl.cdiv(end_row - first_row, most_tokens) - 1 - item // most_splits
        slot = first_slot + item - split  # of the item's first split
    if left < 0:
        return
    first_token = left * most_tokens
    num_tokens = tl.minimum(end_row - first_row - first_token, most_tokens)
    position = end - (end_row - first_row) + first_token
    begin = 0 if window is None else tl.maximum(position + 1 - window, 0)
    if accs is not None:
        num_tiles = (position + 1 - begin) // block_n  # before the diagonal
        num_splits = tl.cdiv(num_tiles * block_n, split_size)
        num_splits = tl.maximum(tl.minimum(num_splits, most_splits), 1)
        if split >= num_splits:
            return

    pairs = tl.arange(0, block_m)
    block_k: tl.constexpr = block_v if v is None else block_d  # without a tail
    dims, v_dims = tl.arange(0, block_k), tl.arange(0, block_v)
    tokens = pairs // group
    heads = kv_head * group + pairs % group
    rows = (first_row + first_token).to(tl.int64) + tokens
    key_dim: tl.constexpr = v_head_dim if v is None else head_dim  # without a tail
    real = (tokens < num_tokens)[:, None] & (dims < key_dim)[None, :]
    within = heads[:, None] * head_dim + dims[None, :]
    query = tl.load(q + (rows * q_stride)[:, None] + within, real, 0.0)
    v_real = (tokens < num_tokens)[:, None] & (v_dims < v_head_dim)[None, :]
    v_within = heads[:, None] * v_head_dim + v_dims[None, :]
    fp8: tl.constexpr = v_scale is not None
    tail = None
    if v is None:
        tails = key_dim + tl.arange(0, block_d)
        in_tail = (tokens < num_tokens)[:, None] & (tails < head_dim)[None, :]
        within = heads[:, None] * head_dim + tails[None, :]
        tail = tl.load(q + (rows * q_stride)[:, None] + within, in_tail, 0.0)
        query, tail, scale = both_to_multiply(query, tail, scale, fp8)
    else:
        query, scale = to_multiply(query, scale, fp8)

    table = page_table + chunk * table_stride
    if v is not None:
        k += kv_head * head_dim
        v += kv_head * v_head_dim
    acc = tl.zeros((block_m, block_v), tl.float32)
    peak = tl.full((block_m,), LOWEST, tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    # First the tiles of which every token sees all keys, then those on the diagonal.
    diagonal = begin + (position + 1 - begin) // block_n * block_n
    if accs is not None:
        first = begin + num_tiles * split // num_splits * block_n
        stop = begin + num_tiles * (split + 1) // num_splits * block_n
        end = tl.where(split == num_splits - 1, position + num_tokens, diagonal)
    else:
        first, stop = begin, diagonal
    if window is not None:  # before both, the tiles on the other edge
        last_begin = tl.maximum(position + num_tokens - window, 0)
        whole = begin + tl.cdiv(last_begin - begin, block_n) * block_n
        acc, peak, total = _attend_tiles(
            acc, peak, total, query, tail, position + tokens, k, v, table,
            first, tl.minimum(whole, stop), window, scale, softcap,
            num_kv_heads, head_dim, v_head_dim, page_size, block_n, block_d, block_v, True, fp8,
            stages,
        )  # fmt: skip
        first = tl.maximum(first, whole)
    acc, peak, total = _attend_tiles(
        acc, peak, total, query, tail, position + tokens, k, v, table,
        first, stop, window, scale, softcap,
        num_kv_heads, head_dim, v_head_dim, page_size, block_n, block_d, block_v, False, fp8,
        stages,
    )  # fmt: skip
    acc, peak, total = _attend_tiles(
        acc, peak, total, query, tail, position + tokens, k, v, table,
        diagonal, position + num_tokens if accs is None else end, window, scale, softcap,
        num_kv_heads, head_dim, v_head_dim, page_size, block_n, block_d, block_v, True, fp8,
        stages,
    )  # fmt: skip
    if sinks is not None:
        sink = tl.load(sinks + heads)
        if accs is not None:
            sink = tl.where(split == 0, sink, -float("inf"))
        acc, peak, total = add_sinks(acc, peak, total, sink)
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    if accs is not None:  # noqa: SIM102 (when compiled, the other when run)
        if num_splits > 1:
            mine = (slot + split) * num_kv_heads + kv_head
            lanes = pairs[:, None] * v_head_dim + v_dims[None, :]
            tl.store(accs + mine * (block_m * v_head_dim) + lanes, acc, mask=v_real)
            tl.store(peaks + mine * block_m + pairs, peak)
            tl.store(totals + mine * block_m + pairs, total)
            first_place = slot * num_kv_heads + kv_head
            if arrive(semaphores, first_place) < num_splits - 1:
                return
            tl.store(semaphores + first_place, 0)  # for the next launch
            acc, total = _merge(
                accs, peaks, totals, first_place, num_splits, v_real,
                num_kv_heads, v_head_dim, block_m, block_v,
            )  # fmt: skip
    result = out + (rows * (num_kv_heads * group * v_head_dim))[:, None] + v_within
    if fp8:
        acc *= v_scale
    tl.store(result, acc / total[:, None], mask=v_real)


@triton.jit
def _find_split(
    row_starts,
    ends,
    unit,
    num_chunks,
    target_splits,
    min_split,
    window,
    most_tokens: tl.constexpr,
    block_chunks: tl.constexpr,
):
    """(chunk of `unit`, num_chunks or more if there is none; number of `unit` in the chunk; slot of
    the chunk's first unit in the workspace; keys in a split).

    Units, one a program, are numbered chunk by chunk, and within a chunk item by item, with as many
    for each. Only chunks that are split have slots. With K keys of all items these are at most
    K // split_size, which is no more than target_splits: K < target_splits * (split_size + 1), and
    split_size >= min_split >= target_splits.
    """
    chunks = tl.arange(0, block_chunks)
    real = chunks < num_chunks
    first_rows = tl.load(row_starts + chunks, real, 0)
    num_items = tl.cdiv(tl.load(row_starts + chunks + 1, real, 0) - first_rows, most_tokens)
    numbers = _most_visible(tl.load(ends + chunks, real, 0), window, most_tokens)
    split_size = tl.maximum(tl.sum(num_items * numbers) // target_splits, min_split)
    splits = _num_splits(numbers, split_size)
    units = num_items * splits
    stops = tl.cumsum(units)
    before = stops <= unit
    chunk = tl.sum(before.to(tl.int32))
    first_unit = tl.max(tl.where(before, stops, 0))
    first_slot = tl.sum(tl.where(before & (splits > 1), units, 0))
    return chunk, unit - first_unit, first_slot, split_size


@triton.jit
def _most_visible(end, window, most_tokens: tl.constexpr):
    """Most keys that the tokens of an item see in a chunk that ends at `end`."""
    if window is None:
        return end
    else:
        return tl.minimum(end, window + (most_tokens - 1))


@triton.jit
def _num_splits(num_keys, split_size):
    """Most KV splits of an item that sees so many keys. Rounded down: one program more than the SMs
    hold would take as long as all others."""
    return tl.maximum(num_keys // split_size, 1)


@triton.jit
def _merge(
    accs,
    peaks,
    totals,
    first_place,
    num_splits,
    real,
    num_kv_heads: tl.constexpr,
    v_head_dim: tl.constexpr,
    block_m: tl.constexpr,
    block_v: tl.constexpr,
):
    """(acc [block_m, block_v], total [block_m]) of all splits of an item, added in their order."""
    pairs, dims = tl.arange(0, block_m), tl.arange(0, block_v)
    acc = tl.zeros((block_m, block_v), tl.float32)
    peak = tl.full((block_m,), LOWEST, tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    for split in tl.range(0, num_splits, num_stages=1):
        place = first_place + split * num_kv_heads
        lanes = pairs[:, None] * v_head_dim + dims[None, :]
        some_acc = tl.load(accs + place * (block_m * v_head_dim) + lanes, real, 0.0)
        some_peak = tl.load(peaks + place * block_m + pairs)
        some_total = tl.load(totals + place * block_m + pairs)
        higher = tl.maximum(peak, some_peak)
        decay, weight = tl.exp2(peak - higher), tl.exp2(some_peak - higher)
        acc = acc * decay[:, None] + some_acc * weight[:, None]
        total = total * decay + some_total * weight
        peak = higher
    return acc, total


@triton.jit
def _attend_tiles(
    acc,
    peak,
    total,
    query,
    tail,
    positions,
    k,
    v,
    table,
    first,
    end,
    window,
    scale,
    softcap,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_v: tl.constexpr,
    masked: tl.constexpr,
    fp8: tl.constexpr,
    stages: tl.constexpr,
):
    """Adds keys first..end to acc [block_m, block_v], peak and total [block_m]. Unless `masked`,
    they are whole tiles, and every query sees all of them."""
    row_size: tl.constexpr = head_dim if v is None else num_kv_heads * head_dim
    key_dim: tl.constexpr = v_head_dim if v is None else head_dim
    block_k: tl.constexpr = block_v if v is None else block_d
    v_row_size: tl.constexpr = num_kv_heads * v_head_dim
    # With a window, tiles do not begin at multiples of their size.
    in_page: tl.constexpr = window is None and page_size % block_n == 0
    pages = load_pages(table, first, end, page_size, in_page, block_n)
    for start in tl.range(first, end, block_n, num_stages=stages):
        offsets = offsets_of(pages, start, row_size, page_size, in_page, block_n, block_k)
        if v is None:
            v_offsets = offsets_of(pages, start, row_size, page_size, in_page, block_n, block_d)
        else:
            v_offsets = offsets_of(pages, start, v_row_size, page_size, in_page, block_n, block_v)
        # One tile ahead, so that no load of keys waits for a load of pages.
        pages = load_pages(table, start + block_n, end, page_size, in_page, block_n)
        keys = start + tl.arange(0, block_n)
        if masked or key_dim != block_k:
            tile = tl.load(k + offsets, in_cache(keys, end, key_dim, block_k), 0.0)
        else:
            tile = tl.load(k + offsets)
        if v is None:
            in_tail = in_cache(keys, end, head_dim - key_dim, block_d)
            tails = tl.load(k + key_dim + v_offsets, in_tail, 0.0).to(query.dtype)
            tile = tile.to(query.dtype)
            values = tile
        else:
            if masked or v_head_dim != block_v:
                values = tl.load(v + v_offsets, in_cache(keys, end, v_head_dim, block_v), 0.0)
            else:
                values = tl.load(v + v_offsets)
            tile, values = tile.to(query.dtype), values.to(query.dtype)
        scores = tl.dot(query, tl.trans(tile), input_precision="ieee")
        if v is None:
            scores = tl.dot(tail, tl.trans(tails), scores, input_precision="ieee")
        visible = None
        if masked:
            if window is None:
                visible = keys[None, :] <= positions[:, None]
            else:  # from 0 on, and below the window: one comparison of unsigned numbers
                distances = positions[:, None] - keys[None, :]
                visible = distances.to(tl.uint32, bitcast=True) < window.to(tl.uint32)
        weights, decay, peak = fold(scores, visible, scale, softcap, peak, fp8)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
    return acc, peak, total
