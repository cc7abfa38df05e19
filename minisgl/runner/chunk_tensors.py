"""The chunks of a step: packed into one array on the host, and split on the device.

Where ranks divide requests, each needs of the chunks of all what their rows are and which are
sampled, and of its own chunks where their keys, values and states are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from minisgl.runner.row_order import RowOrder
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import Chunk, StepPlan


@dataclass(frozen=True, slots=True)
class ChunkTensors:
    """The chunks of a step on the device; all tensors are int64."""

    # of all ranks
    numbers: Tensor  # [3, num_chunk_rows]: slots, token ids and positions, in the order of the rows
    slots: Tensor  # [num_chunks]
    ends: Tensor  # [num_chunks]
    last_rows: Tensor  # [num_chunks]: among all rows of the step, whose number an empty chunk has
    next_tokens: Tensor  # [num_chunks]: that follow the chunks; -1 where they are not known
    sample_rows: Tensor  # [num_chunk_samples]: the sampled rows, among all rows of the step
    sample_slots: Tensor  # [num_chunk_samples]
    sample_ends: Tensor  # [num_chunk_samples]
    # of this rank, which may have fewer chunks than there are
    row_starts: Tensor  # [num_chunks + 1], counted from its first chunk row
    own_slots: Tensor  # [num_chunks]
    own_ends: Tensor  # [num_chunks]
    segment_sources: Tensor  # [num_segments], as the others of Segments
    segment_slots: Tensor
    segment_starts: Tensor

    @staticmethod
    def split(packed: Tensor, shape: StepShape) -> ChunkTensors:
        """Split the tensor that `pack_chunks` made into views."""
        chunks = shape.num_chunks
        sizes = [3 * shape.num_chunk_rows, *[chunks] * 4, *[shape.num_chunk_samples] * 3]
        sizes += [chunks + 1, chunks, chunks]
        sizes += [shape.num_segments, shape.num_segments, shape.num_segments + 1]
        numbers, *others = packed.split(sizes)
        return ChunkTensors(numbers.view(3, -1), *others)


_Part = tuple[Sequence[ArrayLike], int, int]  # content, size, padding


def pack_chunks(plan: StepPlan, shape: StepShape, order: RowOrder) -> NDArray[np.int64]:
    """Concatenate the parts of `ChunkTensors`, each padded at its end.

    Works on whole arrays: a loop over thousands of tokens would block the event loop.
    """
    chunks, own, rows = plan.chunks, order.own_chunks(plan), order.rows_of(plan, shape)
    firsts, scratch_slot = order.first_rows(plan, rows), order.num_slots
    lasts = [first + len(chunk.token_ids) - 1 for chunk, first in zip(chunks, firsts, strict=True)]
    sampled = [place for place, chunk in enumerate(chunks) if chunk.samples]
    slots, ends = [chunk.slot for chunk in chunks], [chunk.end for chunk in chunks]
    own_slots, lengths = [chunk.slot for chunk in own], [len(chunk.token_ids) for chunk in own]
    row_starts = [*accumulate(lengths, initial=0)]
    num_chunks, num_samples = shape.num_chunks, shape.num_chunk_samples
    num_before = [rows.run * num for num in accumulate(rows.decodes)]  # decode rows
    numbers = np.zeros((3, shape.num_chunk_rows), dtype=np.int64)
    numbers[0] = scratch_slot
    for chunk, first in zip(chunks, firsts, strict=True):
        at = first - num_before[order.rank_of(chunk.slot)]  # among the chunk rows of all ranks
        of_chunk = numbers[:, at : at + len(chunk.token_ids)]
        of_chunk[0], of_chunk[1] = chunk.slot, chunk.token_ids
        of_chunk[2] = np.arange(chunk.start, chunk.end)
    parts: tuple[_Part, ...] = (
        ([numbers.ravel()], numbers.size, 0),
        ([slots], num_chunks, scratch_slot),
        ([ends], num_chunks, 0),
        ([lasts], num_chunks, shape.num_rows),
        ([[chunk.next_token for chunk in chunks]], num_chunks, -1),
        ([[lasts[place] for place in sampled]], num_samples, 0),
        ([[slots[place] for place in sampled]], num_samples, scratch_slot),
        ([[ends[place] for place in sampled]], num_samples, 0),
        ([row_starts], num_chunks + 1, row_starts[-1]),
        ([own_slots], num_chunks, scratch_slot),
        ([[chunk.end for chunk in own]], num_chunks, 0),
        *_pack_segments(own, shape, row_starts, scratch_slot),
    )
    packed = np.empty(sum(size for _, size, _ in parts), dtype=np.int64)
    at = 0
    for pieces, size, filler in parts:
        end = at + size
        for piece in pieces:
            values = np.asarray(piece, dtype=np.int64)
            packed[at : at + len(values)] = values
            at += len(values)
        packed[at:end] = filler
        at = end
    return packed


def _pack_segments(
    chunks: Sequence[Chunk], shape: StepShape, row_starts: Sequence[int], scratch_slot: int
) -> tuple[_Part, ...]:
    """A segment up to each snapshot that a chunk leaves, and one up to its end, though it may have
    no rows."""
    sources: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    for chunk, start in zip(chunks, row_starts[:-1], strict=True):
        left = [snapshot_slot(taken.snapshot, scratch_slot) for taken in chunk.snapshots]
        sources += [chunk.slot, *left]
        slots += [*left, chunk.slot]
        starts += [start, *(start + taken.end - chunk.start for taken in chunk.snapshots)]
    size, end = shape.num_segments, row_starts[-1]
    if not size:
        return (([[end]], 1, end),)
    return (
        ([sources], size, scratch_slot),
        ([slots], size, scratch_slot),
        ([starts], size + 1, end),
    )


def snapshot_slot(snapshot: int, scratch_slot: int) -> int:
    """The index of a snapshot among the states, in which it comes behind the scratch slot."""
    return scratch_slot + 1 + snapshot
