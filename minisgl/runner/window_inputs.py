"""The inputs of layers with a window that have pages of their own."""

from __future__ import annotations

from dataclasses import replace

from minisgl.attention.base import ForwardBatch
from minisgl.kernels.slots.slot_state import SlotRows, SlotState
from minisgl.runner.chunk_inputs import with_chunk_rows
from minisgl.runner.chunk_tensors import ChunkTensors


def with_windows(
    batch: ForwardBatch, rows: SlotRows, chunks: ChunkTensors | None, state: SlotState
) -> ForwardBatch:
    """The batch with its counterpart for windowed layers, if these have pages of their own. rows:
    its decode rows."""
    if state.window_table is None:
        return batch
    assert rows.windows is not None
    slot_mapping, prefill = rows.windows.slot_mapping, batch.chunks
    if chunks is not None:
        table, size = state.window_table, state.page_size
        slot_mapping = with_chunk_rows(slot_mapping, batch.own, table, size)
        width = prefill.page_table.shape[1]
        prefill = replace(prefill, page_table=state.window_table[chunks.own_slots, :width])
    windowed = replace(
        batch,
        slot_mapping=slot_mapping,
        decodes=replace(batch.decodes, page_table=rows.windows.page_table),
        chunks=prefill,
    )
    return replace(batch, windowed=windowed)
