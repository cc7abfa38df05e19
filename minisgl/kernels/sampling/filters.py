"""The filters (top_n_sigma, min_p, top_k, top_p) after the first pass, in Triton: one kernel that
sums weights, and one that decides each row's token.

All filters keep a prefix of one order (order.py), so the kept tokens are those with keys from some
`low` on. The token drawn from all tokens is the one drawn from the kept ones if it is kept; if not,
another is drawn from those before it.

Only the full variant computes top_n_sigma: one program reads all logits of a row that has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.sampling import tables
from minisgl.kernels.sampling.device_order import (
    LOWEST,
    id_of,
    key_above,
    least_key,
    least_of_value,
    order_key,
    select,
    value_of,
)
from minisgl.kernels.sampling.noise import gumbel, words_of_quads
from minisgl.kernels.sampling.rows import (
    SEED,
    SEGMENT_QUADS,
    ids_of,
    load_float,
    load_integer,
    load_logits,
    source_of,
)

_TEMPERATURE = tl.constexpr(tables.FLOATS["temperature"])
_TOP_P = tl.constexpr(tables.FLOATS["top_p"])
_MIN_P = tl.constexpr(tables.FLOATS["min_p"])
_TOP_K = tl.constexpr(tables.INTEGERS["top_k"])
_TOP_N_SIGMA = tl.constexpr(tables.FLOATS["top_n_sigma"])
LIST_SEGMENTS = tl.constexpr(64)  # segments of a list that are processed at a time
LIST_IDS = tl.constexpr(64 * 64)  # the ids of these; also the number of keys that can be gathered


@triton.jit
def load_filters(records, slot, vocab_size, full: tl.constexpr):
    """(temperature, top_p, min_p, num_sigma, top_k, by_top_k, by_top_p, filtered).

    num_sigma: of top_n_sigma; by_top_k: top_k is on, which is decided from the segment maxima
    alone; by_top_p: top_p is on; filtered: any filter is on.
    """
    temperature = load_float(records, slot, _TEMPERATURE)
    top_p = load_float(records, slot, _TOP_P)
    min_p = load_float(records, slot, _MIN_P)
    top_k = load_integer(records, slot, _TOP_K)
    num_sigma = tl.cast(0.0, tl.float32)
    if full:
        num_sigma = load_float(records, slot, _TOP_N_SIGMA)
    random = temperature > 0
    by_top_k = random & (top_k > 0) & (top_k < vocab_size)
    by_top_p = random & (top_p < 1)
    filtered = by_top_k | by_top_p | (random & ((min_p > 0) | (num_sigma > 0)))
    return temperature, top_p, min_p, num_sigma, top_k, by_top_k, by_top_p, filtered


@triton.jit(
    do_not_specialize=["tiles_per_program", "num_splits"],
    do_not_specialize_on_alignment=["slots"],
)
def weigh_kernel(
    logits,
    edited,
    slots,
    records,
    masks,
    mask_stride,
    best,
    peaks,
    sums,
    vocab_size,
    stride,
    num_tiles,
    tiles_per_program,
    num_splits,
    full: tl.constexpr,
    quads_block: tl.constexpr,
    tiles_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One part of a row with top_p and without top_k and top_n_sigma: the total weight of the
    tokens that min_p keeps, and of those among them that precede the drawn token."""
    wait_for_previous(pdl)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature, _, min_p, num_sigma, _, by_top_k, by_top_p, _ = load_filters(
        records, slot, vocab_size, full
    )
    if by_top_p & (by_top_k == 0) & (num_sigma == 0):
        source = source_of(
            logits,
            edited,
            records,
            masks,
            mask_stride,
            row,
            slot,
            stride,
            vocab_size,
            0,
            full,
        )
        token = _drawn_token(best, row, num_tiles, num_splits, vocab_size, tiles_block)
        largest = _largest(peaks, row, num_tiles, num_splits, temperature, tiles_block)
        low = least_kept(largest, min_p)
        drawn = _key_of_token(source, token, temperature, full)
        totals = tl.zeros([quads_block], tl.int64)
        befores = tl.zeros([quads_block], tl.int64)
        first = tl.program_id(0) * tiles_per_program
        last = tl.minimum(first + tiles_per_program, num_tiles)
        end = tl.minimum(last * quads_block * 4, vocab_size)
        ids = ids_of(first * quads_block + tl.arange(0, quads_block))
        following = load_logits(source, ids, ids < end, full)
        for tile in range(first, last):
            scaled = tl.div_rn(following, temperature)
            ids = ids_of(tile * quads_block + tl.arange(0, quads_block))
            # Loaded one tile ahead.
            following = load_logits(
                source, ids + quads_block * 4, ids + quads_block * 4 < end, full
            )
            keys = order_key(scaled, ids)
            weights = tl.where(keys >= low, weight_of(scaled - largest), 0)
            totals += tl.sum(weights, axis=1)
            befores += tl.sum(tl.where(keys > drawn, weights, 0), axis=1)
        part = (row * num_tiles + tl.program_id(0)) * 2
        tl.store(sums + part, tl.sum(totals))
        tl.store(sums + part + 1, tl.sum(befores))


@triton.jit
def weight_of(gap):
    """int64: exp(gap) * 2**40, gap <= 0, rounded down.

    exp as in CUDA's expf: 2**whole * 2**part, the part from a product in two pieces and by the
    device's exp2, so that torch on the same device gives the same bits. On other devices the last
    place may differ, which moves the cut of top_p if the target lies within 1e-7 of a sum.
    """
    gap = tl.maximum(gap, -30.0)  # e**-30 * 2**40 < 1
    whole = tl.floor(tl.fma(gap, 1.4426950408889634, 0.5))
    part = tl.fma(gap, 1.44269502162933349609375, -whole)
    part = tl.fma(gap, 1.925963033500011e-08, part)
    scale = ((whole.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)  # 2**(whole + 40)
    return (tl.exp2(part) * scale).to(tl.int64)


# Results of the first pass and of weigh_kernel


@triton.jit
def _drawn_token(best, row, num_tiles, num_splits, vocab_size, tiles_block: tl.constexpr):
    parts = tl.arange(0, tiles_block)
    won = tl.load(best + row * num_tiles + parts, mask=parts < num_splits, other=LOWEST)
    return tl.minimum(id_of(tl.max(won)), vocab_size - 1)


@triton.jit
def _largest(peaks, row, num_tiles, num_splits, temperature, tiles_block: tl.constexpr):
    """The largest logit after temperature: division keeps the order."""
    return tl.div_rn(_peak(peaks, row, num_tiles, num_splits, tiles_block), temperature)


@triton.jit
def _peak(peaks, row, num_tiles, num_splits, tiles_block: tl.constexpr):
    parts = tl.arange(0, tiles_block)
    found = tl.load(peaks + row * num_tiles + parts, mask=parts < num_splits, other=-float("inf"))
    return tl.max(found)


@triton.jit
def deviation(source, full: tl.constexpr):
    """The standard deviation of a row's logits, as by deviation of reference.py."""
    quads_block: tl.constexpr = LIST_SEGMENTS * SEGMENT_QUADS
    counts = tl.zeros([quads_block], tl.int32)
    sums = tl.zeros([quads_block], tl.int64)
    squares = tl.zeros([quads_block], tl.int64)
    ids = ids_of(tl.arange(0, quads_block))
    following = load_logits(source, ids, ids < source[4], full)
    for _ in range(tl.cdiv(source[4], LIST_IDS)):
        x = following
        ids += LIST_IDS
        following = load_logits(source, ids, ids < source[4], full)  # one tile ahead
        counted = x > -float("inf")
        steps = tl.floor(tl.minimum(tl.maximum(x, -1024.0), 1024.0) * 1024 + 0.5)
        steps = tl.where(counted, steps, 0.0).to(tl.int64)
        counts += tl.sum(counted.to(tl.int32), axis=1)
        sums += tl.sum(steps, axis=1)
        squares += tl.sum(steps * steps, axis=1)
    count = tl.maximum(tl.sum(counts), 1).to(tl.float64)
    mean = tl.sum(sums).to(tl.float64) / count
    variance = tl.maximum(tl.sum(squares).to(tl.float64) / count - mean * mean, 0.0)
    return tl.sqrt_rn(variance.to(tl.float32)) * (1 / 1024)


@triton.jit
def least_kept(largest, min_p):
    low = tl.cast(LOWEST, tl.int64)
    if min_p > 0:
        low = least_key(largest + tl.log(min_p))
    return low


@triton.jit
def target_of(total, top_p):
    """The weight that top_p keeps; at least 1, since the first token is always kept."""
    return tl.maximum(total.to(tl.float64) * top_p.to(tl.float64), 1.0)


@triton.jit
def _key_of_token(source, token, temperature, full: tl.constexpr):
    x = load_logits(source, token, token < source[4], full)
    return order_key(tl.div_rn(x, temperature), token)


# The second pass


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["slots", "output_index", "out_tokens"],
)
def settle_kernel(
    logits,
    edited,
    slots,
    output_index,
    records,
    masks,
    mask_stride,
    best,
    peaks,
    segment_max,
    segment_bound,
    sums,
    segment_list,
    gathered,
    out_tokens,
    vocab_size,
    stride,
    num_segments,
    num_tiles,
    num_splits,
    full: tl.constexpr,
    segments_block: tl.constexpr,
    tiles_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Decides the token of a row."""
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature, top_p, min_p, num_sigma, top_k, by_top_k, by_top_p, filtered = load_filters(
        records, slot, vocab_size, full
    )
    token = _drawn_token(best, row, num_tiles, num_splits, vocab_size, tiles_block)
    if filtered:
        source = source_of(
            logits,
            edited,
            records,
            masks,
            mask_stride,
            row,
            slot,
            stride,
            vocab_size,
            0,
            full,
        )
        segment_max += row * num_segments
        segment_bound += row * num_segments
        segment_list += row * (num_segments + LIST_SEGMENTS)
        largest = _largest(peaks, row, num_tiles, num_splits, temperature, tiles_block)
        low = least_kept(largest, min_p)
        if full:  # noqa: SIM102, the one is known to the compiler
            if num_sigma > 0:
                peak = _peak(peaks, row, num_tiles, num_splits, tiles_block)
                least = tl.div_rn(peak - num_sigma * deviation(source, full), temperature)
                low = tl.maximum(low, least_key(least))
        target = tl.cast(1.0, tl.float64)  # a kept token has less weight before it
        settled = tl.cast(0, tl.int1)
        unweighed = by_top_p & (by_top_k | (num_sigma > 0))  # by weigh_kernel
        if not by_top_k:
            drawn = _key_of_token(source, token, temperature, full)
            settled = (drawn >= low) & (unweighed == 0)
            if by_top_p & (unweighed == 0):
                total, before = _weighed(sums, row, num_tiles, num_splits, tiles_block)
                target = target_of(total, top_p)
                rejected = before.to(tl.float64) >= target
                settled = settled & (rejected == 0)
                low = tl.where(rejected, tl.maximum(low, drawn + 1), low)
        if not settled:
            seed = load_integer(records, slot, SEED)
            index = tl.load(output_index + row).to(tl.int32)
            keys = _load_segment_keys(segment_max, temperature, num_segments, segments_block)
            least = least_of_value(low)
            if by_top_k:
                least = cut_of_segments(keys, largest, top_k, num_segments)
            segments = tl.arange(0, segments_block)
            listed = write_list(segment_list, segments, (keys >= least) & (keys > LOWEST))
            if by_top_k:
                least = tl.where(top_k <= num_segments, least_of_value(least), LOWEST + 1)
                last = key_of_last(
                    source,
                    segment_list,
                    listed,
                    gathered + row * LIST_IDS,
                    temperature,
                    least,
                    key_above(largest),
                    top_k,
                    full,
                )
                low = tl.maximum(low, last)
            # Draw a token and sum the weights before it, until a token is kept. Where the total
            # weight is not known yet, the first iteration sums it, and draws nothing.
            draws = unweighed == 0
            hot = (by_top_k == 0) & (listed > LIST_SEGMENTS)
            while not settled:
                weighs = by_top_p
                if draws:
                    num_drawn = listed
                    others = tl.cast(-float("inf"), tl.float32)
                    if hot:
                        num_drawn, others = _list_hottest(
                            segment_list,
                            listed,
                            segment_bound,
                            segment_list + num_segments,
                            segments_block,
                        )
                    drawn_list = segment_list + tl.where(hot, num_segments, 0)
                    winner = _draw(
                        source, drawn_list, num_drawn, temperature, seed, index, low, full
                    )
                    token = id_of(winner)
                    certain = value_of(winner) > others
                    weighs = certain & by_top_p
                    settled = tl.where(certain, by_top_p == 0, hot == 0)
                    if weighs:
                        low = _key_of_token(source, token, temperature, full) + 1
                    hot = hot & certain
                if weighs:
                    weight = weigh(source, segment_list, listed, temperature, largest, low, full)
                    if draws:
                        settled = weight.to(tl.float64) < target
                    else:
                        target = target_of(weight, top_p)
                draws = tl.cast(1, tl.int1)
    tl.store(out_tokens + row, tl.minimum(token, vocab_size - 1).to(tl.int64))


@triton.jit
def _weighed(sums, row, num_tiles, num_splits, tiles_block: tl.constexpr):
    parts = tl.arange(0, tiles_block)
    there = parts < num_splits
    places = (row * num_tiles + parts) * 2
    total = tl.sum(tl.load(sums + places, mask=there, other=0))
    before = tl.sum(tl.load(sums + places + 1, mask=there, other=0))
    return total, before


# Lists of segments in the order of their ids: the part of a row that remains to be searched


@triton.jit
def _load_segment_keys(segment_max, temperature, num_segments, segments_block: tl.constexpr):
    """Order keys of the segment maxima; LOWEST for padding."""
    segments = tl.arange(0, segments_block)
    maxima = tl.load(segment_max + segments, mask=segments < num_segments, other=-float("inf"))
    return tl.where(
        segments < num_segments, order_key(tl.div_rn(maxima, temperature), segments), LOWEST
    )


@triton.jit
def cut_of_segments(keys, largest, top_k, num_segments):
    """A key that the k segments with the largest maxima reach, which hold the k most likely tokens,
    and at most as many more as fill the last tile of the list."""
    wanted = tl.minimum(top_k, num_segments).to(tl.int32)
    room = tl.cdiv(wanted, LIST_SEGMENTS) * LIST_SEGMENTS
    return select(keys, tl.cast(LOWEST, tl.int64), key_above(largest), wanted, room)


@triton.jit
def _list_hottest(
    segment_list,
    listed,
    segment_bound,
    hot_list,
    segments_block: tl.constexpr,
):
    """Lists one tile of the listed segments with the largest bounds. Returns their number, and an
    upper bound of the scores in the other segments.

    The winner is nearly always among them: only tokens before `low` can beat it, and few do.
    """
    places = tl.arange(0, segments_block)
    segments = tl.load(segment_list + places, mask=places < listed, other=0)
    bounds = tl.load(segment_bound + segments, mask=places < listed, other=-float("inf"))
    keys = tl.where(places < listed, order_key(bounds, segments), LOWEST)
    high = tl.max(keys) + 1
    cut = select(keys, tl.cast(LOWEST, tl.int64), high, LIST_SEGMENTS // 2, LIST_SEGMENTS)
    others = tl.max(tl.where(keys >= cut, LOWEST, keys))
    return write_list(hot_list, segments, keys >= cut), value_of(others)


@triton.jit
def write_list(places, segments, chosen):
    """Compacts the chosen segments into `places`; returns their number."""
    tl.store(places + tl.cumsum(chosen.to(tl.int32), 0) - 1, segments, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32))


@triton.jit
def load_listed(source, segment_list, listed, tile, temperature, full: tl.constexpr):
    """(quads, ids and keys [quads, 4]) of a tile of the listed segments; keys past the end of the
    list are LOWEST."""
    quads_block: tl.constexpr = LIST_SEGMENTS * SEGMENT_QUADS
    offsets = tl.arange(0, quads_block)
    places = tile * LIST_SEGMENTS + offsets // SEGMENT_QUADS
    segments = tl.load(segment_list + places, mask=places < listed, other=0)
    # Padding has ids beyond the vocabulary.
    segments = tl.where(places < listed, segments, source[4])
    quads = segments * SEGMENT_QUADS + offsets % SEGMENT_QUADS
    ids = ids_of(quads)
    x = load_logits(source, ids, ids < source[4], full)
    keys = tl.where(ids < source[4], order_key(tl.div_rn(x, temperature), ids), LOWEST)
    return quads, ids, keys


@triton.jit
def key_of_last(
    source,
    segment_list,
    listed,
    gathered,
    temperature,
    low,
    high,
    top_k,
    full: tl.constexpr,
):
    """The key of the k-th token of the listed segments, which lies in [low, high)."""
    wanted = top_k.to(tl.int32)
    if listed <= LIST_SEGMENTS:
        keys = load_listed(source, segment_list, listed, 0, temperature, full)[2]
        keys = tl.reshape(keys, [LIST_IDS])
    else:
        # Gathers the keys in between if they fit, as they do unless k is in the thousands or
        # thousands of logits are equal; otherwise halves the interval until they do.
        inside = source[4]
        middle = low
        gathers = tl.cast(1, tl.int1)
        while gathers:
            count = _gather(source, segment_list, listed, gathered, temperature, middle, high, full)
            enough = count >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
            wanted = tl.where(enough, wanted, wanted - count)
            inside = tl.where(enough, count, inside - count)
            gathers = (high > low) & ((enough == 0) | (inside > LIST_IDS))
            middle = tl.where(inside > LIST_IDS, (low + high) >> 1, low)
        place = tl.arange(0, LIST_IDS)
        keys = tl.load(gathered + place, mask=place < inside, other=LOWEST)
    return select(keys, low, high, wanted, wanted)


@triton.jit
def _gather(
    source,
    segment_list,
    listed,
    gathered,
    temperature,
    low,
    high,
    full: tl.constexpr,
):
    """Writes the listed keys in [low, high), as many as fit. Returns their number."""
    count = tl.cast(0, tl.int32)
    for tile in range(tl.cdiv(listed, LIST_SEGMENTS)):
        keys = load_listed(source, segment_list, listed, tile, temperature, full)[2]
        keys = tl.reshape(keys, [LIST_IDS])
        chosen = (keys >= low) & (keys < high)
        places = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(gathered + places, keys, mask=chosen & (places < LIST_IDS))
        count += tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()
    return count


@triton.jit
def weigh(
    source,
    segment_list,
    listed,
    temperature,
    largest,
    low,
    full: tl.constexpr,
):
    """The total weight of the listed tokens with keys from `low` on."""
    total = tl.cast(0, tl.int64)
    for tile in range(tl.cdiv(listed, LIST_SEGMENTS)):
        keys = load_listed(source, segment_list, listed, tile, temperature, full)[2]
        total += tl.sum(tl.where(keys >= low, weight_of(value_of(keys) - largest), 0))
    return total


@triton.jit
def _draw(
    source,
    segment_list,
    listed,
    temperature,
    seed,
    index,
    low,
    full: tl.constexpr,
):
    """The order key by perturbed logits of the winner among the listed tokens with keys from `low`
    on."""
    winner = tl.cast(LOWEST, tl.int64)
    for tile in range(tl.cdiv(listed, LIST_SEGMENTS)):
        quads, ids, keys = load_listed(source, segment_list, listed, tile, temperature, full)
        score = value_of(keys) + gumbel(words_of_quads(seed, index, quads))
        score = tl.where(keys >= low, score, -float("inf"))
        winner = tl.maximum(winner, tl.max(order_key(score, ids)))
    return winner
