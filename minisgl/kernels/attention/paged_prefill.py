"""Paged attention of chunks in Triton; see paged_common.py."""

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
    attend,
    cache_of,
    finished,
    load_query,
    nothing,
)
from minisgl.kernels.inlined import arrive
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.tuning import PrefillTiles

# Of a step whose keys are split: one warp finds the split of a program.
MOST_SPLIT_CHUNKS = 32
# Arguments that change with the step, and must not give a variant of a kernel each.
_VARYING = {
    "do_not_specialize": ["num_chunks", "target_splits", "min_split", "table_stride", "window"],
    "do_not_specialize_on_alignment": ["page_table", "row_starts", "ends", "last_seen"],
}


class _Item(NamedTuple):
    """Up to block_m // group tokens of a chunk."""

    row: Any  # of the first token
    num_tokens: Any
    position: Any  # of the first token
    begin: Any  # of the keys that it sees
    diagonal: Any  # the first key of a tile that not all of its tokens see


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
    last_seen: Tensor | None = None,
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

    last_seen: [num_rows] int32, the position of the last key that each row sees, within its chunk,
    where that may be behind its own; then no keys are split.
    """
    num_rows, num_heads, head_dim = q.shape
    v_head_dim = v.shape[3]
    num_chunks = ends.shape[0]
    assert k.is_contiguous() and q.stride()[1:] == (head_dim, 1)
    assert spec.v_in_k or v.is_contiguous()
    assert page_table.stride(1) == 1 and row_starts.stride(0) == ends.stride(0) == 1
    out = torch.empty((num_rows, num_heads, v_head_dim), dtype=q.dtype, device=q.device)
    if num_rows == 0 or num_chunks == 0:
        return out
    searched = MOST_SPLIT_CHUNKS if target_splits else max(LOOKED_THROUGH, num_chunks)
    sizes = Sizes.of(num_heads, k, v, spec, tiles, searched=searched)
    num_items = num_rows // (tiles.block_m // sizes.group) + num_chunks
    tensors = Tensors(out, q, q.stride(0), k, None if spec.v_in_k else v)
    chunks: dict[str, Any] = {
        "tensors": tensors,
        "page_table": page_table,
        "table_stride": page_table.stride(0),
        "scoring": Scoring.of(spec, scales, sinks, k),
        "row_starts": row_starts,
        "ends": ends,
        "num_chunks": num_chunks,
        "window": spec.window,
        "sizes": sizes,
        "num_warps": tiles.num_warps,
        **pdl_options(q.device, pdl),
    }
    if target_splits:
        assert num_chunks <= MOST_SPLIT_CHUNKS and last_seen is None
        assert workspace is not None and workspace.holds(
            **split_room(target_splits, sizes.num_groups, v_head_dim, tiles)
        )
        _split_kernel[(sizes.num_groups, num_items + target_splits)](
            **chunks,
            workspace=workspace,
            target_splits=target_splits,
            min_split=max(tiles.min_split, target_splits),  # see _find_split
        )
    else:
        _whole_kernel[(sizes.num_groups, num_items)](**chunks, last_seen=last_seen)
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


@triton.jit(**_VARYING)
def _whole_kernel(
    tensors,
    page_table,
    table_stride,
    scoring,
    row_starts,
    ends,
    num_chunks,
    window,
    last_seen,
    sizes: tl.constexpr,
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
    """
    kv_head, number = tl.program_id(0), tl.program_id(1)
    most_tokens: tl.constexpr = sizes.block_m // sizes.group
    chunks = tl.arange(0, sizes.searched)
    first_items = tl.load(row_starts + chunks, chunks < num_chunks, 0) // most_tokens + chunks
    chunk = tl.sum(((first_items <= number) & (chunks < num_chunks)).to(tl.int32)) - 1
    first_row, end_row = tl.load(row_starts + chunk), tl.load(row_starts + chunk + 1)
    end = tl.load(ends + chunk)
    if pdl:  # for q, k and v, and for the last reader of `out`; also programs without tokens wait
        tl.extra.cuda.gdc_wait()
    number -= first_row // most_tokens + chunk
    left = tl.cdiv(end_row - first_row, most_tokens) - 1 - number
    if left < 0:
        return
    item = _item(first_row, end_row, end, left, window, sizes)
    cache = cache_of(tensors, page_table + chunk * table_stride, kv_head, sizes)
    stop, last = item.position + item.num_tokens, None
    if last_seen is not None:
        tokens = tl.arange(0, sizes.block_m) // sizes.group
        last = tl.load(last_seen + item.row + tokens, tokens < item.num_tokens, 0)
        last = tl.maximum(last, item.position + tokens)
        stop = tl.minimum(tl.maximum(stop, tl.max(last) + 1), end)
    softmax = _attend(
        item, tensors, cache, kv_head, item.begin, item.diagonal, stop, window, scoring, sizes, last
    )
    sinks = None
    if scoring.sinks is not None:
        sinks = tl.load(scoring.sinks + _heads(kv_head, sizes))
    acc, _, total = finished(softmax, sinks, scoring.v_scale, sizes)
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    acc /= tl.where(total > 0, total, 1.0)[:, None]  # no keys are seen by a token that is padding
    _store(tensors.out, acc, item, kv_head, sizes)


@triton.jit(**_VARYING)
def _split_kernel(
    tensors,
    page_table,
    table_stride,
    scoring,
    workspace,
    row_starts,
    ends,
    num_chunks,
    target_splits,
    min_split,
    window,
    sizes: tl.constexpr,
    pdl: tl.constexpr,
):
    """As _whole_kernel, but a program has one split of the keys of an item, which it finds by sums
    over all chunks (_find_split). The splits of an item are equal in whole tiles, and the last one
    has those on the diagonal, too. The last program to finish merges them."""
    kv_head, unit = tl.program_id(0), tl.program_id(1)
    most_tokens: tl.constexpr = sizes.block_m // sizes.group
    chunk, unit, first_slot, split_size = _find_split(
        row_starts, ends, unit, num_chunks, target_splits, min_split, window, sizes
    )
    live = chunk < num_chunks  # otherwise there is no token left
    first_row = tl.load(row_starts + chunk, live, 0)
    end_row = tl.load(row_starts + chunk + 1, live, 0)
    end = tl.load(ends + chunk, live, 0)
    if pdl:
        tl.extra.cuda.gdc_wait()
    most_splits = _num_splits(_most_visible(end, window, most_tokens), split_size)
    split = unit % most_splits
    left = tl.cdiv(end_row - first_row, most_tokens) - 1 - unit // most_splits
    if left < 0:
        return
    item = _item(first_row, end_row, end, left, window, sizes)
    num_tiles = (item.diagonal - item.begin) // sizes.block_n
    num_splits = tl.cdiv(num_tiles * sizes.block_n, split_size)
    num_splits = tl.maximum(tl.minimum(num_splits, most_splits), 1)
    if split >= num_splits:
        return
    first_slot += unit - split  # of the item
    cache = cache_of(tensors, page_table + chunk * table_stride, kv_head, sizes)
    first = item.begin + num_tiles * split // num_splits * sizes.block_n
    stop = item.begin + num_tiles * (split + 1) // num_splits * sizes.block_n
    end = tl.where(split == num_splits - 1, item.position + item.num_tokens, item.diagonal)
    softmax = _attend(item, tensors, cache, kv_head, first, stop, end, window, scoring, sizes)
    sinks = None
    if scoring.sinks is not None:
        sinks = tl.load(scoring.sinks + _heads(kv_head, sizes))
        sinks = tl.where(split == 0, sinks, -float("inf"))
    acc, peak, total = finished(softmax, sinks, scoring.v_scale, sizes)
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    if num_splits > 1:
        first_place = first_slot * sizes.num_groups + kv_head
        place = first_place + split * sizes.num_groups
        pairs, dims = tl.arange(0, sizes.block_m), tl.arange(0, sizes.block_v)
        real = (pairs // sizes.group < item.num_tokens)[:, None]
        real &= (dims < sizes.v_head_dim)[None, :]
        mine = place * sizes.block_m
        lanes = pairs[:, None] * sizes.v_head_dim + dims[None, :]
        tl.store(workspace.accs + mine * sizes.v_head_dim + lanes, acc, mask=real)
        tl.store(workspace.peaks + mine + pairs, peak)
        tl.store(workspace.totals + mine + pairs, total)
        if arrive(workspace.semaphores, first_place) < num_splits - 1:
            return
        tl.store(workspace.semaphores + first_place, 0)  # for the next launch
        acc, total = _merge(workspace, first_place, num_splits, real, sizes)
    _store(tensors.out, acc / total[:, None], item, kv_head, sizes)


@triton.jit
def _item(first_row, end_row, end, left, window, sizes: tl.constexpr):
    """An item of a chunk, of which `left` whole ones come before it."""
    first_token = left * (sizes.block_m // sizes.group)
    num_tokens = tl.minimum(end_row - first_row - first_token, sizes.block_m // sizes.group)
    position = end - (end_row - first_row) + first_token
    begin = 0 if window is None else tl.maximum(position + 1 - window, 0)
    diagonal = begin + (position + 1 - begin) // sizes.block_n * sizes.block_n
    return _Item(first_row + first_token, num_tokens, position, begin, diagonal)


@triton.jit
def _heads(kv_head, sizes: tl.constexpr):
    """The heads of all pairs of a token and a head."""
    return kv_head * sizes.group + tl.arange(0, sizes.block_m) % sizes.group


@triton.jit
def _attend(
    item,
    tensors,
    cache,
    kv_head,
    first,
    stop,
    end,
    window,
    scoring,
    sizes: tl.constexpr,
    last=None,
):
    """A softmax of the item's queries over first..stop, tiles before the diagonal, and from the
    diagonal to `end`. last: as of tile_loop.attend."""
    tokens = tl.arange(0, sizes.block_m) // sizes.group
    rows = item.row.to(tl.int64) + tokens
    places = rows * tensors.q_stride + _heads(kv_head, sizes) * sizes.head_dim
    query = load_query(tensors.q, places, tokens < item.num_tokens, scoring, sizes)
    softmax = nothing(0, sizes)
    positions = item.position + tokens
    if window is not None:  # first the tiles of which some tokens no longer see all keys
        last_begin = tl.maximum(item.position + item.num_tokens - window, 0)
        whole = item.begin + tl.cdiv(last_begin - item.begin, sizes.block_n) * sizes.block_n
        left_edge = tl.minimum(whole, stop)
        softmax = attend(
            softmax, query, scoring, cache, first, left_edge, sizes, None, positions, window
        )
        first = tl.maximum(first, whole)
    # Then those of which every token sees all keys, and those on the diagonal.
    softmax = attend(softmax, query, scoring, cache, first, stop, sizes, whole=True)
    return attend(
        softmax, query, scoring, cache, item.diagonal, end, sizes, None, positions, window, last
    )


@triton.jit
def _store(out, result, item, kv_head, sizes: tl.constexpr):
    tokens = tl.arange(0, sizes.block_m) // sizes.group
    dims = tl.arange(0, sizes.block_v)
    row_size: tl.constexpr = sizes.num_groups * sizes.group * sizes.v_head_dim
    # Two terms: as one place for each pair they would take more registers, and spill.
    rows = (item.row.to(tl.int64) + tokens) * row_size
    within = (_heads(kv_head, sizes) * sizes.v_head_dim)[:, None] + dims[None, :]
    real = (tokens < item.num_tokens)[:, None] & (dims < sizes.v_head_dim)[None, :]
    tl.store(out + rows[:, None] + within, result, mask=real)


@triton.jit
def _find_split(
    row_starts, ends, unit, num_chunks, target_splits, min_split, window, sizes: tl.constexpr
):
    """(chunk of `unit`, num_chunks or more if there is none; number of `unit` in the chunk; slot of
    the chunk's first unit in the workspace; keys in a split).

    Units, one a program, are numbered chunk by chunk, and within a chunk item by item, with as many
    for each. Only chunks that are split have slots. With K keys of all items these are at most
    K // split_size, which is no more than target_splits: K < target_splits * (split_size + 1), and
    split_size >= min_split >= target_splits.
    """
    most_tokens: tl.constexpr = sizes.block_m // sizes.group
    chunks = tl.arange(0, sizes.searched)
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
def _merge(workspace, first_place, num_splits, real, sizes: tl.constexpr):
    """(acc [block_m, block_v], total [block_m]) of all splits of an item, added in their order."""
    pairs, dims = tl.arange(0, sizes.block_m), tl.arange(0, sizes.block_v)
    acc = tl.full((sizes.block_m, sizes.block_v), 0.0, tl.float32)
    peak = tl.full((sizes.block_m,), LOWEST, tl.float32)
    total = tl.full((sizes.block_m,), 0.0, tl.float32)
    for split in tl.range(0, num_splits, num_stages=1):
        place = first_place + split * sizes.num_groups
        lanes = pairs[:, None] * sizes.v_head_dim + dims[None, :]
        some_acc = tl.load(
            workspace.accs + place * (sizes.block_m * sizes.v_head_dim) + lanes, real, 0.0
        )
        some_peak = tl.load(workspace.peaks + place * sizes.block_m + pairs)
        some_total = tl.load(workspace.totals + place * sizes.block_m + pairs)
        higher = tl.maximum(peak, some_peak)
        decay, weight = tl.exp2(peak - higher), tl.exp2(some_peak - higher)
        acc = acc * decay[:, None] + some_acc * weight[:, None]
        total = total * decay + some_total * weight
        peak = higher
    return acc, total
