"""The launches before and after the model in a decode step; their references: slot_updates.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.sampling.reference import TokenScores
from minisgl.kernels.slots.slot_state import OutputRing, SlotRows, SlotState, WindowRows

_PAGES_AT_ONCE = 256


def read_slots(slots: Tensor, state: SlotState, rows: SlotRows, run: int = 1) -> None:
    """See slot_updates.py. One program a slot; of a page table it copies what each row uses."""
    if len(slots) == 0:
        return
    window_table, windows = state.window_table, rows.windows
    if window_table is None or windows is None:  # which the kernel does not read then
        window_table, windows = state.page_table, WindowRows(rows.slot_mapping, rows.page_table)
    _read_slot[(len(slots),)](
        slots,
        state.page_table,
        state.lengths,
        state.last_tokens,
        state.prompt_lengths,
        state.drafts,
        state.takes_drafts,
        rows.slots,
        rows.token_ids,
        rows.positions,
        rows.slot_mapping,
        rows.output_index,
        rows.lengths,
        rows.page_table,
        window_table,
        windows.slot_mapping,
        windows.page_table,
        state.page_table.stride(0),
        state.prompt_lengths.stride(0),
        state.drafts.stride(0),
        rows.page_table.stride(0),
        state.scratch_slot,
        page_size=state.page_size,
        run=run,
        window=state.window,
        block=_PAGES_AT_ONCE,
        num_warps=1,
    )


def feed_slots(
    slots: Tensor, token_ids: Tensor, scores: TokenScores | None, state: SlotState, ring: OutputRing
) -> None:
    """See slot_updates.py; the index of the ring entry is read on the device."""
    num_rows = len(slots)
    if scores is not None:
        num_top = scores.top_ids.shape[1]
        _send_scores[(num_rows,)](
            scores.logprob,
            scores.rank,
            scores.top_ids,
            scores.top_logprobs,
            ring.logprob,
            ring.rank,
            ring.top_ids,
            ring.top_logprobs,
            ring.next_entry,
            num_top,
            scores.top_ids.stride(0),
            ring.top_ids.shape[1],
            ring.top_ids.shape[2],
            block=triton.next_power_of_2(max(1, ring.top_ids.shape[2])),
            num_warps=1,
        )
    _feed[(1,)](
        slots,
        token_ids,
        state.last_tokens,
        ring.token_ids,
        ring.next_entry,
        num_rows,
        ring.token_ids.shape[1],
        ring_size=ring.token_ids.shape[0],
        block=256,
        num_warps=4,
    )


def settle_runs(slots: Tensor, token_ids: Tensor, state: SlotState, ring: OutputRing) -> None:
    """See slot_updates.py, after `feed_slots`. One program a run."""
    num_runs, run = slots.shape
    if num_runs == 0:
        return
    _settle_run[(num_runs,)](
        slots,
        token_ids,
        state.lengths,
        state.last_tokens,
        state.drafts,
        ring.run_lengths,
        ring.num_drafted,
        ring.next_entry,
        state.drafts.stride(0),
        ring.run_lengths.stride(0),
        state.scratch_slot,
        run=run,
        ring_size=ring.run_lengths.shape[0],
        num_warps=1,
    )


@triton.jit
def _read_slot(
    slots,
    page_table,
    lengths,
    last_tokens,
    prompt_lengths,
    drafts,
    takes_drafts,
    row_slots,
    row_tokens,
    row_positions,
    row_slot_mapping,
    row_output_index,
    row_lengths,
    row_pages,
    window_table,
    row_window_mapping,
    row_window_pages,
    table_stride,
    prompt_stride,
    drafts_stride,
    row_pages_stride,
    scratch_slot,
    page_size: tl.constexpr,
    run: tl.constexpr,
    window: tl.constexpr,
    block: tl.constexpr,
):
    """window: of layers with a page table of their own; 0: there are none. Both tables, and their
    copies, have the same strides."""
    first = tl.program_id(0) * run
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    position = tl.load(lengths + slot)
    length = tl.where(slot == scratch_slot, 0, position + 1)
    pages = page_table + slot * table_stride
    page = tl.load(pages + position // page_size).to(tl.int64)
    prompt_length = tl.load(prompt_lengths + slot * prompt_stride)
    tl.store(row_slots + first, slot)
    tl.store(row_tokens + first, tl.load(last_tokens + slot).to(tl.int64))
    tl.store(row_positions + first, position.to(tl.int64))
    tl.store(row_slot_mapping + first, page * page_size + position % page_size)
    tl.store(row_output_index + first, position + 1 - prompt_length)
    tl.store(row_lengths + first, length)
    tl.store(lengths + slot, length)
    _copy_pages(row_pages, row_pages_stride, first, pages, 0, tl.cdiv(length, page_size), block)
    window_pages = window_table + slot * table_stride
    if window:
        _read_window(
            window_pages, row_window_mapping, row_window_pages, row_pages_stride, first, position,
            length, page_size, window, block,
        )  # fmt: skip
    if run > 1:
        is_row = (slot != scratch_slot) & (tl.load(takes_drafts + slot) > 0)
        scratch_index = 1 - tl.load(prompt_lengths + scratch_slot * prompt_stride)
    for place in tl.static_range(1, run):
        row = first + place
        draft = tl.load(drafts + slot * drafts_stride + place - 1)
        here = position + place
        column = here // page_size
        page = tl.load(pages + column, mask=column < table_stride, other=0).to(tl.int64)
        is_row = is_row & (draft >= 0) & (page > 0)
        length = tl.where(is_row, here + 1, 0)
        tl.store(row_slots + row, tl.where(is_row, slot, scratch_slot))
        tl.store(row_tokens + row, tl.maximum(draft, 0).to(tl.int64))
        tl.store(row_positions + row, tl.where(is_row, here, 0).to(tl.int64))
        tl.store(row_slot_mapping + row, tl.where(is_row, page * page_size + here % page_size, 0))
        tl.store(row_output_index + row, tl.where(is_row, here + 1 - prompt_length, scratch_index))
        tl.store(row_lengths + row, length)
        _copy_pages(row_pages, row_pages_stride, row, pages, 0, tl.cdiv(length, page_size), block)
        if window:
            _read_window(
                window_pages, row_window_mapping, row_window_pages, row_pages_stride, row, here,
                length, page_size, window, block,
            )  # fmt: skip


@triton.jit
def _copy_pages(row_pages, row_pages_stride, row, pages, first, num_pages, block: tl.constexpr):
    """Columns `first` to `num_pages` of a slot's table."""
    copy = row_pages + row.to(tl.int64) * row_pages_stride
    for start in range(first, num_pages, block):
        column = start + tl.arange(0, block)
        tl.store(
            copy + column,
            tl.load(pages + column, mask=column < num_pages),
            mask=column < num_pages,
        )


@triton.jit
def _read_window(
    table,
    row_mapping,
    row_pages,
    row_pages_stride,
    row,
    position,
    length,
    page_size: tl.constexpr,
    window: tl.constexpr,
    block: tl.constexpr,
):
    """What a row has of layers with pages of their own. table: of its slot; length: 0 of a row of
    the scratch slot."""
    page = tl.load(table + position // page_size, mask=length > 0, other=0).to(tl.int64)
    offset = tl.where(length > 0, position % page_size, 0)
    tl.store(row_mapping + row, page * page_size + offset)
    seen, num_pages = tl.maximum(length - window, 0) // page_size, tl.cdiv(length, page_size)
    _copy_pages(row_pages, row_pages_stride, row, table, seen, num_pages, block)


@triton.jit
def _settle_run(
    slots,
    token_ids,
    lengths,
    last_tokens,
    drafts,
    ring_lengths,
    ring_drafted,
    next_entry,
    drafts_stride,
    ring_stride,
    scratch_slot,
    run: tl.constexpr,
    ring_size: tl.constexpr,
):
    """`_feed` has advanced the ring before."""
    index = tl.program_id(0)
    first = index * run
    own = tl.load(slots + first)
    token = tl.load(token_ids + first)
    last, count, num_drafted = token, 1, 0
    is_right = own != scratch_slot
    for place in tl.static_range(1, run):
        draft = tl.load(drafts + own * drafts_stride + place - 1)
        is_row = tl.load(slots + first + place) != scratch_slot
        is_right = is_right & is_row & (token == draft)
        token = tl.load(token_ids + first + place)
        last = tl.where(is_right, token, last)
        count += is_right.to(tl.int32)
        num_drafted += is_row.to(tl.int32)
    tl.store(last_tokens + own, last.to(tl.int32))
    tl.store(lengths + own, tl.load(lengths + own) + count - 1)
    target = (tl.load(next_entry) + ring_size - 1) % ring_size * ring_stride + index
    tl.store(ring_lengths + target, count)
    tl.store(ring_drafted + target, num_drafted)


@triton.jit(do_not_specialize=["num_rows"])
def _feed(
    slots,
    token_ids,
    last_tokens,
    ring,
    next_entry,
    num_rows,
    entry_stride,
    ring_size: tl.constexpr,
    block: tl.constexpr,
):
    """A single program, which writes one entry and then advances the ring."""
    ring_entry = tl.load(next_entry)
    target = ring + ring_entry * entry_stride
    for start in range(0, num_rows, block):
        row = start + tl.arange(0, block)
        there = row < num_rows
        token = tl.load(token_ids + row, mask=there).to(tl.int32)
        tl.store(last_tokens + tl.load(slots + row, mask=there), token, mask=there)
        tl.store(target + row, token, mask=there)
    tl.debug_barrier()  # every thread has read the old value
    tl.store(next_entry, (ring_entry + 1) % ring_size)


@triton.jit
def _send_scores(
    logprob,
    rank,
    top_ids,
    top_logprobs,
    ring_logprob,
    ring_rank,
    ring_ids,
    ring_logprobs,
    next_entry,
    num_top,
    top_stride,
    ring_rows,
    ring_top,
    block: tl.constexpr,
):
    """One row per program. Must run before `_feed` advances the ring."""
    row = tl.program_id(0)
    place = tl.load(next_entry) * ring_rows + row
    tl.store(ring_logprob + place, tl.load(logprob + row))
    tl.store(ring_rank + place, tl.load(rank + row).to(tl.int32))
    index = tl.arange(0, block)
    there = index < num_top
    source = row * top_stride + index
    target = place * ring_top + index
    ids = tl.load(top_ids + source, mask=there).to(tl.int32)
    tl.store(ring_ids + target, ids, mask=there)
    tl.store(ring_logprobs + target, tl.load(top_logprobs + source, mask=there), mask=there)
