"""min_p, top_k and top_p behind the first pass, in Triton: one kernel that weighs, and one that
settles each row's token.

All three keep a prefix of one order (order.py), so what is kept are the keys from some `low`
on. The token drawn from all is the token drawn from the kept ones if it is kept itself; if not, it
is drawn again from those before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    GROUP_QUADS,
    SEED,
    ids_of,
    load_filters,
    load_integer,
    load_logits,
    source_of,
)

LIST_GROUPS = tl.constexpr(64)  # groups of a list that are worked on at a time
LIST_IDS = tl.constexpr(64 * 64)  # their ids; also how many keys can be gathered


@triton.jit(
    do_not_specialize=["tiles_per_program", "num_splits"],
    do_not_specialize_on_alignment=["slots"],
)
def weigh_kernel(
    logits,
    edited,
    slots,
    records,
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
    """A part of a row with top_p and without top_k: the weight of its tokens that min_p keeps, and
    of those among them that come before the token drawn."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature, _, min_p, _, by_top_k, by_top_p, _ = load_filters(records, slot, vocab_size)
    if by_top_p & (by_top_k == 0):
        source = source_of(logits, edited, records, row, slot, stride, vocab_size, full)
        token = _drawn_token(best, row, num_tiles, num_splits, vocab_size, tiles_block)
        largest = _largest(peaks, row, num_tiles, num_splits, temperature, tiles_block)
        low = _least_kept(largest, min_p)
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
            # On its way while this tile is worked on.
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

    exp as CUDA's expf has it: 2**whole * 2**part, the part from a product in two pieces and by the
    device's exp2, so that torch on the same device should give the same bits. Its last place may
    differ elsewhere, which moves the cut of top_p if the target lies within 1e-7 of a sum.
    """
    gap = tl.maximum(gap, -30.0)  # e**-30 * 2**40 < 1
    whole = tl.floor(tl.fma(gap, 1.4426950408889634, 0.5))
    part = tl.fma(gap, 1.44269502162933349609375, -whole)
    part = tl.fma(gap, 1.925963033500011e-08, part)
    scale = ((whole.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)  # 2**(whole + 40)
    return (tl.exp2(part) * scale).to(tl.int64)


# What the first pass and the weighing left


@triton.jit
def _drawn_token(best, row, num_tiles, num_splits, vocab_size, tiles_block: tl.constexpr):
    parts = tl.arange(0, tiles_block)
    won = tl.load(best + row * num_tiles + parts, mask=parts < num_splits, other=LOWEST)
    return tl.minimum(id_of(tl.max(won)), vocab_size - 1)


@triton.jit
def _largest(peaks, row, num_tiles, num_splits, temperature, tiles_block: tl.constexpr):
    """The largest logit after temperature: division keeps the order."""
    parts = tl.arange(0, tiles_block)
    found = tl.load(peaks + row * num_tiles + parts, mask=parts < num_splits, other=-float("inf"))
    return tl.div_rn(tl.max(found), temperature)


@triton.jit
def _least_kept(largest, min_p):
    low = tl.cast(LOWEST, tl.int64)
    if min_p > 0:
        low = least_key(largest + tl.log(min_p))
    return low


@triton.jit
def _target(total, top_p):
    """The first token is kept always."""
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
    best,
    peaks,
    group_max,
    group_bound,
    sums,
    group_list,
    gathered,
    out_tokens,
    vocab_size,
    stride,
    num_groups,
    num_tiles,
    num_splits,
    full: tl.constexpr,
    groups_block: tl.constexpr,
    tiles_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Writes the token of a row."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature, top_p, min_p, top_k, by_top_k, by_top_p, filtered = load_filters(
        records, slot, vocab_size
    )
    token = _drawn_token(best, row, num_tiles, num_splits, vocab_size, tiles_block)
    if filtered:
        source = source_of(logits, edited, records, row, slot, stride, vocab_size, full)
        group_max += row * num_groups
        group_bound += row * num_groups
        group_list += row * (num_groups + LIST_GROUPS)
        largest = _largest(peaks, row, num_tiles, num_splits, temperature, tiles_block)
        low = _least_kept(largest, min_p)
        target = tl.cast(1.0, tl.float64)  # what the weight before a kept token is under
        settled = tl.cast(0, tl.int1)
        if not by_top_k:
            drawn = _key_of_token(source, token, temperature, full)
            settled = drawn >= low
            if by_top_p:
                total, before = _weighed(sums, row, num_tiles, num_splits, tiles_block)
                target = _target(total, top_p)
                refused = before.to(tl.float64) >= target
                settled = settled & (refused == 0)
                low = tl.where(refused, tl.maximum(low, drawn + 1), low)
        if not settled:
            seed = load_integer(records, slot, SEED)
            index = tl.load(output_index + row).to(tl.int32)
            keys = _load_group_keys(group_max, temperature, num_groups, groups_block)
            least = least_of_value(low)
            if by_top_k:
                least = _cut_of_groups(keys, largest, top_k, num_groups)
            groups = tl.arange(0, groups_block)
            listed = _write_list(group_list, groups, (keys >= least) & (keys > LOWEST))
            if by_top_k:
                least = tl.where(top_k <= num_groups, least_of_value(least), LOWEST + 1)
                last = _key_of_last(
                    source,
                    group_list,
                    listed,
                    gathered + row * LIST_IDS,
                    temperature,
                    least,
                    key_above(largest),
                    top_k,
                    full,
                )
                low = tl.maximum(low, last)
            # Turns of a draw and the weighing of what comes before it, until a token is kept. Where
            # only now it is known what top_p counts, the first turn weighs that, and draws nothing.
            draws = (by_top_k & by_top_p) == 0
            hot = (by_top_k == 0) & (listed > LIST_GROUPS)
            while not settled:
                weighs = by_top_p
                if draws:
                    num_drawn = listed
                    others = tl.cast(-float("inf"), tl.float32)
                    if hot:
                        num_drawn, others = _list_hottest(
                            group_list, listed, group_bound, group_list + num_groups, groups_block
                        )
                    drawn_list = group_list + tl.where(hot, num_groups, 0)
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
                    weight = _weigh(source, group_list, listed, temperature, largest, low, full)
                    if draws:
                        settled = weight.to(tl.float64) < target
                    else:
                        target = _target(weight, top_p)
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


# Lists of groups, in the order of their ids: what remains to be looked at of a row


@triton.jit
def _load_group_keys(group_max, temperature, num_groups, groups_block: tl.constexpr):
    """Of the groups by their maxima; LOWEST where there is none."""
    groups = tl.arange(0, groups_block)
    maxima = tl.load(group_max + groups, mask=groups < num_groups, other=-float("inf"))
    return tl.where(groups < num_groups, order_key(tl.div_rn(maxima, temperature), groups), LOWEST)


@triton.jit
def _cut_of_groups(keys, largest, top_k, num_groups):
    """Reached by the k groups with the largest maxima, which hold the k likeliest tokens, or by
    some more that fill up the last tile of the list."""
    wanted = tl.minimum(top_k, num_groups).to(tl.int32)
    room = tl.cdiv(wanted, LIST_GROUPS) * LIST_GROUPS
    return select(keys, tl.cast(LOWEST, tl.int64), key_above(largest), wanted, room)


@triton.jit
def _list_hottest(
    group_list,
    listed,
    group_bound,
    hot_list,
    groups_block: tl.constexpr,
):
    """Lists those of the listed groups that may score most, one tile of them. Returns their number,
    and what no token of the others scores more than.

    The winner is nearly always among them: only tokens without `low` may beat it, and few do.
    """
    places = tl.arange(0, groups_block)
    groups = tl.load(group_list + places, mask=places < listed, other=0)
    bounds = tl.load(group_bound + groups, mask=places < listed, other=-float("inf"))
    keys = tl.where(places < listed, order_key(bounds, groups), LOWEST)
    high = tl.max(keys) + 1
    cut = select(keys, tl.cast(LOWEST, tl.int64), high, LIST_GROUPS // 2, LIST_GROUPS)
    others = tl.max(tl.where(keys >= cut, LOWEST, keys))
    return _write_list(hot_list, groups, keys >= cut), value_of(others)


@triton.jit
def _write_list(places, groups, chosen):
    """How many there are."""
    tl.store(places + tl.cumsum(chosen.to(tl.int32), 0) - 1, groups, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32))


@triton.jit
def load_listed(source, group_list, listed, tile, temperature, full: tl.constexpr):
    """(quads, ids and keys [quads, 4]) of a tile of the listed groups; behind the end of the list
    keys are LOWEST."""
    quads_block: tl.constexpr = LIST_GROUPS * GROUP_QUADS
    offsets = tl.arange(0, quads_block)
    places = tile * LIST_GROUPS + offsets // GROUP_QUADS
    groups = tl.load(group_list + places, mask=places < listed, other=0)
    # What is not there has ids beyond the vocabulary.
    groups = tl.where(places < listed, groups, source[4])
    quads = groups * GROUP_QUADS + offsets % GROUP_QUADS
    ids = ids_of(quads)
    x = load_logits(source, ids, ids < source[4], full)
    keys = tl.where(ids < source[4], order_key(tl.div_rn(x, temperature), ids), LOWEST)
    return quads, ids, keys


@triton.jit
def _key_of_last(
    source,
    group_list,
    listed,
    gathered,
    temperature,
    low,
    high,
    top_k,
    full: tl.constexpr,
):
    """The key of the k-th token of the listed groups. It lies from `low` to below `high`."""
    wanted = top_k.to(tl.int32)
    if listed <= LIST_GROUPS:
        keys = load_listed(source, group_list, listed, 0, temperature, full)[2]
        keys = tl.reshape(keys, [LIST_IDS])
    else:
        # Gathers the keys between, at once if they fit: they do unless k is in the thousands, or
        # thousands of logits are equal. Else it halves the distance until they do.
        inside = source[4]
        middle = low
        gathers = tl.cast(1, tl.int1)
        while gathers:
            count = _gather(source, group_list, listed, gathered, temperature, middle, high, full)
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
    group_list,
    listed,
    gathered,
    temperature,
    low,
    high,
    full: tl.constexpr,
):
    """Writes the listed keys from `low` to below `high`, as many as fit. Returns how many they
    are."""
    count = tl.cast(0, tl.int32)
    for tile in range(tl.cdiv(listed, LIST_GROUPS)):
        keys = load_listed(source, group_list, listed, tile, temperature, full)[2]
        keys = tl.reshape(keys, [LIST_IDS])
        chosen = (keys >= low) & (keys < high)
        places = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(gathered + places, keys, mask=chosen & (places < LIST_IDS))
        count += tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()
    return count


@triton.jit
def _weigh(
    source,
    group_list,
    listed,
    temperature,
    largest,
    low,
    full: tl.constexpr,
):
    """The weight of the listed tokens from key `low` on."""
    total = tl.cast(0, tl.int64)
    for tile in range(tl.cdiv(listed, LIST_GROUPS)):
        keys = load_listed(source, group_list, listed, tile, temperature, full)[2]
        total += tl.sum(tl.where(keys >= low, weight_of(value_of(keys) - largest), 0))
    return total


@triton.jit
def _draw(
    source,
    group_list,
    listed,
    temperature,
    seed,
    index,
    low,
    full: tl.constexpr,
):
    """The winner among the listed tokens from key `low` on: its key by perturbed logits."""
    winner = tl.cast(LOWEST, tl.int64)
    for tile in range(tl.cdiv(listed, LIST_GROUPS)):
        quads, ids, keys = load_listed(source, group_list, listed, tile, temperature, full)
        score = value_of(keys) + gumbel(words_of_quads(seed, index, quads))
        score = tl.where(keys >= low, score, -float("inf"))
        winner = tl.maximum(winner, tl.max(order_key(score, ids)))
    return winner
