"""Paged attention of decode rows in Triton; see paged_common.py."""

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
    capped,
    fold,
    in_cache,
    load_pages,
    num_groups,
    offsets_of,
    to_multiply,
)
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.inlined import arrive, to_stored, wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.tuning import DecodeTiles

# Elements in a tile of a merge; more would take more registers than the main loop needs.
_MERGED = 2048
_LEAST_MERGED = 128  # dimensions of a head in a program that merges only
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # without assembly


def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    target_splits: int,
    workspace: SplitWorkspace,
    tiles: DecodeTiles,
    norm_rope: NormRope | None = None,
    scales: KVScales = UNSCALED,
    pdl: bool = True,
    run: int = 1,
) -> Tensor:
    """Attends from one token of each row to all keys of the row.

    q: [num_rows, num_heads, head_dim]; k and v: [num_pages, page_size, num_kv_heads, width]
    contiguous, of q's dtype, or float8_e4m3fn with these `scales`; page_table: [num_rows,
    max_pages] int32; lengths: [num_rows] int32; sinks: [num_heads] float32, if the spec has them.
    v may be a view of the first numbers of k, if the spec says so; without `norm_rope` then.
    Returns a new tensor, [num_rows, num_heads, width of v]; rows of length 0 are zeros.

    With `norm_rope`, q is what dispatch.qk_norm_rope_store_kv takes, as [num_rows, num_heads + 2 *
    num_kv_heads, head_dim], or without v's heads where they are k's, and its work is done, too: a
    row's own token, the last of its length, is written to the cache. Rows of length 0 write
    nothing. K, q and normed v may differ from those of qk_norm_rope_store_kv in the last place, and
    rarely do. Keys and values are then of one width.

    run: rows of one request that follow each other, of which the first n have lengths that grow by
    1, and the others length 0. The first is read with all others of its run, so that keys and
    values are read once; of a run of n tokens, the page table of the last is used. Without windows
    and `norm_rope` only.

    The keys that the rows see are divided into about `target_splits` splits of equal size. Every
    row has at least one, so there are up to `target_splits + num_rows` work *items*, for which the
    workspace must have room.
    """
    num_rows, num_heads, head_dim = q.shape
    num_runs = num_rows // run
    page_size, num_kv_heads = k.shape[1:3]
    v_head_dim = v.shape[3]
    fp8 = k.dtype == torch.float8_e4m3fn
    if norm_rope is not None:
        num_heads = norm_rope.num_heads(num_heads, num_kv_heads)
        assert norm_rope.table.is_contiguous() and k.dtype == v.dtype and k.shape == v.shape
        assert (norm_rope.q_weight is None) == (norm_rope.k_weight is None)
        assert norm_rope.q_weight is not None or not norm_rope.norms_v
    num_kv_heads = num_groups(num_heads, num_kv_heads, spec)
    group = num_heads // num_kv_heads
    assert k.is_contiguous() and q.stride()[1:] == (head_dim, 1)
    assert norm_rope is None if spec.v_in_k else v.is_contiguous()
    assert page_table.stride(1) == 1 and lengths.stride(0) == 1
    assert spec.sinks == (sinks is not None) and (sinks is None or sinks.is_contiguous())
    out = torch.empty((num_rows, num_heads, v_head_dim), dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    assert run == 1 or (spec.window is None and norm_rope is None and num_runs * run == num_rows)
    block_g = triton.next_power_of_2(run * group)
    # The tensor cores multiply by no fewer columns at a time, which in FP8 are pairs.
    tail_or_all = head_dim - v_head_dim if spec.v_in_k else head_dim
    block_d, block_v = (
        max(32 if fp8 else 16, triton.next_power_of_2(width)) for width in (tail_or_all, v_head_dim)
    )
    _decode_kernel[(num_kv_heads, target_splits + num_runs)](
        out,
        q,
        k,
        None if spec.v_in_k else v,
        page_table,
        lengths,
        workspace.accs,
        workspace.peaks,
        workspace.totals,
        workspace.semaphores,
        *(norm_rope[:4] if norm_rope else (None, None, None, 0.0)),
        num_runs,
        target_splits,
        tiles.min_split,
        q.stride(0),
        page_table.stride(0),
        spec.scale * scales.k * LOG2_E.value,
        *((*scales.inverse, scales.v) if fp8 else (None, None, None)),
        spec.window,
        None if spec.softcap is None else spec.softcap * LOG2_E.value,
        sinks,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_size=page_size,
        norms_v=norm_rope is not None and norm_rope.norms_v,
        v_is_k=norm_rope is not None and norm_rope.v_is_k,
        run=run,
        block_rows=max(LOOKED_THROUGH, triton.next_power_of_2(num_runs)),
        block_h=max(16, block_g),  # the tensor cores multiply no fewer rows at a time
        block_g=block_g,
        block_n=tiles.block_n,
        block_d=block_d,
        block_v=block_v,
        block_s=max(1, _MERGED // (block_g * block_v)),
        stages=tiles.num_stages,
        num_warps=tiles.num_warps,
        **pdl_options(q.device, pdl),
    )
    if spec.v_in_k:
        merged_v = block_v
        while (
            merged_v > _LEAST_MERGED and num_rows * num_heads * block_v < target_splits * merged_v
        ):
            merged_v //= 2
        _merge_kernel[(num_rows, num_heads, triton.cdiv(v_head_dim, merged_v))](
            out,
            lengths,
            workspace.accs,
            workspace.peaks,
            workspace.totals,
            num_rows,
            target_splits,
            tiles.min_split,
            spec.window,
            num_heads=num_heads,
            v_head_dim=v_head_dim,
            block_rows=max(LOOKED_THROUGH, triton.next_power_of_2(num_rows)),
            block_n=tiles.block_n,
            block_v=merged_v,
            block_s=max(1, _MERGED // merged_v),
            num_warps=4,
            **pdl_options(q.device, pdl),
        )
    return out


@triton.jit(
    do_not_specialize=["num_rows", "target_splits", "min_split", "table_stride", "window"],
    do_not_specialize_on_alignment=["page_table", "lengths"],
)
def _decode_kernel(
    out,
    q,
    k,
    v,
    page_table,
    lengths,
    accs,
    peaks,
    totals,
    semaphores,
    rotary_table,
    q_weight,
    k_weight,
    eps,
    num_rows,
    target_splits,
    min_split,
    q_stride,
    table_stride,
    scale,
    k_inverse,
    v_inverse,
    v_scale,
    window,
    softcap,
    sinks,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    page_size: tl.constexpr,
    norms_v: tl.constexpr,
    v_is_k: tl.constexpr,
    run: tl.constexpr,
    block_rows: tl.constexpr,
    block_h: tl.constexpr,
    block_g: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_v: tl.constexpr,
    block_s: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program: a KV head of an item, with its group of query heads, over one split of the keys.

    KV heads are neighbours in the grid as they are in memory. The last program of a row to finish
    merges the splits, which costs less than a second launch in a short step; a row of one split
    needs no merging. Tensor cores are used with the group padded to block_h, even for a single
    head: compiled for sm_90, a tile of 64 keys takes a warp 330 instructions, and 820 on CUDA
    cores. Where the keys hold the values, `block_d` is the width of the tail alone, and splits are
    left to _merge_kernel: a row has a single KV head, for whose many query heads one program would
    take longer than all others.

    With a rotary table, q is qkv, and each program norms and rotates the queries that it needs. The
    program whose split has the row's own token starts its softmax with it, and writes it to the
    cache, from which no program reads it.

    With runs, a row is a run of rows, and its group of heads that of each of its tokens: token by
    token, and each sees the keys up to its own.
    """
    kv_head, item = tl.program_id(0), tl.program_id(1)
    row, first_item, split_size = _find_row(
        lengths, item, num_rows, target_splits, min_split, window, run, block_rows
    )
    if row >= num_rows:
        return  # without a wait; every row has a program that waits
    # The row's splits are of equal size, in whole tiles.
    length = _longest(tl.load(lengths + row * run), run)
    num_visible = _num_visible(length, window)
    begin = length - num_visible
    num_splits = _num_splits(num_visible, split_size)
    split_size = tl.maximum(tl.cdiv(tl.cdiv(num_visible, num_splits), block_n), 1) * block_n
    first = begin + (item - first_item) * split_size
    if (first > begin) & (first >= length):
        return
    end = tl.minimum(first + split_size, length)
    table = page_table + row * run * table_stride
    block_k: tl.constexpr = block_v if v is None else block_d  # without a tail
    heads, dims, v_dims = tl.arange(0, block_h), tl.arange(0, block_k), tl.arange(0, block_v)
    ends = None  # of the keys that each head sees, with runs
    if run > 1:
        ends = tl.load(lengths + row * run + heads // group, heads < run * group, 0)
        longest = tl.max(ends)
        end = tl.minimum(end, longest)
        table += tl.maximum(longest - tl.load(lengths + row * run), 0) * table_stride
    num_own = ((end == length) & (length > 0)).to(tl.int32)  # 1 in the split of the own token
    if rotary_table is not None:
        end = tl.minimum(end, tl.maximum(length - 1, 0))  # the own token is not in the cache
    # With a window, tiles begin with it, and not at multiples of their size.
    in_page: tl.constexpr = window is None and page_size % block_n == 0
    pages = load_pages(table, first, end, page_size, in_page, block_n)

    num_queries: tl.constexpr = run * group
    num_heads: tl.constexpr = num_kv_heads * num_queries
    row_size: tl.constexpr = head_dim if v is None else num_kv_heads * head_dim
    v_row_size: tl.constexpr = num_kv_heads * v_head_dim
    key_dim: tl.constexpr = v_head_dim if v is None else head_dim  # without a tail
    if v is not None:
        k += kv_head * head_dim
        v += kv_head * v_head_dim
    q += row.to(tl.int64) * run * q_stride
    within = heads[:, None] * head_dim + dims[None, :]  # a group's [head, dim], of queries
    if run > 1:
        within = (heads // group * q_stride + heads % group * head_dim)[:, None] + dims[None, :]
    real = (heads < num_queries)[:, None] & (dims < key_dim)[None, :]
    v_within = heads[:, None] * v_head_dim + v_dims[None, :]  # the same of values
    v_real = (heads < num_queries)[:, None] & (v_dims < v_head_dim)[None, :]
    if sinks is not None:  # in the first split only
        in_first = (item == first_item) & (heads < num_queries)
        sink = tl.load(sinks + kv_head * group + heads % group, in_first, -float("inf"))
    if rotary_table is None:
        if pdl:  # for q, k and v to be complete, and for the last reader of `out` and the workspace
            tl.extra.cuda.gdc_wait()
        query = tl.load(q + kv_head * group * head_dim + within, real, 0.0)
        acc = tl.zeros((block_h, block_v), tl.float32)
        peak = tl.full((block_h,), LOWEST, tl.float32)
        lane_totals = tl.zeros((block_h, block_n), tl.float32)  # summed once, not in every tile
    else:
        query, acc, peak, lane_totals = _start_with_own(
            q, k, v, table, length, num_own, rotary_table, q_weight, k_weight, eps, scale,
            softcap, k_inverse, v_inverse, kv_head, num_kv_heads, group, head_dim, page_size,
            norms_v, v_is_k, block_h, block_n, block_d, pdl,
        )  # fmt: skip
    fp8: tl.constexpr = v_scale is not None
    tail_query, odd_tail_query = None, None
    if v is None:
        tails = key_dim + tl.arange(0, block_d)
        in_tail = (heads < group)[:, None] & (tails < head_dim)[None, :]
        tail_places = (kv_head * group + heads)[:, None] * head_dim + tails[None, :]
        tail_query = tl.load(q + tail_places, in_tail, 0.0)
        query, tail_query, scale = both_to_multiply(query, tail_query, scale, fp8)
    else:
        query, scale = to_multiply(query, scale, fp8)
    odd_query, odd_acc = None, None
    if fp8:  # as pairs of neighbouring dimensions: see _even_and_odd
        query, odd_query = _split(query)
        acc, odd_acc = _split(acc)
        k = k.to(tl.pointer_type(tl.int16), bitcast=True)
        if v is None:
            tail_query, odd_tail_query = _split(tail_query)
        else:
            v = v.to(tl.pointer_type(tl.int16), bitcast=True)
    words: tl.constexpr = 2 if fp8 else 1  # elements in one that is loaded
    for start in tl.range(first, end, block_n, num_stages=stages):
        offsets = offsets_of(
            pages, start, row_size // words, page_size, in_page, block_n, block_k // words
        )
        if v is None:
            v_offsets = offsets_of(
                pages, start, row_size // words, page_size, in_page, block_n, block_d // words
            )
        else:
            v_offsets = offsets_of(
                pages, start, v_row_size // words, page_size, in_page, block_n, block_v // words
            )
        # One tile ahead, so that no load of keys waits for a load of pages.
        pages = load_pages(table, start + block_n, end, page_size, in_page, block_n)
        keys = start + tl.arange(0, block_n)
        mask = in_cache(keys, end, key_dim // words, block_k // words)
        if fp8:
            tile, odd_tile = _even_and_odd(tl.load(k + offsets, mask, 0), query.dtype)
            scores = tl.dot(query, tl.trans(tile), input_precision="ieee")
            scores = tl.dot(odd_query, tl.trans(odd_tile), scores, input_precision="ieee")
        else:
            tile = tl.load(k + offsets, mask, 0.0)
            scores = tl.dot(query, tl.trans(tile), input_precision="ieee")
        if v is None:
            tail_mask = in_cache(keys, end, (head_dim - key_dim) // words, block_d // words)
            tail = tl.load(k + key_dim // words + v_offsets, tail_mask, 0)
            if fp8:
                tail, odd_tail = _even_and_odd(tail, query.dtype)
                scores = tl.dot(odd_tail_query, tl.trans(odd_tail), scores, input_precision="ieee")
            scores = tl.dot(tail_query, tl.trans(tail), scores, input_precision="ieee")
        if run > 1:
            visible = keys[None, :] < tl.minimum(ends, end)[:, None]
        else:
            visible = (keys < end)[None, :]
        weights, decay, peak = fold(scores, visible, scale, softcap, peak, fp8)
        if v is not None:
            v_mask = in_cache(keys, end, v_head_dim // words, block_v // words)
            if fp8:
                tile, odd_tile = _even_and_odd(tl.load(v + v_offsets, v_mask, 0), query.dtype)
            else:
                tile = tl.load(v + v_offsets, v_mask, 0.0)
        if fp8:
            rounded = weights.to(query.dtype)
            acc = tl.dot(rounded, tile, acc * decay[:, None], input_precision="ieee")
            odd_acc = tl.dot(rounded, odd_tile, odd_acc * decay[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(tile.dtype), tile, acc * decay[:, None], input_precision="ieee")
        lane_totals = lane_totals * decay[:, None] + weights
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()

    total = tl.sum(lane_totals, 1)
    if fp8:
        acc = tl.reshape(tl.join(acc, odd_acc), (block_h, block_v)) * v_scale
    if sinks is not None:
        acc, peak, total = add_sinks(acc, peak, total, sink)
    num_splits = tl.cdiv(num_visible, split_size)
    if num_splits <= 1:
        result = out + (row.to(tl.int64) * num_heads + kv_head * group) * v_head_dim
        places = _places(heads, run, group, num_kv_heads) * v_head_dim
        acc /= tl.where(total > 0, total, 1.0)[:, None]
        tl.store(result + places[:, None] + v_dims[None, :], acc, mask=v_real)
        return

    mine = item * num_heads + kv_head * num_queries
    tl.store(accs + mine * v_head_dim + v_within, acc, mask=v_real)
    tl.store(peaks + mine + heads, peak, mask=heads < num_queries)
    tl.store(totals + mine + heads, total, mask=heads < num_queries)
    if v is None:
        return
    semaphores += row * num_kv_heads
    if arrive(semaphores, kv_head) == num_splits - 1:
        tl.store(semaphores + kv_head, 0)  # for the next launch
        merged = _merge(
            accs, peaks, totals, first_item, num_splits, kv_head * num_queries, 0,
            num_heads, num_queries, v_head_dim, block_g, block_v, block_s,
        )  # fmt: skip
        group_heads = tl.arange(0, block_g)
        result = out + (row.to(tl.int64) * num_heads + kv_head * group) * v_head_dim
        # A name of its own: in the block above `places` are of another size.
        merged_places = _places(group_heads, run, group, num_kv_heads) * v_head_dim
        tl.store(
            result + merged_places[:, None] + v_dims[None, :],
            merged,
            mask=(group_heads < num_queries)[:, None] & (v_dims < v_head_dim)[None, :],
        )


@triton.jit
def _places(heads, run: tl.constexpr, group: tl.constexpr, num_kv_heads: tl.constexpr):
    """Where the heads of a KV head are among all heads of a run of rows, from its first on."""
    if run == 1:
        return heads
    else:
        return heads // group * (num_kv_heads * group) + heads % group


@triton.jit
def _longest(length, run: tl.constexpr):
    """The most keys that a run sees whose first row sees `length`."""
    if run == 1:
        return length
    else:
        return tl.where(length > 0, length + run - 1, 0)


@triton.jit
def _split(x):
    """[rows, dims] to its even dimensions and its odd ones."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _even_and_odd(pairs, dtype: tl.constexpr):
    """The even and the odd dimensions of e4m3 keys or values, from pairs of them as int16.

    Shared memory gives a matrix to the tensor cores in the order that they need, transposed for
    values, in elements of 16 bits alone; bytes would be read one at a time.
    """
    if INTERPRETED:
        even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # of two pairs at a time; what is written above compiles to three times as much
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even.to(dtype), odd.to(dtype)


@triton.jit
def _start_with_own(
    qkv,
    k,
    v,
    table,
    length,
    num_own,
    rotary_table,
    q_weight,
    k_weight,
    eps,
    scale,
    softcap,
    k_inverse,
    v_inverse,
    kv_head,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    norms_v: tl.constexpr,
    v_is_k: tl.constexpr,
    block_h: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    pdl: tl.constexpr,
):
    """(queries, acc, peak and lane totals) of a softmax over the row's own token, which is written
    to the cache; over nothing if num_own is 0. qkv: of the row; k and v: of the KV head.

    All tiles are [block_h, block_d] and loaded alike, with the key and the weights repeated for
    each head, so that a thread holds the same elements of all and no shared memory is needed. A
    second tile has the partner of each element, with which it is rotated.
    """
    half: tl.constexpr = head_dim // 2
    head = tl.arange(0, block_h)[:, None]
    dim = tl.broadcast_to(tl.arange(0, block_d)[None, :], block_h, block_d)
    partner = tl.where(dim < half, dim + half, dim - half)
    real = (head < group) & (dim < head_dim)

    # Before the wait, load what is older than the previous kernel: all but the heads.
    position = tl.maximum(length - 1, 0)
    page = tl.load(table + position // page_size, num_own > 0, 0)
    angles = rotary_table + position.to(tl.int64) * head_dim + tl.minimum(dim, partner)
    cos, sin = tl.load(angles, real, 0.0), tl.load(angles + half, real, 0.0)
    q_scales, k_scales, q_partner_scales, k_partner_scales = None, None, None, None
    if q_weight is not None:
        q_scales = tl.load(q_weight + dim, real, 0.0)
        k_scales = tl.load(k_weight + dim, real, 0.0)
        q_partner_scales = tl.load(q_weight + partner, real, 0.0)
        k_partner_scales = tl.load(k_weight + partner, real, 0.0)
    if pdl:  # for qkv to be complete, and for the last reader of `out`, the workspace and the cache
        tl.extra.cuda.gdc_wait()

    queries = qkv + (kv_head * group + head) * head_dim
    own_k = qkv + (num_kv_heads * group + kv_head) * head_dim
    own_v = own_k if v_is_k else own_k + num_kv_heads * head_dim
    query, query_partners = tl.load(queries + dim, real, 0.0), tl.load(queries + partner, real, 0.0)
    own = (head < num_own * group) & real
    key, key_partners = tl.load(own_k + dim, own, 0.0), tl.load(own_k + partner, own, 0.0)
    value = tl.load(own_v + dim, own, 0.0)
    if norms_v:
        wide = value.to(tl.float32)
        by = tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) * (1.0 / head_dim) + eps)
        value = (wide * by).to(value.dtype)

    sin = tl.where(dim < half, -sin, sin)
    query = _norm_and_rotate(
        query, query_partners, cos, sin, q_scales, q_partner_scales, eps, head_dim
    )
    key = _norm_and_rotate(key, key_partners, cos, sin, k_scales, k_partner_scales, eps, head_dim)
    # Attended to as it is stored, as other rows and later steps will do.
    key = to_stored(key, k_inverse, k.dtype.element_ty)
    value = to_stored(value, v_inverse, v.dtype.element_ty)
    place = (page.to(tl.int64) * page_size + position % page_size) * (num_kv_heads * head_dim) + dim
    tl.store(k + place, key, mask=own & (head == 0))
    tl.store(v + place, value, mask=own & (head == 0))

    peak = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale
    if softcap is not None:
        peak = capped(peak, softcap)
    lanes = tl.broadcast_to(tl.arange(0, block_n)[None, :], block_h, block_n)
    return (
        query,
        value.to(tl.float32),
        tl.where(num_own > 0, peak, LOWEST),
        tl.where(lanes < num_own, 1.0, 0.0),  # the weight of the peak
    )


@triton.jit
def _norm_and_rotate(
    x,
    partners,
    cos,
    sin,
    x_scales,
    partner_scales,
    eps,
    head_dim: tl.constexpr,
):
    """Norm and rotate heads, rounded as in elementwise/heads.py but for the last line: there the
    products are rounded before they are added. All tiles are [heads, dims]; a head's partners are
    its own elements in another order."""
    dtype = x.dtype
    x, partners = x.to(tl.float32), partners.to(tl.float32)
    if x_scales is not None and partner_scales is not None:
        # As rms_scale and apply_norm, written out: in another order of conversions the chain of a
        # small step, which nothing hides, is longer.
        scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) * (1.0 / head_dim) + eps)
        x = (x * scale).to(dtype).to(tl.float32)
        x = (x_scales.to(tl.float32) * x).to(dtype).to(tl.float32)
        partners = (partners * scale).to(dtype).to(tl.float32)
        partners = (partner_scales.to(tl.float32) * partners).to(dtype).to(tl.float32)
    return (x * cos + partners * sin).to(dtype)


@triton.jit
def _num_visible(length, window):
    """Number of keys that a row of this length sees."""
    if window is None:
        return length
    else:
        return tl.minimum(length, window)


@triton.jit
def _num_splits(num_visible, split_size):
    """Number of KV splits of a row. Rounded, not ceiled: a row slightly longer than one split stays
    whole, and equal rows split equally."""
    return tl.maximum((num_visible + split_size // 2) // split_size, 1)


@triton.jit
def _find_row(
    lengths,
    item,
    num_rows,
    target_splits,
    min_split,
    window,
    run: tl.constexpr,
    block_rows: tl.constexpr,
):
    """(row of `item`, num_rows or more if there is none; the row's first item; keys in a split).
    Every row has at least one item, and items are numbered row by row."""
    rows = tl.arange(0, block_rows)
    numbers = _longest(tl.load(lengths + rows * run, rows < num_rows, 0), run)
    numbers = _num_visible(numbers, window)
    split_size = tl.maximum(tl.cdiv(tl.sum(numbers), target_splits), min_split)
    items = tl.where(rows < num_rows, _num_splits(numbers, split_size), 0)
    ends = tl.cumsum(items)
    before = ends <= item
    return tl.sum(before.to(tl.int32)), tl.max(tl.where(before, ends, 0)), split_size


@triton.jit(
    do_not_specialize=["num_rows", "target_splits", "min_split", "window"],
    do_not_specialize_on_alignment=["lengths"],
)
def _merge_kernel(
    out,
    lengths,
    accs,
    peaks,
    totals,
    num_rows,
    target_splits,
    min_split,
    window,
    num_heads: tl.constexpr,
    v_head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_v: tl.constexpr,
    block_s: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program: some dimensions of a head of a row, if the row is split."""
    row, head, first_dim = tl.program_id(0), tl.program_id(1), tl.program_id(2) * block_v
    rows = tl.arange(0, block_rows)
    numbers = _num_visible(tl.load(lengths + rows, rows < num_rows, 0), window)
    split_size = tl.maximum(tl.cdiv(tl.sum(numbers), target_splits), min_split)
    first_item = tl.sum(tl.where(rows < row, _num_splits(numbers, split_size), 0))
    num_visible = _num_visible(tl.load(lengths + row), window)
    num_splits = _num_splits(num_visible, split_size)
    split_size = tl.maximum(tl.cdiv(tl.cdiv(num_visible, num_splits), block_n), 1) * block_n
    num_splits = tl.cdiv(num_visible, split_size)
    wait_for_previous(pdl)
    if num_splits > 1:
        merged = _merge(
            accs, peaks, totals, first_item, num_splits, head, first_dim,
            num_heads, 1, v_head_dim, 1, block_v, block_s,
        )  # fmt: skip
        dims = first_dim + tl.arange(0, block_v)
        result = out + (row.to(tl.int64) * num_heads + head) * v_head_dim
        tl.store(result + dims[None, :], merged, mask=(dims < v_head_dim)[None, :])


@triton.jit
def _merge(
    accs,
    peaks,
    totals,
    first_item,
    num_splits,
    first_head,
    first_dim,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    v_head_dim: tl.constexpr,
    block_g: tl.constexpr,
    block_v: tl.constexpr,
    block_s: tl.constexpr,
):
    """[block_g, block_v]: the attention of a group over all splits of a row, block_s at a time."""
    heads, dims = tl.arange(0, block_g), first_dim + tl.arange(0, block_v)
    acc = tl.zeros((block_g, block_v), tl.float32)
    peak = tl.full((block_g,), LOWEST, tl.float32)
    total = tl.zeros((block_g,), tl.float32)
    for start in tl.range(0, num_splits, block_s, num_stages=4):
        splits = start + tl.arange(0, block_s)
        stats = (first_item + splits)[:, None] * num_heads + (first_head + heads)[None, :]
        real = (splits < num_splits)[:, None] & (heads < group)[None, :]
        places = stats[:, :, None] * v_head_dim + dims[None, None, :]
        inside = real[:, :, None] & (dims < v_head_dim)[None, None, :]
        some_accs = tl.load(accs + places, inside, 0.0)
        some_peaks = tl.load(peaks + stats, real, LOWEST)
        some_totals = tl.load(totals + stats, real, 0.0)
        higher = tl.maximum(peak, tl.max(some_peaks, 0))
        decay, weights = tl.exp2(peak - higher), tl.exp2(some_peaks - higher[None, :])
        acc = acc * decay[:, None] + tl.sum(some_accs * weights[:, :, None], 0)
        total = total * decay + tl.sum(some_totals * weights, 0)
        peak = higher
    return acc / tl.where(total > 0, total, 1.0)[:, None]
