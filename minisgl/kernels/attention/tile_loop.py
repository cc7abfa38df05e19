"""The loop over tiles of keys of the paged attention kernels; see paged_common.py. `sizes` is a
Sizes throughout."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# The running maximum before any score: -inf minus -inf would be NaN where all scores are masked.
LOWEST = tl.constexpr(-3.0e38)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # without assembly


class Query(NamedTuple):
    """Queries as they are multiplied."""

    parts: Any  # [rows, dims] each: see in_parts
    tail: Any  # the same of the tail, if keys have one
    scale: Any  # of the scores; in FP8 one a row


class Cache(NamedTuple):
    """Where the keys and values of a row or chunk are."""

    k: Any
    v: Any  # those of the keys, where they hold the values
    table: Any  # the row of the page table


class Softmax(NamedTuple):
    """An online softmax over the keys so far."""

    acc: Any  # float32, parts of [rows, dims]
    peak: Any  # [rows]
    totals: Any  # [rows]; or [rows, block_n], which are added up once, and not in every tile


@triton.jit
def cache_of(tensors, table, kv_head, sizes: tl.constexpr):
    """The cache of a KV head."""
    if tensors.v is None:
        return Cache(tensors.k, tensors.k, table)
    else:
        k, v = tensors.k + kv_head * sizes.head_dim, tensors.v + kv_head * sizes.v_head_dim
        return Cache(k, v, table)


@triton.jit
def nothing(lanes: tl.constexpr, sizes: tl.constexpr):
    """A softmax over no keys, with as many lanes in its totals, or 0."""
    acc = tl.full((sizes.block_m, sizes.block_v), 0.0, tl.float32)
    peak = tl.full((sizes.block_m,), LOWEST, tl.float32)
    totals = tl.full((sizes.block_m, lanes) if lanes else (sizes.block_m,), 0.0, tl.float32)
    return Softmax(in_parts(acc, sizes), peak, totals)


@triton.jit
def attend(
    softmax,
    query,
    scoring,
    cache,
    first,
    end,
    sizes: tl.constexpr,
    pages=None,
    positions=None,
    window=None,
    last=None,
    whole: tl.constexpr = False,
):
    """The softmax with the keys first..end added. pages: those of the first tile, if loaded.

    A query sees the keys up to its position, with a window so many of them; positions None: all.
    last: [rows], the key up to which it sees them, if that is not its position. `whole`: all keys
    are seen, in whole tiles."""
    if pages is None:
        pages = load_pages(cache.table, first, end, sizes)
    acc, peak, totals = softmax.acc, softmax.peak, softmax.totals
    dtype: tl.constexpr = query.parts[0].dtype
    for start in tl.range(first, end, sizes.block_n, num_stages=sizes.stages):
        slots = _slots(pages, start, sizes)
        # One tile ahead, so that no load of keys waits for a load of pages.
        pages = load_pages(cache.table, start + sizes.block_n, end, sizes)
        keys = start + tl.arange(0, sizes.block_n)
        live, visible = None, None
        if not whole:
            live = (keys < end)[:, None]
            visible = _visible(keys, end, positions, window, last)
        tile = _load(cache.k, slots, live, sizes.head_dim, sizes.key_dim, dtype, sizes)
        scores = _dot(query.parts, tile, None)
        if sizes.key_dim < sizes.head_dim:
            tails: tl.constexpr = sizes.head_dim - sizes.key_dim
            tail = _load(cache.k + sizes.key_dim, slots, live, sizes.head_dim, tails, dtype, sizes)
            scores = _dot(query.tail, tail, scores)
        weights, decay, peak = _fold(scores, visible, query.scale, scoring.softcap, peak, sizes.fp8)
        if sizes.key_dim == sizes.head_dim:
            tile = _load(cache.v, slots, live, sizes.v_head_dim, sizes.v_head_dim, dtype, sizes)
        acc = _add(acc, decay, weights, tile)
        if len(totals.shape) == 2:
            totals = totals * decay[:, None] + weights
        else:
            totals = totals * decay + tl.sum(weights, 1)
    return Softmax(acc, peak, totals)


@triton.jit
def finished(softmax, sinks, v_scale, sizes: tl.constexpr):
    """(acc [rows, dims], peak [rows], total [rows]) of a softmax, after its sinks if there are any:
    [rows], natural logits; -inf adds nothing."""
    acc, peak, total = softmax.acc[0], softmax.peak, softmax.totals
    if sizes.paired:
        acc = tl.reshape(tl.join(acc, softmax.acc[1]), (sizes.block_m, sizes.block_v))
    if v_scale is not None:
        acc *= v_scale
    if len(total.shape) == 2:
        total = tl.sum(total, 1)
    if sinks is not None:
        sinks *= LOG2_E
        higher = tl.maximum(peak, sinks)
        decay = tl.exp2(peak - higher)
        return acc * decay[:, None], higher, total * decay + tl.exp2(sinks - higher)
    else:
        return acc, peak, total


@triton.jit
def load_pages(table, start, end, sizes: tl.constexpr):
    """The pages of the tile at `start`: one if each tile lies within a page, else one per key."""
    if sizes.in_page:
        return tl.load(table + start // sizes.page_size, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, sizes.block_n)
        return tl.load(table + keys // sizes.page_size, mask=keys < end, other=0)


@triton.jit
def _slots(pages, start, sizes: tl.constexpr):
    """[block_n] int64: where the tokens of the tile at `start` are among those of the cache."""
    lanes = tl.arange(0, sizes.block_n)
    if sizes.in_page:
        return pages.to(tl.int64) * sizes.page_size + (start % sizes.page_size + lanes)
    else:
        return pages.to(tl.int64) * sizes.page_size + (start + lanes) % sizes.page_size


@triton.jit
def _visible(keys, end, positions, window, last):
    """[rows or 1, block_n] bool: which keys the queries see."""
    if positions is None:
        return (keys < end)[None, :]
    elif last is not None:
        visible = (keys[None, :] <= last[:, None]) & (keys < end)[None, :]
        if window is not None:
            visible &= keys[None, :] > positions[:, None] - window
        return visible
    elif window is None:
        return keys[None, :] <= positions[:, None]
    else:  # from 0 on, and below the window: one comparison of unsigned numbers
        distances = positions[:, None] - keys[None, :]
        return distances.to(tl.uint32, bitcast=True) < window.to(tl.uint32)


@triton.constexpr_function
def padded(width: int, paired: bool) -> int:
    """Dimensions in a tile. The tensor cores multiply by 16 columns at least, or pairs of them."""
    least = 32 if paired else 16
    return max(least, int(triton.next_power_of_2(width)))


@triton.jit
def _load(
    cache,
    slots,
    live,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    dtype: tl.constexpr,
    sizes: tl.constexpr,
):
    """Parts of [block_n, dims]: the first `width` numbers of each live token."""
    words: tl.constexpr = 2 if sizes.paired else 1  # numbers in one that is loaded
    if sizes.paired:
        cache = cache.to(tl.pointer_type(tl.int16), bitcast=True)
    block: tl.constexpr = padded(width, sizes.paired)
    dims = tl.arange(0, block // words)[None, :]
    places = cache + (slots[:, None] * (sizes.num_kv_heads * head_dim // words) + dims)
    real = live
    if width < block:
        real = dims < width // words if live is None else live & (dims < width // words)
    tile = tl.load(places, real, None if real is None else 0.0)
    if sizes.paired:
        return _even_and_odd(tile, dtype)
    else:
        return (tile.to(dtype),)


@triton.jit
def in_parts(x, sizes: tl.constexpr):
    """[rows, dims] in one part; or, where FP8 is loaded in pairs, its even dimensions and its odd
    ones."""
    if sizes.paired:
        return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    else:
        return (x,)


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
def _dot(queries, tile, scores):
    """The scores of queries with a tile of keys, added to `scores` if there are any."""
    for part in tl.static_range(len(tile)):
        scores = tl.dot(queries[part], tl.trans(tile[part]), scores, input_precision="ieee")
    return scores


@triton.jit
def _add(acc, decay, weights, tile):
    """The parts of acc after a tile of values with these weights."""
    weights = weights.to(tile[0].dtype)
    first = tl.dot(weights, tile[0], acc[0] * decay[:, None], input_precision="ieee")
    if len(tile) == 1:
        return (first,)
    else:
        return first, tl.dot(weights, tile[1], acc[1] * decay[:, None], input_precision="ieee")


@triton.jit
def load_query(q, places, real, scoring, sizes: tl.constexpr):
    """The Query of the real rows, which are at these places."""
    query = _load_heads(q, places, real, sizes.key_dim, sizes)
    tail = None
    if sizes.key_dim < sizes.head_dim:
        tails: tl.constexpr = sizes.head_dim - sizes.key_dim
        tail = _load_heads(q + sizes.key_dim, places, real, tails, sizes)
    return to_multiply(query, tail, scoring, sizes)


@triton.jit
def _load_heads(q, places, real, width: tl.constexpr, sizes: tl.constexpr):
    """[rows, dims]: `width` numbers of each real query, from its place on."""
    dims = tl.arange(0, padded(width, sizes.paired))[None, :]
    return tl.load(q + (places[:, None] + dims), real[:, None] & (dims < width), 0.0)


@triton.jit
def to_multiply(query, tail, scoring, sizes: tl.constexpr):
    """The Query of [rows, dims], and of a tail if there is one. With a cache in FP8 the scale is
    one a row.

    The tensor cores have no product of a query in half precision and e4m3. e4m3 is converted to
    float16, which holds it and takes one instruction for two elements; to bfloat16 it would take
    four. A query in bfloat16 becomes float16, too, each row multiplied by a power of two that
    brings its largest element to 2^13 or more. That is exact down to 2^-28 of the largest.
    """
    scale = scoring.scale
    if sizes.fp8:
        power = tl.full((sizes.block_m,), 1.0, tl.float32)
        if query.dtype == tl.bfloat16:
            largest = tl.max(tl.abs(query.to(tl.float32)), 1)
            if tail is not None:
                largest = tl.maximum(largest, tl.max(tl.abs(tail.to(tl.float32)), 1))
            power, inverse = _power_of_two(largest)
            query = (query.to(tl.float32) * inverse[:, None] * 8192.0).to(tl.float16)
            if tail is not None:
                tail = (tail.to(tl.float32) * inverse[:, None] * 8192.0).to(tl.float16)
            scale /= 8192.0
        scale = power * scale
    parts = in_parts(query, sizes)
    # Triton 3.6 returns no None.
    return Query(parts, parts if tail is None else in_parts(tail, sizes), scale)


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
def _fold(scores, visible, scale, softcap, peak, fp8: tl.constexpr):
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
