"""The chunks of a step: packed into one array on the host, and split on the device.

The *shape* of a step is its number of decode rows, which come first, and of chunk rows. An eager
step has the shape of its plan. The shape of a captured step is at least as large, with padding:
decode rows of the scratch slot, empty chunks, and chunk rows of the scratch slot at position 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from minisgl.scheduler.plan import StepPlan


class StepShape(NamedTuple):
    """The number of rows of each kind in a step; without chunk rows there are no chunks."""

    num_decodes: int
    num_chunk_rows: int = 0
    num_chunks: int = 0
    num_chunk_samples: int = 0  # chunks whose last row is sampled
    num_snapshots: int = 0  # that the chunks leave of the states of their requests
    run: int = 1  # rows of each decoded request

    @property
    def num_decode_rows(self) -> int:
        return self.num_decodes * self.run

    @property
    def num_segments(self) -> int:
        """Of Segments; 0 if each chunk is one."""
        return self.num_chunks + self.num_snapshots if self.num_snapshots else 0

    @property
    def num_rows(self) -> int:
        return self.num_decode_rows + self.num_chunk_rows

    @staticmethod
    def of(plan: StepPlan) -> StepShape:
        num_chunk_rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        num_decodes, num_chunks = len(plan.decode_slots), len(plan.chunks)
        snapshots = sum(len(chunk.snapshots) for chunk in plan.chunks)
        return StepShape(
            *(num_decodes, num_chunk_rows, num_chunks),
            *(plan.num_chunk_samples, snapshots, plan.max_run),
        )


@dataclass(frozen=True, slots=True)
class ChunkTensors:
    """The chunks of a step on the device; all tensors are int64."""

    token_ids: Tensor  # [num_chunk_rows]
    positions: Tensor  # [num_chunk_rows]
    token_slots: Tensor  # [num_chunk_rows]
    row_starts: Tensor  # [num_chunks + 1]
    slots: Tensor  # [num_chunks]
    ends: Tensor  # [num_chunks]
    sample_rows: Tensor  # [num_chunk_samples]: the sampled rows, counted from the first chunk row
    sample_slots: Tensor  # [num_chunk_samples]
    sample_ends: Tensor  # [num_chunk_samples]
    next_tokens: Tensor  # [num_chunks]: that follow the chunks; -1 where they are not known
    segment_sources: Tensor  # [num_segments], as the others of Segments
    segment_slots: Tensor
    segment_starts: Tensor

    @staticmethod
    def split(packed: Tensor, shape: StepShape) -> ChunkTensors:
        """Split the tensor that `pack_chunks` made into views."""
        tokens, chunks = shape.num_chunk_rows, shape.num_chunks
        sizes = [tokens] * 3 + [chunks + 1] + [chunks] * 2 + [shape.num_chunk_samples] * 3
        sizes += [chunks] + [shape.num_segments] * 2 + [shape.num_segments + 1]
        return ChunkTensors(*packed.split(sizes))


_Part = tuple[Sequence[ArrayLike], int, int]  # content, size, padding


def pack_chunks(plan: StepPlan, shape: StepShape, scratch_slot: int) -> NDArray[np.int64]:
    """Concatenate the parts of `ChunkTensors`, each padded at its end.

    Works on whole arrays: a loop over thousands of tokens would block the event loop.
    """
    chunks = plan.chunks
    lengths = [len(chunk.token_ids) for chunk in chunks]
    row_starts = [0, *itertools.accumulate(lengths)]
    slots = [chunk.slot for chunk in chunks]
    ends = [chunk.end for chunk in chunks]
    sampling = [place for place, chunk in enumerate(chunks) if chunk.samples]
    room, num_chunks, num_samples = shape[1:4]
    parts: tuple[_Part, ...] = (
        ([chunk.token_ids for chunk in chunks], room, 0),
        ([np.arange(chunk.start, chunk.end) for chunk in chunks], room, 0),
        ([np.repeat(np.array(slots, dtype=np.int64), lengths)], room, scratch_slot),
        ([row_starts], num_chunks + 1, row_starts[-1]),
        ([slots], num_chunks, scratch_slot),
        ([ends], num_chunks, 0),
        ([[row_starts[place + 1] - 1 for place in sampling]], num_samples, 0),
        ([[slots[place] for place in sampling]], num_samples, scratch_slot),
        ([[ends[place] for place in sampling]], num_samples, 0),
        ([[chunk.next_token for chunk in chunks]], num_chunks, -1),
        *_pack_segments(plan, shape, row_starts, scratch_slot),
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
    plan: StepPlan, shape: StepShape, row_starts: Sequence[int], scratch_slot: int
) -> tuple[_Part, ...]:
    """A segment up to each snapshot that a chunk leaves, and one up to its end, though it may have
    no rows."""
    sources: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    for chunk, start in zip(plan.chunks, row_starts[:-1], strict=True):
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
