"""The work of a step on slots before and after the model.

`read_slots` makes the inputs of decode rows from the slots' tables and advances these; `feed_slots`
makes sampled tokens the next inputs and writes them to the host. So a captured step needs nothing
from the host, and serves any later step. In Triton (kernels.py) each is one launch.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.sampling.reference import TokenScores
from minisgl.kernels.slots.state import OutputRing, SlotRows, SlotState, slot_mapping_of


def read_slots(slots: Tensor, state: SlotState, rows: SlotRows) -> None:
    """Fill `rows` for the next token of each of `slots` [num_rows] int32, and count it.

    A slot occurs once, the scratch slot any number of times. The width of rows.page_table is enough
    for the longest row.
    """
    if runs_triton(slots.device):
        from minisgl.kernels.slots import kernels

        kernels.read_slots(slots, state, rows)
        return
    index = slots.long()
    positions = state.lengths[index].long()
    real = index != state.scratch_slot
    state.lengths[index] = (positions + real).int()
    rows.slots.copy_(index)
    rows.token_ids.copy_(state.last_tokens[index])
    rows.positions.copy_(positions)
    rows.slot_mapping.copy_(slot_mapping_of(state.page_table, index, positions, state.page_size))
    rows.output_index.copy_(positions + 1 - state.prompt_lengths[index])
    rows.lengths.copy_(positions + real)
    rows.page_table.copy_(state.page_table[index, : rows.page_table.shape[1]])


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
        from minisgl.kernels.slots import kernels

        kernels.feed_slots(slots, token_ids, scores, state, ring)
        return
    state.last_tokens[slots] = token_ids.int()
    ring.next_entry.fill_((ring_entry + 1) % len(ring.token_ids))
    num_rows = len(slots)
    ring.token_ids[ring_entry, :num_rows].copy_(token_ids, non_blocking=True)
    if scores is not None:
        num_top = scores.top_ids.shape[1]
        ring.logprob[ring_entry, :num_rows].copy_(scores.logprob, non_blocking=True)
        ring.top_ids[ring_entry, :num_rows, :num_top].copy_(scores.top_ids, non_blocking=True)
        logprobs = ring.top_logprobs[ring_entry, :num_rows, :num_top]
        logprobs.copy_(scores.top_logprobs, non_blocking=True)
