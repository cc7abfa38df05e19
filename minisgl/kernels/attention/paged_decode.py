"""Paged attention of decode rows in Triton; see paged_common.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.config import UNSCALED, AttentionSpec, KVScales
from minisgl.kernels.attention.paged_common import (
    LOOKED_THROUGH,
    Scoring,
    Sizes,
    SplitWorkspace,
    Tensors,
)
from minisgl.kernels.attention.tile_loop import (
    LOWEST,
    Softmax,
    attend,
    cache_of,
    capped,
    finished,
    in_parts,
    load_pages,
    load_query,
    nothing,
    padded,
    to_multiply,
)
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.inlined import arrive, to_stored, wait_for_previous
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.tuning import DecodeTiles

# Elements in a tile of a merge: where attention itself merges, as many as need no more registers
# than its main loop; in a kernel of its own, enough that all loads are soon under way.
_MERGED = tl.constexpr(2048)
_MERGED_ALONE = tl.constexpr(8192)
_LEAST_MERGED = 64  # dimensions of a head in a program that merges only
# Arguments that change with the step, and must not give a variant of a kernel each.
_VARYING = {
    "do_not_specialize": ["num_rows", "target_splits", "min_split", "table_stride", "window"],
    "do_not_specialize_on_alignment": ["page_table", "lengths"],
}


class _Own(NamedTuple):
    """What norms, rotates and stores the rows' own tokens: see NormRope."""

    rotary_table: Any = None  # None: they are in the cache already
    q_weight: Any = None
    k_weight: Any = None
    eps: Any = None
    k_inverse: Any = None  # of the scales of a cache in FP8
    v_inverse: Any = None


class _Split(NamedTuple):
    """The keys of a row, or of a run, that a program attends to."""

    row: Any
    first_item: Any  # of the row
    length: Any  # of the row
    num_visible: Any  # keys that the row sees
    size: Any  # keys in each of its splits
    first: Any
    end: Any
    item: Any


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
    values are read once; of a run of n tokens, the page table of the last is used. Without windows,
    `norm_rope` and values in keys only.

    The keys that the rows see are divided into about `target_splits` splits of equal size. Every
    row has at least one, so there are up to `target_splits + num_rows` work *items*, for which the
    workspace must have room.
    """
    num_rows, num_heads, head_dim = q.shape
    v_head_dim = v.shape[3]
    own = _Own()
    if norm_rope is not None:
        num_heads = norm_rope.num_heads(num_heads, k.shape[2])
        assert norm_rope.table.is_contiguous() and k.dtype == v.dtype and k.shape == v.shape
        assert (norm_rope.q_weight is None) == (norm_rope.k_weight is None)
        assert norm_rope.q_weight is not None or not norm_rope.norms_v
        inverse = scales.inverse if k.dtype == torch.float8_e4m3fn else (None, None)
        own = _Own(*norm_rope[:4], *inverse)
    assert k.is_contiguous() and q.stride()[1:] == (head_dim, 1)
    assert norm_rope is None if spec.v_in_k else v.is_contiguous()
    assert page_table.stride(1) == 1 and lengths.stride(0) == 1
    assert run == 1 or (spec.window is None and norm_rope is None and num_rows % run == 0)
    assert run == 1 or not spec.v_in_k
    out = torch.empty((num_rows, num_heads, v_head_dim), dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    num_rows //= run
    searched = max(LOOKED_THROUGH, num_rows)
    sizes = Sizes.of(num_heads, k, v, spec, tiles, searched=searched, run=run)
    tensors = Tensors(out, q, q.stride(0), k, None if spec.v_in_k else v)
    given = (tensors, page_table, page_table.stride(0), Scoring.of(spec, scales, sinks, k))
    work: dict[str, Any] = {
        "workspace": workspace,
        "lengths": lengths,
        "num_rows": num_rows,
        "target_splits": target_splits,
        "min_split": tiles.min_split,
        "window": spec.window,
        "sizes": sizes,
        **pdl_options(q.device, pdl),
    }
    grid = (sizes.num_groups, target_splits + num_rows)
    if run > 1:
        _runs_kernel[grid](*given, **work, num_warps=tiles.num_warps)
    else:
        flags = {"norms_v": False, "v_is_k": False}
        if norm_rope is not None:
            flags = {"norms_v": norm_rope.norms_v, "v_is_k": norm_rope.v_is_k}
        _rows_kernel[grid](*given, own, **flags, **work, num_warps=tiles.num_warps)
    if spec.v_in_k:
        width = sizes.block_v
        while (
            width > _LEAST_MERGED and num_rows * num_heads * sizes.block_v < target_splits * width
        ):
            width //= 2
        merge_grid = (num_rows, num_heads, triton.cdiv(v_head_dim, width))
        _merge_kernel[merge_grid](out, **work, block_v=width, num_warps=4)
    return out


@triton.jit(**_VARYING)
def _rows_kernel(
    tensors,
    page_table,
    table_stride,
    scoring,
    own,
    workspace,
    lengths,
    num_rows,
    target_splits,
    min_split,
    window,
    norms_v: tl.constexpr,
    v_is_k: tl.constexpr,
    sizes: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program: a KV head of an item, with its group of query heads, over one split of the keys.

    KV heads are neighbours in the grid as they are in memory. The last program of a row to finish
    merges the splits, which costs less than a second launch in a short step; a row of one split
    needs no merging. Tensor cores are used with the group padded to 16 heads, even for a single
    one: compiled for sm_90, a tile of 64 keys takes a warp 330 instructions, and 820 on CUDA cores.
    Where the keys hold the values, splits are left to _merge_kernel: a row has a single KV head,
    for whose many query heads one program would take longer than all others.

    With a rotary table, q is qkv, and each program norms and rotates the queries that it needs. The
    program whose split has the row's own token starts its softmax with it, and writes it to the
    cache, from which no program reads it.
    """
    kv_head, item = tl.program_id(0), tl.program_id(1)
    row, first_item, split_size = _find_row(
        lengths, item, num_rows, target_splits, min_split, window, sizes
    )
    if row >= num_rows:
        return  # without a wait; every row has a program that waits
    split = _find_keys(lengths, row, first_item, item, split_size, window, sizes)
    if (item > first_item) & (split.first >= split.length):
        return
    table = page_table + split.row * table_stride
    end = split.end
    if own.rotary_table is not None:  # the row's own token is not in the cache
        end = tl.minimum(end, tl.maximum(split.length - 1, 0))
    pages = load_pages(table, split.first, end, sizes)
    sinks = None if scoring.sinks is None else _load_sinks(scoring, split, kv_head, sizes)
    q = tensors.q + split.row.to(tl.int64) * tensors.q_stride
    cache = cache_of(tensors, table, kv_head, sizes)
    if own.rotary_table is None:
        if pdl:  # for q, k and v to be complete, and for the last reader of `out` and the workspace
            tl.extra.cuda.gdc_wait()
        query = _load_group(q, kv_head, scoring, sizes)
        softmax = nothing(sizes.block_n, sizes)
    else:
        query, softmax = _start_with_own(
            q, cache, own, split, scoring, kv_head, norms_v, v_is_k, sizes, pdl
        )
    softmax = attend(softmax, query, scoring, cache, split.first, end, sizes, pages)
    _finish(tensors, workspace, scoring, softmax, sinks, split, kv_head, sizes, pdl)


@triton.jit(**_VARYING)
def _runs_kernel(
    tensors,
    page_table,
    table_stride,
    scoring,
    workspace,
    lengths,
    num_rows,
    target_splits,
    min_split,
    window,
    sizes: tl.constexpr,
    pdl: tl.constexpr,
):
    """As _rows_kernel, where a row is a run of rows. Its group of heads is that of each of its
    tokens: token by token, and each sees the keys up to its own."""
    kv_head, item = tl.program_id(0), tl.program_id(1)
    row, first_item, split_size = _find_row(
        lengths, item, num_rows, target_splits, min_split, window, sizes
    )
    if row >= num_rows:
        return  # without a wait; every row has a program that waits
    split = _find_keys(lengths, row, first_item, item, split_size, window, sizes)
    if (item > first_item) & (split.first >= split.length):
        return
    row = split.row * sizes.run
    heads = tl.arange(0, sizes.block_m)
    tokens = heads // sizes.group
    ends = tl.load(lengths + row + tokens, tokens < sizes.run, 0)
    longest = tl.max(ends)
    end = tl.minimum(split.end, longest)
    last = tl.maximum(longest - tl.load(lengths + row), 0)
    table = page_table + (row + last) * table_stride
    pages = load_pages(table, split.first, end, sizes)
    sinks = None if scoring.sinks is None else _load_sinks(scoring, split, kv_head, sizes)
    cache = cache_of(tensors, table, kv_head, sizes)
    if pdl:
        tl.extra.cuda.gdc_wait()
    q = tensors.q + row.to(tl.int64) * tensors.q_stride
    places = (
        tokens * tensors.q_stride + (kv_head * sizes.group + heads % sizes.group) * sizes.head_dim
    )
    query = load_query(q, places, tokens < sizes.run, scoring, sizes)
    positions = tl.minimum(ends, end) - 1
    softmax = nothing(sizes.block_n, sizes)
    softmax = attend(softmax, query, scoring, cache, split.first, end, sizes, pages, positions)
    _finish(tensors, workspace, scoring, softmax, sinks, split, kv_head, sizes, pdl)


@triton.jit
def _load_sinks(scoring, split, kv_head, sizes: tl.constexpr):
    """The sinks of a group, which count in the first split only."""
    heads = tl.arange(0, sizes.block_m)
    real = (split.item == split.first_item) & (heads < sizes.run * sizes.group)
    places = scoring.sinks + kv_head * sizes.group + heads % sizes.group
    return tl.load(places, real, -float("inf"))


@triton.jit
def _load_group(q, kv_head, scoring, sizes: tl.constexpr):
    """The Query of a group of a token."""
    heads = tl.arange(0, sizes.block_m)
    places = (kv_head * sizes.group + heads) * sizes.head_dim
    return load_query(q, places, heads < sizes.group, scoring, sizes)


@triton.jit
def _finish(
    tensors,
    workspace,
    scoring,
    softmax,
    sinks,
    split,
    kv_head,
    sizes: tl.constexpr,
    pdl: tl.constexpr,
):
    """Store the result of a row of one split; otherwise that of the split, and the last program of
    the row merges all."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    acc, peak, total = finished(softmax, sinks, scoring.v_scale, sizes)
    num_splits = tl.cdiv(split.num_visible, split.size)
    if num_splits <= 1:
        acc /= tl.where(total > 0, total, 1.0)[:, None]
        _store(tensors.out, acc, split.row, kv_head, sizes)
        return
    num_queries: tl.constexpr = sizes.run * sizes.group
    num_heads: tl.constexpr = sizes.num_groups * num_queries
    heads, dims = tl.arange(0, sizes.block_m), tl.arange(0, sizes.block_v)
    mine = split.item * num_heads + kv_head * num_queries
    places = heads[:, None] * sizes.v_head_dim + dims[None, :]
    real = (heads < num_queries)[:, None] & (dims < sizes.v_head_dim)[None, :]
    tl.store(workspace.accs + mine * sizes.v_head_dim + places, acc, mask=real)
    tl.store(workspace.peaks + mine + heads, peak, mask=heads < num_queries)
    tl.store(workspace.totals + mine + heads, total, mask=heads < num_queries)
    if sizes.key_dim == sizes.head_dim:
        semaphores = workspace.semaphores + split.row * sizes.num_groups
        if arrive(semaphores, kv_head) == num_splits - 1:
            tl.store(semaphores + kv_head, 0)  # for the next launch
            merged = _merge(
                workspace, split.first_item, num_splits, kv_head * num_queries, 0, num_queries,
                sizes.block_v, _MERGED, 4, sizes,
            )  # fmt: skip
            _store(tensors.out, merged, split.row, kv_head, sizes)


@triton.jit
def _store(out, result, row, kv_head, sizes: tl.constexpr):
    """Store what the queries of a group have attended to, [heads, dims]."""
    heads, dims = tl.arange(0, result.shape[0]), tl.arange(0, sizes.block_v)
    group: tl.constexpr = sizes.group
    num_heads: tl.constexpr = sizes.num_groups * group  # of a token
    places = heads
    if sizes.run > 1:
        places = heads // group * num_heads + heads % group
    out += (row.to(tl.int64) * (sizes.run * num_heads) + kv_head * group) * sizes.v_head_dim
    tl.store(
        out + (places * sizes.v_head_dim)[:, None] + dims[None, :],
        result,
        mask=(heads < sizes.run * group)[:, None] & (dims < sizes.v_head_dim)[None, :],
    )


@triton.jit
def _start_with_own(
    qkv,
    cache,
    own,
    split,
    scoring,
    kv_head,
    norms_v: tl.constexpr,
    v_is_k: tl.constexpr,
    sizes: tl.constexpr,
    pdl: tl.constexpr,
):
    """(queries, softmax over the row's own token, which is written to the cache); over nothing if
    it is not in the split. qkv: of the row.

    All tiles are [block_m, block_k] and loaded alike, with the key and the weights repeated for
    each head, so that a thread holds the same elements of all and no shared memory is needed. A
    second tile has the partner of each element, with which it is rotated.
    """
    group: tl.constexpr = sizes.group
    head_dim: tl.constexpr = sizes.head_dim
    num_own = ((split.end == split.length) & (split.length > 0)).to(tl.int32)
    block_k: tl.constexpr = padded(head_dim, sizes.paired)
    half: tl.constexpr = head_dim // 2
    head = tl.arange(0, sizes.block_m)[:, None]
    dim = tl.broadcast_to(tl.arange(0, block_k)[None, :], sizes.block_m, block_k)
    partner = tl.where(dim < half, dim + half, dim - half)
    real = (head < group) & (dim < head_dim)

    # Before the wait, load what is older than the previous kernel: all but the heads.
    position = tl.maximum(split.length - 1, 0)
    page = tl.load(cache.table + position // sizes.page_size, num_own > 0, 0)
    angles = own.rotary_table + position.to(tl.int64) * head_dim + tl.minimum(dim, partner)
    cos, sin = tl.load(angles, real, 0.0), tl.load(angles + half, real, 0.0)
    q_scales, k_scales, q_partner_scales, k_partner_scales = None, None, None, None
    if own.q_weight is not None:
        q_scales = tl.load(own.q_weight + dim, real, 0.0)
        k_scales = tl.load(own.k_weight + dim, real, 0.0)
        q_partner_scales = tl.load(own.q_weight + partner, real, 0.0)
        k_partner_scales = tl.load(own.k_weight + partner, real, 0.0)
    if pdl:  # for qkv to be complete, and for the last reader of `out`, the workspace and the cache
        tl.extra.cuda.gdc_wait()

    queries = qkv + (kv_head * group + head) * head_dim
    own_k = qkv + (sizes.num_groups * group + kv_head) * head_dim
    own_v = own_k if v_is_k else own_k + sizes.num_groups * head_dim
    query, query_partners = tl.load(queries + dim, real, 0.0), tl.load(queries + partner, real, 0.0)
    live = (head < num_own * group) & real
    key, key_partners = tl.load(own_k + dim, live, 0.0), tl.load(own_k + partner, live, 0.0)
    value = tl.load(own_v + dim, live, 0.0)
    if norms_v:
        wide = value.to(tl.float32)
        by = tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) * (1.0 / head_dim) + own.eps)
        value = (wide * by).to(value.dtype)

    sin = tl.where(dim < half, -sin, sin)
    query = _norm_and_rotate(
        query, query_partners, cos, sin, q_scales, q_partner_scales, own.eps, head_dim
    )
    key = _norm_and_rotate(
        key, key_partners, cos, sin, k_scales, k_partner_scales, own.eps, head_dim
    )
    # Attended to as it is stored, as other rows and later steps will do.
    key = to_stored(key, own.k_inverse, cache.k.dtype.element_ty)
    value = to_stored(value, own.v_inverse, cache.v.dtype.element_ty)
    slot = page.to(tl.int64) * sizes.page_size + position % sizes.page_size
    place = slot * (sizes.num_groups * head_dim) + dim
    tl.store(cache.k + place, key, mask=live & (head == 0))
    tl.store(cache.v + place, value, mask=live & (head == 0))

    peak = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scoring.scale
    if scoring.softcap is not None:
        peak = capped(peak, scoring.softcap)
    lanes = tl.broadcast_to(tl.arange(0, sizes.block_n)[None, :], sizes.block_m, sizes.block_n)
    peak = tl.where(num_own > 0, peak, LOWEST)
    weights = tl.where(lanes < num_own, 1.0, 0.0)  # of the peak
    softmax = Softmax(in_parts(value.to(tl.float32), sizes), peak, weights)
    return to_multiply(query, None, scoring, sizes), softmax


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
def _longest(length, run: tl.constexpr):
    """The most keys that a row sees, of a run the last one, whose first token sees `length`."""
    if run == 1:
        return length
    else:
        return tl.where(length > 0, length + run - 1, 0)


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
def _split_all(lengths, rows, num_rows, target_splits, min_split, window, run: tl.constexpr):
    """(number of splits of each of `rows`; keys in a split, about)."""
    numbers = _longest(tl.load(lengths + rows * run, rows < num_rows, 0), run)
    numbers = _num_visible(numbers, window)
    split_size = tl.maximum(tl.cdiv(tl.sum(numbers), target_splits), min_split)
    return _num_splits(numbers, split_size), split_size


@triton.jit
def _in_tiles(num_visible, split_size, block_n: tl.constexpr):
    """Keys in each split of a row: equal, and in whole tiles."""
    num_splits = _num_splits(num_visible, split_size)
    return tl.maximum(tl.cdiv(tl.cdiv(num_visible, num_splits), block_n), 1) * block_n


@triton.jit
def _find_row(lengths, item, num_rows, target_splits, min_split, window, sizes: tl.constexpr):
    """(row of `item`, num_rows or more if there is none; the row's first item; about how many keys
    a split has). Every row has at least one item, and items are numbered row by row."""
    rows = tl.arange(0, sizes.searched)
    num_splits, size = _split_all(
        lengths, rows, num_rows, target_splits, min_split, window, sizes.run
    )
    ends = tl.cumsum(tl.where(rows < num_rows, num_splits, 0))
    before = ends <= item
    return tl.sum(before.to(tl.int32)), tl.max(tl.where(before, ends, 0)), size


@triton.jit
def _find_keys(lengths, row, first_item, item, split_size, window, sizes: tl.constexpr):
    """The split of an item of a row."""
    length = _longest(tl.load(lengths + row * sizes.run), sizes.run)
    num_visible = _num_visible(length, window)
    split_size = _in_tiles(num_visible, split_size, sizes.block_n)
    first = length - num_visible + (item - first_item) * split_size
    end = tl.minimum(first + split_size, length)
    return _Split(row, first_item, length, num_visible, split_size, first, end, item)


@triton.jit(**_VARYING)
def _merge_kernel(
    out,
    lengths,
    workspace,
    num_rows,
    target_splits,
    min_split,
    window,
    sizes: tl.constexpr,
    block_v: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program: some dimensions of a head of a row, if the row is split."""
    row, head, first_dim = tl.program_id(0), tl.program_id(1), tl.program_id(2) * block_v
    rows = tl.arange(0, sizes.searched)
    num_splits, split_size = _split_all(
        lengths, rows, num_rows, target_splits, min_split, window, 1
    )
    first_item = tl.sum(tl.where(rows < row, num_splits, 0))
    num_visible = _num_visible(tl.load(lengths + row), window)
    num_splits = tl.cdiv(num_visible, _in_tiles(num_visible, split_size, sizes.block_n))
    wait_for_previous(pdl)
    if num_splits > 1:
        num_heads: tl.constexpr = sizes.num_groups * sizes.group
        merged = _merge(
            workspace, first_item, num_splits, head, first_dim, 1, block_v, _MERGED_ALONE, 1, sizes
        )
        dims = first_dim + tl.arange(0, block_v)
        result = out + (row.to(tl.int64) * num_heads + head) * sizes.v_head_dim
        tl.store(result + dims[None, :], merged, mask=(dims < sizes.v_head_dim)[None, :])


@triton.jit
def _merge(
    workspace,
    first_item,
    num_splits,
    first_head,
    first_dim,
    group: tl.constexpr,
    block_v: tl.constexpr,
    tile: tl.constexpr,
    num_stages: tl.constexpr,
    sizes: tl.constexpr,
):
    """[heads, block_v]: the attention of a group over all splits of a row, `tile` elements at a
    time."""
    num_heads: tl.constexpr = sizes.num_groups * sizes.run * sizes.group
    v_head_dim: tl.constexpr = sizes.v_head_dim
    block_g: tl.constexpr = triton.next_power_of_2(group)
    block_s: tl.constexpr = max(1, tile // (block_g * block_v))  # splits at a time
    heads, dims = tl.arange(0, block_g), first_dim + tl.arange(0, block_v)
    acc = tl.zeros((block_g, block_v), tl.float32)
    peak = tl.full((block_g,), LOWEST, tl.float32)
    total = tl.zeros((block_g,), tl.float32)
    for start in tl.range(0, num_splits, block_s, num_stages=num_stages):
        splits = start + tl.arange(0, block_s)
        stats = (first_item + splits)[:, None] * num_heads + (first_head + heads)[None, :]
        real = (splits < num_splits)[:, None] & (heads < group)[None, :]
        places = stats[:, :, None] * v_head_dim + dims[None, None, :]
        inside = real[:, :, None] & (dims < v_head_dim)[None, None, :]
        some_accs = tl.load(workspace.accs + places, inside, 0.0)
        some_peaks = tl.load(workspace.peaks + stats, real, LOWEST)
        some_totals = tl.load(workspace.totals + stats, real, 0.0)
        higher = tl.maximum(peak, tl.max(some_peaks, 0))
        decay, weights = tl.exp2(peak - higher), tl.exp2(some_peaks - higher[None, :])
        acc = acc * decay[:, None] + tl.sum(some_accs * weights[:, :, None], 0)
        total = total * decay + tl.sum(some_totals * weights, 0)
        peak = higher
    return acc / tl.where(total > 0, total, 1.0)[:, None]
