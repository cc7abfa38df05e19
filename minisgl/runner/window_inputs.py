"""The inputs of layers with a window that have pages of their own."""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl.attention.base import ForwardBatch
from minisgl.kernels.slots.slot_state import SlotRows, SlotState, slot_mapping_of
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
        of_chunks = batch.own.part(slice(len(slot_mapping), None))
        mapping = slot_mapping_of(
            state.window_table, of_chunks.slots, of_chunks.positions, state.page_size
        )
        slot_mapping = torch.cat((slot_mapping, mapping))
        width = prefill.page_table.shape[1]
        prefill = replace(prefill, page_table=state.window_table[chunks.own_slots, :width])
    windowed = replace(
        batch,
        slot_mapping=slot_mapping,
        decodes=replace(batch.decodes, page_table=rows.windows.page_table),
        chunks=prefill,
    )
    return replace(batch, windowed=windowed)
