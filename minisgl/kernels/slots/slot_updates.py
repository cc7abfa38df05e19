"""The work of a step on slots before and after the model.

`read_slots` makes the inputs of decode rows from the slots' tables and advances these; `feed_slots`
makes sampled tokens the next inputs and writes them to the host. So a captured step needs nothing
from the host, and serves any later step. In Triton (slot_kernels.py) each is one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.sampling.reference import TokenScores
from minisgl.kernels.slots.slot_state import OutputRing, SlotRows, SlotState, slot_mapping_of


def read_slots(slots: Tensor, state: SlotState, rows: SlotRows, run: int = 1) -> None:
    """Fill `rows` for the next `run` tokens of each of `slots` [num_slots] int32, and count the
    first: the token that was sampled last, then drafts.

    A slot occurs once, the scratch slot any number of times. The width of rows.page_table is enough
    for the longest row. A row is one of the scratch slot if its position has no page, if it or one
    before it in the run has no draft, and after the first if the slot takes none.
    """
    if runs_triton(slots.device):
        from minisgl.kernels.slots import slot_kernels

        slot_kernels.read_slots(slots, state, rows, run)
        return
    index = slots.long()
    positions = state.lengths[index].long()
    state.lengths[index] = (positions + (index != state.scratch_slot)).int()
    token_ids = state.last_tokens[index]
    if run > 1:
        drafts = state.drafts[index, : run - 1]
        has_draft = (drafts >= 0).cumprod(dim=1) * state.takes_drafts[index, None]
        drafts = drafts.clamp(min=0)  # what scratch rows read, too, must be tokens
        token_ids = torch.cat((token_ids[:, None], drafts), dim=1).flatten()
        is_row = torch.cat((torch.ones_like(has_draft[:, :1]), has_draft), dim=1).flatten() > 0
        offsets = torch.arange(run, device=slots.device)
        positions = (positions[:, None] + offsets).flatten()
        index = index.repeat_interleave(run)
        columns, num_columns = positions // state.page_size, state.page_table.shape[1]
        pages = state.page_table[index, columns.clamp(max=num_columns - 1)]
        is_row &= (pages > 0) & (columns < num_columns)
        index = index.where(is_row, state.scratch_slot)
        positions = positions.where(is_row, 0)
    real = index != state.scratch_slot
    rows.slots.copy_(index)
    rows.token_ids.copy_(token_ids)
    rows.positions.copy_(positions)
    rows.slot_mapping.copy_(slot_mapping_of(state.page_table, index, positions, state.page_size))
    rows.output_index.copy_(positions + 1 - state.prompt_lengths[index])
    rows.lengths.copy_(positions + real)
    rows.page_table.copy_(state.page_table[index, : rows.page_table.shape[1]])
    if state.window_table is not None:
        assert rows.windows is not None
        mapping, table = rows.windows
        mapping.copy_(slot_mapping_of(state.window_table, index, positions, state.page_size))
        table.copy_(state.window_table[index, : table.shape[1]])


def feed_slots(
    slots: Tensor,
    token_ids: Tensor,
    scores: TokenScores | None,
    state: SlotState,
    ring: OutputRing,
    ring_entry: int,
) -> None:
    """Make `token_ids` [num_rows] int64 the last tokens of `slots` [num_rows] int64, and write them
    and their scores to the ring.

    `ring_entry` must be the value of ring.next_entry; the kernels read that on the device, so that
    a captured call writes another entry at each replay.
    """
    if runs_triton(slots.device):
        from minisgl.kernels.slots import slot_kernels

        slot_kernels.feed_slots(slots, token_ids, scores, state, ring)
        return
    state.last_tokens[slots] = token_ids.int()
    ring.next_entry.fill_((ring_entry + 1) % len(ring.token_ids))
    num_rows = len(slots)
    ring.token_ids[ring_entry, :num_rows].copy_(token_ids, non_blocking=True)
    if scores is not None:
        num_top = scores.top_ids.shape[1]
        ring.logprob[ring_entry, :num_rows].copy_(scores.logprob, non_blocking=True)
        ring.rank[ring_entry, :num_rows].copy_(scores.rank, non_blocking=True)
        ring.top_ids[ring_entry, :num_rows, :num_top].copy_(scores.top_ids, non_blocking=True)
        logprobs = ring.top_logprobs[ring_entry, :num_rows, :num_top]
        logprobs.copy_(scores.top_logprobs, non_blocking=True)


def settle_runs(
    slots: Tensor, token_ids: Tensor, state: SlotState, ring: OutputRing, ring_entry: int
) -> None:
    """Decide how many tokens of each run count, after `feed_slots`, and write that to the ring's
    entry, and how many drafts each had.

    slots, token_ids: [num_runs, run] int64, of the rows of `read_slots` and of what was sampled for
    them. A token counts if all drafts before it are what was sampled, and its row is not one of the
    scratch slot.
    """
    if runs_triton(slots.device):
        from minisgl.kernels.slots import slot_kernels

        slot_kernels.settle_runs(slots, token_ids, state, ring)
        return
    own, drafted = slots[:, 0], slots[:, 1:] != state.scratch_slot
    right = token_ids[:, :-1] == state.drafts[own, : slots.shape[1] - 1]
    counts = 1 + (right & drafted).cumprod(dim=1).sum(dim=1)
    state.last_tokens[own] = token_ids.gather(1, counts[:, None] - 1)[:, 0].int()
    state.lengths[own] += (counts - 1).int()
    ring.run_lengths[ring_entry, : len(own)].copy_(counts, non_blocking=True)
    ring.num_drafted[ring_entry, : len(own)].copy_(drafted.sum(dim=1), non_blocking=True)
