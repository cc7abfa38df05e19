"""Drafts from a slot's own tokens, in one launch; the reference: ngrams.py.

A program reads the history of its slot once, 4 bytes a token, and writes `num_drafts` numbers. At
8,192 tokens that is 33 KB, and for 256 slots 8.4 MB: 3 µs at the bandwidth of an H100. The tokens
before a place come from the L1 cache, and are read only where the last one agrees.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.slots.slot_state import SlotState

_PLACES_AT_ONCE = 4096
_PLACE_BITS = 24  # of a place; config.MAX_SEQ_LEN is as large


def draft_ngrams(
    history: Tensor,
    state: SlotState,
    slots: Tensor,
    output_index: Tensor,
    token_ids: Tensor,
    num_decode_rows: int,
    run: int,
    least_match: int,
    most_match: int,
) -> None:
    """See ngrams.py, with the bounds of a match."""
    num_runs = num_decode_rows // run
    num_slots = num_runs + len(slots) - num_decode_rows
    if num_slots == 0:
        return
    num_drafts = state.drafts.shape[1]
    _draft[(num_slots,)](
        history,
        slots,
        output_index,
        token_ids,
        state.prompt_lengths,
        state.lengths,
        state.drafts,
        history.stride(0),
        state.prompt_lengths.stride(0),
        state.drafts.stride(0),
        num_runs,
        history.shape[1],
        run=run,
        num_drafts=num_drafts,
        draft_block=triton.next_power_of_2(num_drafts),
        least_match=least_match,
        most_match=most_match,
        place_bits=_PLACE_BITS,
        block=_PLACES_AT_ONCE,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_runs"])
def _draft(
    history,
    slots,
    output_index,
    token_ids,
    prompt_lengths,
    lengths,
    drafts,
    history_stride,
    prompt_stride,
    drafts_stride,
    num_runs,
    width,
    run: tl.constexpr,
    num_drafts: tl.constexpr,
    draft_block: tl.constexpr,
    least_match: tl.constexpr,
    most_match: tl.constexpr,
    place_bits: tl.constexpr,
    block: tl.constexpr,
):
    """The runs come first, then single rows."""
    index = tl.program_id(0)
    is_run = index < num_runs
    first = tl.where(is_run, index * run, num_runs * (run - 1) + index)
    slot = tl.load(slots + first).to(tl.int64)
    tokens = history + slot * history_stride
    prompt_length = tl.load(prompt_lengths + slot * prompt_stride)
    for step in tl.static_range(run):
        is_row = is_run | (step == 0)
        is_row = is_row & (tl.load(slots + first + step, mask=is_row, other=-1) == slot)
        position = tl.load(output_index + first + step, mask=is_row, other=0) + prompt_length
        sampled = tl.load(token_ids + first + step, mask=is_row, other=0).to(tl.int32)
        tl.store(tokens + tl.minimum(position, width - 1), sampled, mask=is_row)
    tl.debug_barrier()  # the whole program reads what it has written
    last = tl.load(lengths + slot)
    best = -1
    for start in range(0, last, block):
        place = start + tl.arange(0, block)
        is_match = place < last
        shared = tl.zeros((block,), tl.int32)
        for back in tl.static_range(most_match):
            suffix = tl.load(tokens + last - back, mask=last >= back, other=-1)
            is_match = is_match & (place >= back)
            token = tl.load(tokens + place - back, mask=is_match, other=-2)
            is_match = is_match & (token == suffix)
            shared += is_match.to(tl.int32)
        score = tl.where(shared >= least_match, (shared << place_bits) + place, -1)
        best = tl.maximum(best, tl.max(score, axis=0))
    match = tl.where(best < 0, 0, best & ((1 << place_bits) - 1))
    period = tl.maximum(last - match, 1)
    offset = tl.arange(0, draft_block)
    draft = tl.load(tokens + match + 1 + offset % period)
    draft = tl.where(best < 0, -1, draft)
    tl.store(drafts + slot * drafts_stride + offset, draft, mask=offset < num_drafts)
