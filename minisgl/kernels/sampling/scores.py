"""What the full variant of sampling adds, in Triton: edits and penalties before the draw, counts
and logprobs behind it."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.sampling.device_order import LOWEST, id_of, order_key, value_of
from minisgl.kernels.sampling.filters import LIST_GROUPS, load_listed
from minisgl.kernels.sampling.rows import (
    GROUP_QUADS,
    MIN_TOKENS,
    NUM_EDITS,
    float_of,
    group_maxima,
    ids_of,
    load_integer,
    load_num_logprobs,
    load_penalties,
)


@triton.jit(
    do_not_specialize=["tiles_per_program"],
    do_not_specialize_on_alignment=["slots", "output_index"],
)
def edit_kernel(
    logits,
    edited,
    slots,
    output_index,
    records,
    edits,
    prompt_seen,
    output_counts,
    raw_max,
    tile_sums,
    vocab_size,
    stride,
    edit_stride,
    num_groups,
    num_tiles,
    tiles_per_program,
    quads_block: tl.constexpr,
    edits_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """A part of a row: its logits with edits and penalties, if it has any, as float32, and what
    logprobs need of the raw ones: group maxima, and each tile's maximum and sum of exponentials."""
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    num_edits = load_integer(records, slot, NUM_EDITS)
    penalties = load_penalties(records, slot, vocab_size)
    is_edited = (penalties[0] > 0) | (num_edits > 0)
    scored = load_num_logprobs(records, slot) >= 0
    logits += row * stride
    edited += row * vocab_size
    history = slot * vocab_size
    first = tl.program_id(0) * tiles_per_program
    last = tl.minimum(first + tiles_per_program, num_tiles)
    if is_edited | scored:
        for tile in range(first, last):
            ids = ids_of(tile * quads_block + tl.arange(0, quads_block))
            mask = ids < vocab_size
            x = tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)
            if scored:
                groups = tile * (quads_block // GROUP_QUADS) + tl.arange(
                    0, quads_block // GROUP_QUADS
                )
                maxima = group_maxima(x)
                tl.store(raw_max + row * num_groups + groups, maxima, mask=groups < num_groups)
                largest = tl.max(maxima)
                finite = tl.where(largest == -float("inf"), 0.0, largest)
                sums = tile_sums + (row * num_tiles + tile) * 2
                tl.store(sums, largest)
                tl.store(sums + 1, tl.sum(tl.exp(x - finite)))
            if is_edited:
                x = _penalize(x, ids, penalties, prompt_seen, output_counts, history, mask)
                tl.store(edited + ids, x, mask=mask)
    if is_edited:
        # An id may occur a second time, to be masked: that comes last.
        min_tokens = load_integer(records, slot, MIN_TOKENS)
        end_of_masks = tl.where(tl.load(output_index + row) < min_tokens, num_edits, 0)
        for masking in tl.static_range(2):
            tl.debug_barrier()
            for start in range(0, num_edits, edits_block):
                place = start + tl.arange(0, edits_block)
                there = place < num_edits
                edit = tl.load(edits + slot * edit_stride + place, mask=there, other=0)
                ids = edit.to(tl.int32)
                bias = float_of(edit >> 32)
                is_mask = bias == -float("inf")
                use = there & (ids >= first * quads_block * 4) & (ids < last * quads_block * 4)
                if masking:
                    tl.store(edited + ids, bias, mask=use & is_mask & (place < end_of_masks))
                else:
                    use = use & (is_mask == 0)
                    x = tl.load(logits + ids, mask=use, other=0.0).to(tl.float32) + bias
                    x = _penalize(x, ids, penalties, prompt_seen, output_counts, history, use)
                    tl.store(edited + ids, x, mask=use)


@triton.jit
def _penalize(x, ids, penalties, prompt_seen, output_counts, history, mask):
    """As in sampling.py; a row with penalties has a history, which begins at `history`."""
    if prompt_seen is not None:
        num_penalized, repetition, frequency, presence = penalties
        mask = mask & (ids < num_penalized)
        count = tl.load(output_counts + history + ids, mask=mask, other=0)
        seen = tl.load(prompt_seen + history + ids, mask=mask, other=0) != 0
        generated = count > 0
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(seen | generated, repeated, x)
        x = x - count.to(tl.float32) * frequency - tl.where(generated, presence, 0.0)
    return x


@triton.jit(
    do_not_specialize_on_alignment=["slots", "out_tokens", "logprob", "top_ids", "top_logprobs"],
)
def record_kernel(
    logits,
    slots,
    records,
    out_tokens,
    output_counts,
    raw_max,
    tile_sums,
    group_list,
    logprob,
    top_ids,
    top_logprobs,
    vocab_size,
    stride,
    num_groups,
    num_tiles,
    num_top,
    groups_block: tl.constexpr,
    tiles_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Counts a row's token if the row has penalties, and writes its logprob and the top logprobs if
    the row wants them.

    The likeliest tokens are taken one by one: first the groups with the largest maxima, then their
    tokens.
    """
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(out_tokens + row)
    if output_counts is not None:  # noqa: SIM102, the one is known to the compiler
        if load_penalties(records, slot, vocab_size)[0] > 0:
            tl.atomic_add(output_counts + slot * vocab_size + token, 1)
    wanted = tl.minimum(load_num_logprobs(records, slot), num_top)
    if wanted >= 0:
        logits += row * stride
        group_list += row * (num_groups + LIST_GROUPS)
        tiles = tl.arange(0, tiles_block)
        sums = tile_sums + (row * num_tiles + tiles) * 2
        maxima = tl.load(sums, mask=tiles < num_tiles, other=-float("inf"))
        largest = tl.max(maxima)
        parts = tl.load(sums + 1, mask=tiles < num_tiles, other=0.0)
        log_sum = tl.log(tl.sum(parts * tl.exp(maxima - largest)))
        x = tl.load(logits + token).to(tl.float32)
        tl.store(logprob + row, x - largest - log_sum)

        groups = tl.arange(0, groups_block)
        exists = groups < num_groups
        maxima = tl.load(raw_max + row * num_groups + groups, mask=exists, other=-float("inf"))
        keys = tl.where(exists, order_key(maxima, groups), LOWEST)
        listed = tl.minimum(wanted, num_groups)
        for place in range(listed):
            best = tl.max(keys)
            tl.store(group_list + place, id_of(best))
            keys = tl.where(keys == best, LOWEST, keys)
        tl.debug_barrier()
        source = (logits, logits, vocab_size, 0, vocab_size)
        candidates = load_listed(source, group_list, listed, 0, 1.0, False)[2]
        for place in range(wanted):
            best = tl.max(candidates)
            candidates = tl.where(candidates == best, LOWEST, candidates)
            tl.store(top_ids + row * num_top + place, id_of(best).to(tl.int64))
            score = value_of(best) - largest - log_sum
            tl.store(top_logprobs + row * num_top + place, score)
