"""The first pass over the logits, in Triton: the best token of every row before filters, and the
maxima and bounds that spare filters and rejected draws another pass."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.sampling.device_order import order_key
from minisgl.kernels.sampling.filters import load_filters
from minisgl.kernels.sampling.noise import gumbel, most_gumbel, words_of_quads
from minisgl.kernels.sampling.rows import (
    SEED,
    SEGMENT_QUADS,
    ids_of,
    load_integer,
    load_logits,
    load_num_logprobs,
    segment_maxima,
    source_of,
)


@triton.jit(
    do_not_specialize=["tiles_per_program", "first_id"],
    do_not_specialize_on_alignment=["slots", "output_index"],
)
def draw_kernel(
    logits,
    edited,
    slots,
    output_index,
    records,
    masks,
    mask_stride,
    best_out,
    peaks_out,
    segment_max,
    segment_bound,
    vocab_size,
    stride,
    num_segments,
    num_tiles,
    tiles_per_program,
    first_id,
    full: tl.constexpr,
    processed: tl.constexpr,
    quads_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One part of a row: the order key of its best token unless the row has top_k; if the row is
    filtered, the largest logit, and the maximum logit and an upper bound of the scores of each
    segment. processed: the maxima also of a row that wants logprobs.

    The logits start at id `first_id`, a multiple of 4; the keys have the ids of the vocabulary.
    """
    wait_for_previous(pdl)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    index = tl.load(output_index + row).to(tl.int32)
    seed = load_integer(records, slot, SEED)
    temperature, _, _, _, _, by_top_k, _, filtered = load_filters(records, slot, vocab_size, full)
    has_maxima = filtered
    if processed:
        has_maxima = filtered | (load_num_logprobs(records, slot) >= 0)
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
        first_id,
        full,
    )
    segment_max += row * num_segments
    segment_bound += row * num_segments

    first = tl.program_id(0) * tiles_per_program
    best = tl.full([quads_block, 4], -float("inf"), tl.float32)
    best_ids = ids_of(first * quads_block + tl.arange(0, quads_block))
    bar = tl.max(best)  # the best of all lanes
    peaks = tl.full([quads_block // SEGMENT_QUADS], -float("inf"), tl.float32)
    last = tl.minimum(first + tiles_per_program, num_tiles)
    end = tl.minimum(last * quads_block * 4, vocab_size)
    following = load_logits(source, best_ids, best_ids < end, full)
    for tile in range(first, last):
        x = following
        quads = tile * quads_block + tl.arange(0, quads_block)
        ids = ids_of(quads)
        # Loaded one tile ahead.
        following = load_logits(source, ids + quads_block * 4, ids + quads_block * 4 < end, full)
        segments = tile * (quads_block // SEGMENT_QUADS) + tl.arange(
            0, quads_block // SEGMENT_QUADS
        )
        if has_maxima:
            maxima = segment_maxima(x)
            tl.store(segment_max + segments, maxima, mask=segments < num_segments)
            peaks = tl.maximum(peaks, maxima)
        skipped = by_top_k
        if masks is not None:
            barren = source[6] > 0  # under a mask most tiles have no token that is allowed
            if barren:
                barren = tl.max(x) == -float("inf")
            if barren & filtered:
                bounds = segment_maxima(x)
                tl.store(segment_bound + segments, bounds, mask=segments < num_segments)
            skipped = skipped | barren
        if not skipped:
            if temperature > 0:
                words = words_of_quads(seed, index, quads + first_id // 4)
                inverse = 1 / temperature
                bound = tl.maximum(x * (inverse * (1 - 1e-6)), x * (inverse * (1 + 1e-6)))
                bound += most_gumbel(words)
                if filtered:
                    tl.store(
                        segment_bound + segments,
                        segment_maxima(bound),
                        mask=segments < num_segments,
                    )
                if tl.max(bound) >= bar:
                    score = tl.div_rn(x, temperature) + gumbel(words)
                    # Of equal scores that of the earlier tile stays, which has the lower ids.
                    ahead = score > best
                    best = tl.where(ahead, score, best)
                    best_ids = tl.where(ahead, ids, best_ids)
                    bar = tl.max(best)
            else:
                ahead = x > best
                best = tl.where(ahead, x, best)
                best_ids = tl.where(ahead, ids, best_ids)
    part = row * num_tiles + tl.program_id(0)
    tl.store(best_out + part, tl.max(order_key(best, best_ids + first_id)))
    if filtered:
        tl.store(peaks_out + part, tl.max(peaks))
