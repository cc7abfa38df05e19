"""What the device does for the slots of a batch around the model.

`read_slots` makes the inputs of decode rows from the slots' tables and advances these; `feed_slots`
makes sampled tokens the next inputs and tells the host. So a captured step needs nothing from the
host, and nothing of it is bound to a step. In Triton (triton_slots.py) each is one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.kernels.fused import runs_triton
from minisgl.kernels.sampling import TokenScores


@dataclass(frozen=True, slots=True)
class SlotState:
    """What the device knows of each slot. The last slot is scratch, for padded rows: its length
    stays 0, and its pages are page 0."""

    page_table: Tensor  # [num_slots + 1, max_pages] int32
    lengths: Tensor  # [num_slots + 1] int32: tokens whose KV is written
    last_tokens: Tensor  # [num_slots + 1] int32: sampled, and not computed yet
    prompt_lengths: Tensor  # [num_slots + 1] int64, of any stride
    page_size: int

    @property
    def scratch_slot(self) -> int:
        return self.page_table.shape[0] - 1


@dataclass(frozen=True, slots=True)
class SlotRows:
    """One row for each slot of a batch. Rows of the scratch slot have position and length 0."""

    slots: Tensor  # [num_rows] int64
    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    kv_index: Tensor  # [num_rows] int64, as in StepInputs
    output_index: Tensor  # [num_rows] int64: of the token that the row samples
    lengths: Tensor  # [num_rows] int32: tokens attended to, the row's own included
    page_table: Tensor  # [num_rows, max_pages] int32; columns past a row's length are undefined

    @staticmethod
    def allocate(num_rows: int, max_pages: int, device: torch.device) -> SlotRows:
        numbers = torch.zeros((5, num_rows), dtype=torch.int64, device=device)
        lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        page_table = torch.zeros((num_rows, max_pages), dtype=torch.int32, device=device)
        slots, token_ids, positions, kv_index, output_index = numbers
        return SlotRows(slots, token_ids, positions, kv_index, output_index, lengths, page_table)

    def first(self, num_rows: int, width: int) -> SlotRows:
        """A view of the first rows, and of `width` columns of their page table."""
        return SlotRows(
            slots=self.slots[:num_rows],
            token_ids=self.token_ids[:num_rows],
            positions=self.positions[:num_rows],
            kv_index=self.kv_index[:num_rows],
            output_index=self.output_index[:num_rows],
            lengths=self.lengths[:num_rows],
            page_table=self.page_table[:num_rows, :width],
        )


@dataclass(frozen=True, slots=True)
class Ring:
    """Rows of host memory that the device writes in turn, one a step.

    Pinned and mapped where the device is a GPU, so that its kernels store to it themselves.
    """

    token_ids: Tensor  # [ring, rows] int32
    logprob: Tensor  # [ring, rows] float32, and the next two as in TokenScores
    top_ids: Tensor  # [ring, rows, rivals] int32
    top_logprobs: Tensor  # [ring, rows, rivals] float32
    next_row: Tensor  # [1] int32, on the device: where the next step is written

    @staticmethod
    def allocate(size: int, num_rows: int, num_rivals: int, device: torch.device) -> Ring:
        pinned = device.type == "cuda"

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((size, *shape), dtype=dtype, pin_memory=pinned)

        return Ring(
            token_ids=zeros(num_rows, dtype=torch.int32),
            logprob=zeros(num_rows, dtype=torch.float32),
            top_ids=zeros(num_rows, num_rivals, dtype=torch.int32),
            top_logprobs=zeros(num_rows, num_rivals, dtype=torch.float32),
            next_row=torch.zeros(1, dtype=torch.int32, device=device),
        )


def kv_index_of(page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Where the cache keeps `positions` [n] int64 of `slots` [n] int64; returns int64."""
    pages = page_table[slots, positions // page_size].to(torch.int64)
    return pages * page_size + positions % page_size


def read_slots(slots: Tensor, state: SlotState, rows: SlotRows) -> None:
    """Fill `rows` for the next token of each of `slots` [num_rows] int32, and count it.

    A slot occurs once, the scratch slot any number of times. The width of rows.page_table is enough
    for the longest row.
    """
    if runs_triton(slots.device):
        from minisgl.kernels import triton_slots

        triton_slots.read_slots(slots, state, rows)
        return
    index = slots.long()
    positions = state.lengths[index].long()
    real = index != state.scratch_slot
    state.lengths[index] = (positions + real).int()
    rows.slots.copy_(index)
    rows.token_ids.copy_(state.last_tokens[index])
    rows.positions.copy_(positions)
    rows.kv_index.copy_(kv_index_of(state.page_table, index, positions, state.page_size))
    rows.output_index.copy_(positions + 1 - state.prompt_lengths[index])
    rows.lengths.copy_(positions + real)
    rows.page_table.copy_(state.page_table[index, : rows.page_table.shape[1]])


def feed_slots(
    slots: Tensor,
    token_ids: Tensor,
    scores: TokenScores | None,
    state: SlotState,
    ring: Ring,
    ring_row: int,
) -> None:
    """Make `token_ids` [num_rows] int64 the last tokens of `slots` [num_rows] int64, and write them
    and their scores to the ring.

    `ring_row` must be what ring.next_row says; kernels ask the device, so that a captured call
    writes to another row at each replay.
    """
    if runs_triton(slots.device):
        from minisgl.kernels import triton_slots

        triton_slots.feed_slots(slots, token_ids, scores, state, ring)
        return
    state.last_tokens[slots] = token_ids.int()
    ring.next_row.fill_((ring_row + 1) % len(ring.token_ids))
    num_rows = len(slots)
    ring.token_ids[ring_row, :num_rows].copy_(token_ids, non_blocking=True)
    if scores is not None:
        rivals = scores.top_ids.shape[1]
        ring.logprob[ring_row, :num_rows].copy_(scores.logprob, non_blocking=True)
        ring.top_ids[ring_row, :num_rows, :rivals].copy_(scores.top_ids, non_blocking=True)
        logprobs = ring.top_logprobs[ring_row, :num_rows, :rivals]
        logprobs.copy_(scores.top_logprobs, non_blocking=True)
