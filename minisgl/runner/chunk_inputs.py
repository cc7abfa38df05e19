"""What attention and layers with states are told of the chunks of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minisgl.attention.base import PrefillBatch
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments
from minisgl.kernels.slots.slot_state import SlotState, slot_mapping_of
from minisgl.runner.chunk_tensors import ChunkTensors
from minisgl.scheduler.plan import Chunk


def with_chunk_rows(mapping: Tensor, own: Rows, page_table: Tensor, page_size: int) -> Tensor:
    """The KV slots of a rank's rows, of which `mapping` are those of decode rows."""
    slots, positions = (each[len(mapping) :] for each in (own.slots, own.positions))
    of_chunks = slot_mapping_of(page_table, slots, positions, page_size)
    return torch.cat((mapping, of_chunks))


def chunk_inputs(
    tensors: ChunkTensors | None,
    chunks: Sequence[Chunk] | None,
    num_rows: int,
    state: SlotState,
    states_of: Callable[[Tensor], Tensor],
    width: int,
) -> tuple[PrefillBatch, Segments]:
    """The chunks of a rank. tensors: None without any. chunks: None if the step is captured, when
    they may be any of all ranks. num_rows: of the rank's chunks. states_of: where layers keep the
    states of slots. width: of page tables."""
    if tensors is None:
        nothing, slots = state.lengths[:0], state.prompt_lengths[:0]
        no_chunks = PrefillBatch(state.page_table[:0], nothing, nothing, 0, (), ())
        return no_chunks, Segments(slots, slots, nothing)
    slots, ends = tensors.own_slots, tensors.own_ends.int()
    row_starts = tensors.row_starts.int()
    if chunks is not None and len(chunks) < len(slots):
        num = len(chunks)
        slots, ends, row_starts = slots[:num], ends[:num], row_starts[: num + 1]
    if len(tensors.segment_slots):
        sources, states = states_of(tensors.segment_sources), states_of(tensors.segment_slots)
        segments = Segments(sources, states, tensors.segment_starts.int())
    else:
        states = states_of(slots)
        segments = Segments(states, states, row_starts)
    prefill = PrefillBatch(
        page_table=state.page_table[slots, :width],
        row_starts=row_starts,
        ends=ends,
        num_rows=num_rows,
        starts=tuple(chunk.start for chunk in chunks or ()),
        lengths=tuple(len(chunk.token_ids) for chunk in chunks or ()),
    )
    return prefill, segments
