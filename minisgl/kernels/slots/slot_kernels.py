"""The launches before and after the model in a decode step; their references: slot_updates.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.sampling.reference import TokenScores
from minisgl.kernels.slots.slot_state import OutputRing, SlotRows, SlotState, WindowRows

_PAGES_AT_ONCE = 256


def read_slots(slots: Tensor, state: SlotState, rows: SlotRows) -> None:
    """As in slot_updates.py. One program a row; of a page table it copies what the row uses."""
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
        rows.page_table.stride(0),
        state.scratch_slot,
        page_size=state.page_size,
        window=state.window,
        block=_PAGES_AT_ONCE,
        num_warps=1,
    )


def feed_slots(
    slots: Tensor, token_ids: Tensor, scores: TokenScores | None, state: SlotState, ring: OutputRing
) -> None:
    """As in slot_updates.py; the index of the ring entry is read on the device."""
    num_rows = len(slots)
    if scores is not None:
        num_top = scores.top_ids.shape[1]
        _send_scores[(num_rows,)](
            scores.logprob,
            scores.top_ids,
            scores.top_logprobs,
            ring.logprob,
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


@triton.jit
def _read_slot(
    slots,
    page_table,
    lengths,
    last_tokens,
    prompt_lengths,
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
    row_pages_stride,
    scratch_slot,
    page_size: tl.constexpr,
    window: tl.constexpr,
    block: tl.constexpr,
):
    """window: of layers with a page table of their own; 0: there are none. Both tables, and their
    copies, have the same strides."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(lengths + slot)
    length = tl.where(slot == scratch_slot, 0, position + 1)
    pages = page_table + slot * table_stride
    page = tl.load(pages + position // page_size).to(tl.int64)
    prompt_length = tl.load(prompt_lengths + slot * prompt_stride)
    tl.store(row_slots + row, slot)
    tl.store(row_tokens + row, tl.load(last_tokens + slot).to(tl.int64))
    tl.store(row_positions + row, position.to(tl.int64))
    tl.store(row_slot_mapping + row, page * page_size + position % page_size)
    tl.store(row_output_index + row, position + 1 - prompt_length)
    tl.store(row_lengths + row, length)
    tl.store(lengths + slot, length)
    copy = row_pages + row.to(tl.int64) * row_pages_stride
    num_pages = tl.cdiv(length, page_size)
    for start in range(0, num_pages, block):
        column = start + tl.arange(0, block)
        tl.store(
            copy + column,
            tl.load(pages + column, mask=column < num_pages),
            mask=column < num_pages,
        )
    if window:
        pages = window_table + slot * table_stride
        page = tl.load(pages + position // page_size).to(tl.int64)
        tl.store(row_window_mapping + row, page * page_size + position % page_size)
        copy = row_window_pages + row.to(tl.int64) * row_pages_stride
        for start in range(tl.maximum(length - window, 0) // page_size, num_pages, block):
            column = start + tl.arange(0, block)
            tl.store(
                copy + column,
                tl.load(pages + column, mask=column < num_pages),
                mask=column < num_pages,
            )


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
    top_ids,
    top_logprobs,
    ring_logprob,
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
    index = tl.arange(0, block)
    there = index < num_top
    source = row * top_stride + index
    target = place * ring_top + index
    ids = tl.load(top_ids + source, mask=there).to(tl.int32)
    tl.store(ring_ids + target, ids, mask=there)
    tl.store(ring_logprobs + target, tl.load(top_logprobs + source, mask=there), mask=there)
