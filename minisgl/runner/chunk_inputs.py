"""The inputs of a step that come of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minisgl.attention.base import ForwardBatch, PrefillBatch
from minisgl.kernels.segments import Segments
from minisgl.kernels.slots.slot_state import SlotState, slot_mapping_of
from minisgl.runner.chunk_tensors import ChunkTensors
from minisgl.scheduler.plan import Chunk


def with_chunks(
    batch: ForwardBatch,
    tensors: ChunkTensors,
    chunks: Sequence[Chunk] | None,
    state: SlotState,
    states_of: Callable[[Tensor], Tensor],
    width: int,
) -> ForwardBatch:
    """The batch, which has the decode rows of a rank, with the rank's chunks. chunks: None if the
    step is captured, when they may be any of all. states_of: where layers keep the states of slots.
    width: of page tables."""
    num = len(tensors.own_slots) if chunks is None else len(chunks)
    slots, row_starts = tensors.own_slots[:num], tensors.row_starts[: num + 1].int()
    if len(tensors.segment_slots):
        sources, states = tensors.segment_sources, tensors.segment_slots
        bounds = tensors.segment_starts.int()
        segments = Segments(states_of(sources), states_of(states), bounds)
    else:
        states = states_of(slots)
        segments = Segments(states, states, row_starts)
    mapping = slot_mapping_of(
        state.page_table, tensors.token_slots, tensors.positions, state.page_size
    )
    return replace(
        batch,
        positions=torch.cat((batch.positions, tensors.positions)),
        slot_mapping=torch.cat((batch.slot_mapping, mapping)),
        chunks=PrefillBatch(
            page_table=state.page_table[slots, :width],
            row_starts=row_starts,
            ends=tensors.own_ends[:num].int(),
            num_rows=len(tensors.positions),
            starts=tuple(chunk.start for chunk in chunks or ()),
            lengths=tuple(len(chunk.token_ids) for chunk in chunks or ()),
        ),
        slots=batch.slots._replace(segments=segments),
    )
