"""The two launches around a captured decode step; their references are in slots.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.sampling import TokenScores
from minisgl.kernels.slots import Ring, SlotRows, SlotState

_PAGES_AT_ONCE = 256


def read_slots(slots: Tensor, state: SlotState, rows: SlotRows) -> None:
    """As in slots.py. One program a row; of the page table it copies what the row has in use."""
    if len(slots) == 0:
        return
    _read_slot[(len(slots),)](
        slots,
        state.page_table,
        state.lengths,
        state.last_tokens,
        state.prompt_lengths,
        rows.slots,
        rows.token_ids,
        rows.positions,
        rows.kv_index,
        rows.output_index,
        rows.lengths,
        rows.page_table,
        state.page_table.stride(0),
        state.prompt_lengths.stride(0),
        rows.page_table.stride(0),
        state.scratch_slot,
        page_size=state.page_size,
        block=_PAGES_AT_ONCE,
        num_warps=1,
    )


def feed_slots(
    slots: Tensor, token_ids: Tensor, scores: TokenScores | None, state: SlotState, ring: Ring
) -> None:
    """As in slots.py; the device knows the row of the ring."""
    num_rows = len(slots)
    if scores is not None:
        rivals = scores.top_ids.shape[1]
        _send_scores[(num_rows,)](
            scores.logprob,
            scores.top_ids,
            scores.top_logprobs,
            ring.logprob,
            ring.top_ids,
            ring.top_logprobs,
            ring.next_row,
            rivals,
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
        ring.next_row,
        num_rows,
        ring.token_ids.shape[1],
        ring_size=ring.token_ids.shape[0],
        block=256,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _read_slot(
    slots: tl.tensor,
    page_table: tl.tensor,
    lengths: tl.tensor,
    last_tokens: tl.tensor,
    prompt_lengths: tl.tensor,
    row_slots: tl.tensor,
    row_tokens: tl.tensor,
    row_positions: tl.tensor,
    row_kv_index: tl.tensor,
    row_output_index: tl.tensor,
    row_lengths: tl.tensor,
    row_pages: tl.tensor,
    table_stride: tl.tensor,
    prompt_stride: tl.tensor,
    row_pages_stride: tl.tensor,
    scratch_slot: tl.tensor,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
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
    tl.store(row_kv_index + row, page * page_size + position % page_size)
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


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _feed(
    slots: tl.tensor,
    token_ids: tl.tensor,
    last_tokens: tl.tensor,
    ring: tl.tensor,
    next_row: tl.tensor,
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    ring_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program, since it moves on to the next row when it has written this one."""
    ring_row = tl.load(next_row)
    target = ring + ring_row * row_stride
    for start in range(0, num_rows, block):
        row = start + tl.arange(0, block)
        there = row < num_rows
        token = tl.load(token_ids + row, mask=there).to(tl.int32)
        tl.store(last_tokens + tl.load(slots + row, mask=there), token, mask=there)
        tl.store(target + row, token, mask=there)
    tl.debug_barrier()  # every thread has read the old one
    tl.store(next_row, (ring_row + 1) % ring_size)


@triton.jit  # type: ignore[untyped-decorator]
def _send_scores(
    logprob: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    ring_logprob: tl.tensor,
    ring_ids: tl.tensor,
    ring_logprobs: tl.tensor,
    next_row: tl.tensor,
    num_rivals: tl.tensor,
    rivals_stride: tl.tensor,
    ring_rows: tl.tensor,
    ring_rivals: tl.tensor,
    block: tl.constexpr,
) -> None:
    """A row a program; before `_feed` moves on."""
    row = tl.program_id(0)
    place = tl.load(next_row) * ring_rows + row
    tl.store(ring_logprob + place, tl.load(logprob + row))
    rival = tl.arange(0, block)
    there = rival < num_rivals
    source = row * rivals_stride + rival
    target = place * ring_rivals + rival
    ids = tl.load(top_ids + source, mask=there).to(tl.int32)
    tl.store(ring_ids + target, ids, mask=there)
    tl.store(ring_logprobs + target, tl.load(top_logprobs + source, mask=there), mask=there)
