"""The additions of the full variant of sampling, in Triton: edits and penalties before the draw,
counts and logprobs after it."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.sampling.device_order import LOWEST, id_of, order_key, value_of
from minisgl.kernels.sampling.filters import LIST_IDS, LIST_SEGMENTS, load_listed, write_list
from minisgl.kernels.sampling.kept import weigh_kept
from minisgl.kernels.sampling.rows import (
    MIN_TOKENS,
    NUM_EDITS,
    SEGMENT_QUADS,
    float_of,
    ids_of,
    load_integer,
    load_logits,
    load_num_logprobs,
    load_penalties,
    segment_maxima,
    source_of,
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
    num_segments,
    num_tiles,
    tiles_per_program,
    quads_block: tl.constexpr,
    edits_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One part of a row: its logits with edits and penalties, if it has any, as float32; and if it
    wants logprobs, the maxima of the raw logits by segment, and each tile's maximum and sum of
    exponentials."""
    wait_for_previous(pdl)
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
                segments = tile * (quads_block // SEGMENT_QUADS) + tl.arange(
                    0, quads_block // SEGMENT_QUADS
                )
                maxima = segment_maxima(x)
                tl.store(
                    raw_max + row * num_segments + segments, maxima, mask=segments < num_segments
                )
                largest = tl.max(maxima)
                finite = tl.where(largest == -float("inf"), 0.0, largest)
                sums = tile_sums + (row * num_tiles + tile) * 2
                tl.store(sums, largest)
                tl.store(sums + 1, tl.sum(tl.exp(x - finite)))
            if is_edited:
                x = _penalize(x, ids, penalties, prompt_seen, output_counts, history, mask)
                tl.store(edited + ids, x, mask=mask)
    if is_edited:
        # An id may occur a second time to be masked, which comes last.
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
    """Apply repetition, then frequency and presence penalty to the logits x of `ids`. `history`:
    the offset of the slot's tokens in the tables."""
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
    do_not_specialize_on_alignment=[
        *("slots", "out_tokens", "logprob", "rank", "top_ids", "top_logprobs"),
    ],
)
def record_kernel(
    logits,
    edited,
    slots,
    records,
    masks,
    mask_stride,
    out_tokens,
    output_counts,
    segment_max,
    tile_sums,
    segment_list,
    gathered,
    logprob,
    rank,
    top_ids,
    top_logprobs,
    vocab_size,
    stride,
    num_segments,
    num_tiles,
    num_top,
    lists: tl.constexpr,
    processed: tl.constexpr,
    segments_block: tl.constexpr,
    tiles_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Counts a row's token if the row has penalties, and writes its logprob and rank and the top
    logprobs if the row wants them.

    Without `processed`, the logprobs are those of the raw logits, whose maxima are in segment_max;
    with it, those of what is left of the logits that the draw has read, whose maxima are there.
    The rank is counted in the segments whose maxima reach the token. The likeliest tokens are
    selected one by one: first the segments with the largest maxima, then their tokens. `lists`: 1
    or 2, each of LIST_SEGMENTS segments, which has to be enough for num_top.
    """
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(out_tokens + row)
    if output_counts is not None:  # noqa: SIM102, the one is known to the compiler
        if load_penalties(records, slot, vocab_size)[0] > 0:
            tl.atomic_add(output_counts + slot * vocab_size + token, 1)
    wanted = tl.minimum(load_num_logprobs(records, slot), num_top)
    if wanted >= 0:
        segment_list += row * (num_segments + LIST_SEGMENTS)
        segments = tl.arange(0, segments_block)
        exists = segments < num_segments
        segment_max += row * num_segments
        maxima = tl.load(segment_max + segments, mask=exists, other=-float("inf"))
        if processed:
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
                True,
            )
            gathered += row * LIST_IDS
            temperature, low, largest, log_sum = weigh_kept(
                source, records, slot, maxima, segment_list, gathered, num_segments
            )
        else:
            source = (logits + row * stride, logits, vocab_size, 0, vocab_size)
            temperature = 1.0
            tiles = tl.arange(0, tiles_block)
            sums = tile_sums + (row * num_tiles + tiles) * 2
            peaks = tl.load(sums, mask=tiles < num_tiles, other=-float("inf"))
            largest = tl.max(peaks)
            parts = tl.load(sums + 1, mask=tiles < num_tiles, other=0.0)
            log_sum = tl.log(tl.sum(parts * tl.exp(peaks - largest)))
        x = load_logits(source, token, token < vocab_size, processed)
        tl.store(logprob + row, tl.div_rn(x, temperature) - largest - log_sum)

        own, before = order_key(x, token), tl.cast(0, tl.int32)
        listed = write_list(segment_list, segments, exists & (maxima >= x))
        for tile in range(tl.cdiv(listed, LIST_SEGMENTS)):
            candidates = load_listed(source, segment_list, listed, tile, 1.0, processed)[2]
            before += tl.sum((candidates > own).to(tl.int32))
        tl.store(rank + row, before.to(tl.int64) + 1)
        tl.debug_barrier()

        keys = tl.where(exists, order_key(maxima, segments), LOWEST)
        listed = tl.minimum(wanted, num_segments)
        for place in range(listed):
            best = tl.max(keys)
            tl.store(segment_list + place, id_of(best))
            keys = tl.where(keys == best, LOWEST, keys)
        tl.debug_barrier()
        candidates = load_listed(source, segment_list, listed, 0, 1.0, processed)[2]
        others = candidates
        if lists > 1:
            others = load_listed(source, segment_list, listed, 1, 1.0, processed)[2]
        for place in range(wanted):
            best = tl.max(candidates)
            if lists > 1:
                best = tl.maximum(best, tl.max(others))
                others = tl.where(others == best, LOWEST, others)
            candidates = tl.where(candidates == best, LOWEST, candidates)
            tl.store(top_ids + row * num_top + place, id_of(best).to(tl.int64))
            scaled = tl.div_rn(value_of(best), temperature)
            score = scaled - largest - log_sum
            if processed:
                score = tl.where(order_key(scaled, id_of(best)) >= low, score, -float("inf"))
            tl.store(top_logprobs + row * num_top + place, score)
