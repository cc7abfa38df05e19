"""The tables of slots, and the rows of steps, where ranks divide the requests among them.

Rank r has the requests in its own, consecutive slots: the keys, values and states of these are on
no other rank. All other tables are the same on all ranks, which compute the same tokens. A step's
rows are those of rank 0, then those of rank 1, and so on; of each first its decode rows, which the
plan has in the order of the ranks, then those of its chunks:

    [rank 0: decode rows | chunk rows] [rank 1: decode rows | chunk rows] ...

In an eager step each rank has as many as the plan says, perhaps none. In a captured step, whose
shape says how many all have together, they have equally many, and padding fills up each kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.attention.base import BatchSlots, DecodeBatch, ForwardBatch, PrefillBatch
from minisgl.config import Capacity
from minisgl.device.lanes import Lanes
from minisgl.kernels.segments import Segments
from minisgl.kernels.slots.slot_state import slot_mapping_of
from minisgl.kernels.slots.slot_updates import read_slots
from minisgl.runner.chunk_tensors import ChunkTensors, StepShape, pack_chunks
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.step_inputs import SlotTables
from minisgl.scheduler.plan import Chunk, SlotJoin, StepPlan


class RankRows(NamedTuple):
    """How many rows of a step each rank has."""

    decodes: tuple[int, ...]  # slots, each with a run of rows
    chunk_rows: tuple[int, ...]
    run: int

    @property
    def shares(self) -> tuple[int, ...]:
        """The rows of each rank."""
        pairs = zip(self.decodes, self.chunk_rows, strict=True)
        return tuple(num * self.run + num_rows for num, num_rows in pairs)

    @property
    def starts(self) -> list[int]:
        """The first row of each rank."""
        return [*accumulate(self.shares, initial=0)][:-1]

    def joined(self, decodes: Tensor, chunks: Tensor) -> list[Tensor]:
        """What there is of decode rows, in the order of ranks, and of chunk rows, as parts in the
        order of the rows."""
        parts: list[Tensor] = []
        decode = row = 0
        for num, num_rows in zip(self.decodes, self.chunk_rows, strict=True):
            parts += [decodes[decode : decode + num * self.run], chunks[row : row + num_rows]]
            decode, row = decode + num * self.run, row + num_rows
        return parts


class RankTables(SlotTables):
    """SlotTables of one of the ranks. Chunks are packed as those of all ranks, as far as the tables
    need them, and then, as `pack_chunks` does it, those of this rank."""

    def __init__(self, num_ranks: int, rank: int, *, keeps_states: bool, **options: Any) -> None:
        """num_ranks, rank: of the stage; each rank has as many of the slots. keeps_states: whether
        layers keep some by slot. options: of SlotTables."""
        super().__init__(**options)
        self._num_ranks, self._rank = num_ranks, rank
        self._slots_each = self.scratch_state = self.scratch_slot // num_ranks
        self._keeps_states = keeps_states
        self._planned: tuple[int, ...] = ()  # the decode slots of the last plan,
        self._placed: tuple[int, ...] = ()  # as the table has them,
        self._decodes = (0,) * num_ranks  # and how many each rank has

    # -- which rows are whose ----------------------------------------------------------------------

    def rank_of(self, slot: int) -> int:
        """The rank that has the request in a slot."""
        return slot // self._slots_each

    def shape_of(self, plan: StepPlan) -> StepShape:
        """As in RowOrder: equally many rows for all ranks."""
        shape, ranks = StepShape.of(plan), self._num_ranks
        rows = self._rows_of(plan, shape)
        return shape._replace(
            num_decodes=ranks * max(rows.decodes), num_chunk_rows=ranks * max(rows.chunk_rows)
        )

    def sampled_rows(self, plan: StepPlan, shape: StepShape) -> tuple[range, ...]:
        """As in RowOrder."""
        rows, planned = self._rows_of(plan, shape), self._count(plan.decode_slots)
        starts = accumulate(rows.decodes, initial=0)
        run, chunks = shape.run, super().sampled_rows(plan, shape)[-1]
        pairs = zip(starts, planned, strict=False)  # the sum follows
        return *(range(start * run, (start + num) * run) for start, num in pairs), chunks

    def first_rows(self, plan: StepPlan) -> list[int]:
        """As in RowOrder."""
        rows = self._rows_of(plan, StepShape.of(plan))
        return self._places_of(plan, rows)

    def own_states(self, joins: Sequence[SlotJoin]) -> list[tuple[int, int | None]]:
        """As in RowOrder."""
        first = self._rank * self._slots_each
        own = [join for join in joins if self.rank_of(join.slot) == self._rank]
        return [(join.slot - first, join.snapshot) for join in own]

    def _count(self, slots: Sequence[int]) -> tuple[int, ...]:
        """How many of these decode slots each rank has."""
        if slots is not self._planned:
            self._planned = tuple(slots)
            by_rank: list[list[int]] = [[] for _ in range(self._num_ranks)]
            for slot in slots:
                by_rank[self.rank_of(slot)].append(slot)
            in_order = [*chain.from_iterable(by_rank)]
            assert [*slots] == in_order, "decode rows are in the order of their ranks"
            filler = [self.scratch_slot]
            placed = [own + filler * (self._slots_each - len(own)) for own in by_rank]
            self._placed = tuple(chain.from_iterable(placed))
            self._decodes = tuple(map(len, by_rank))
        return self._decodes

    def _rows_of(self, plan: StepPlan, shape: StepShape) -> RankRows:
        """The rows of each rank in a step of this shape: those of the plan, or more."""
        rows = [0] * self._num_ranks
        for chunk in plan.chunks:
            rows[self.rank_of(chunk.slot)] += len(chunk.token_ids)
        decodes = self._fill_up(self._count(plan.decode_slots), shape.num_decodes)
        return RankRows(decodes, self._fill_up(tuple(rows), shape.num_chunk_rows), shape.run)

    def _fill_up(self, counts: tuple[int, ...], total: int) -> tuple[int, ...]:
        each, left = divmod(total, self._num_ranks)
        is_even = not left and max(counts) <= each
        return (each,) * self._num_ranks if is_even else counts

    def _places_of(self, plan: StepPlan, rows: RankRows) -> list[int]:
        """The first row of each chunk."""
        pairs = zip(rows.starts, rows.decodes, strict=True)
        following = [start + num * rows.run for start, num in pairs]
        places: list[int] = []
        for chunk in plan.chunks:
            rank = self.rank_of(chunk.slot)
            places.append(following[rank])
            following[rank] += len(chunk.token_ids)
        return places

    def _own_chunks(self, plan: StepPlan) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in plan.chunks if self.rank_of(chunk.slot) == self._rank)

    def _own_shape(self, rows: RankRows, shape: StepShape) -> StepShape:
        decodes, num_chunk_rows = rows.decodes[self._rank], rows.chunk_rows[self._rank]
        return shape._replace(num_decodes=decodes, num_chunk_rows=num_chunk_rows)

    # -- the inputs of a step ----------------------------------------------------------------------

    def update(self, plan: StepPlan) -> None:
        """As in SlotTables."""
        self._count(plan.decode_slots)
        super().update(replace(plan, decode_slots=self._placed))

    def upload_chunks(self, plan: StepPlan, shape: StepShape) -> Tensor | None:
        """As in SlotTables, for `inputs`."""
        if not shape.num_chunks:
            return None
        rows = self._rows_of(plan, shape)
        own = replace(plan, chunks=self._own_chunks(plan))
        parts = (
            self._pack_all(plan, shape, rows),
            pack_chunks(own, self._own_shape(rows, shape), self.scratch_slot),
        )
        return self._lanes.upload([np.concatenate(parts)])[0]

    def _pack_all(self, plan: StepPlan, shape: StepShape, rows: RankRows) -> NDArray[np.int64]:
        """What every rank needs of all chunks, as in `_AllChunks`."""
        token_ids, marks = np.zeros((2, sum(rows.chunk_rows)), dtype=np.int64)
        following = [*accumulate(rows.chunk_rows, initial=0)]
        for chunk in plan.chunks:
            rank = self.rank_of(chunk.slot)
            first = following[rank]
            following[rank] += len(chunk.token_ids)
            token_ids[first : following[rank]] = chunk.token_ids
            positions = np.arange(chunk.start, chunk.end)
            marks[first : following[rank]] = self.state.page_size + positions
        filler = self.scratch_slot
        num_unused = shape.num_chunks - len(plan.chunks)
        pairs = zip(plan.chunks, self._places_of(plan, rows), strict=True)
        sampled = [(place + len(chunk.token_ids) - 1, chunk) for chunk, place in pairs]
        sampled = [(place, chunk) for place, chunk in sampled if chunk.samples]
        num_unsampled = shape.num_chunk_samples - len(sampled)
        others = (
            *(*(chunk.slot for chunk in plan.chunks), *[filler] * num_unused),
            *(*(chunk.end for chunk in plan.chunks), *[0] * num_unused),
            *(*(place for place, _ in sampled), *[0] * num_unsampled),
            *(*(chunk.slot for _, chunk in sampled), *[filler] * num_unsampled),
            *(*(chunk.end for _, chunk in sampled), *[0] * num_unsampled),
        )
        return np.concatenate((token_ids, marks, np.array(others, dtype=np.int64)))

    def inputs(
        self, plan: StepPlan | None, shape: StepShape, packed_chunks: Tensor | None
    ) -> tuple[ForwardBatch, SampleRows]:
        """As in SlotTables. The batch has the rows of this rank."""
        state, run, ranks = self.state, shape.run, self._num_ranks
        longest, width = self._max_pages * state.page_size, self._max_pages
        rows_of = RankRows(
            (shape.num_decodes // ranks,) * ranks, (shape.num_chunk_rows // ranks,) * ranks, run
        )
        lengths_host: list[int] | None = None
        if plan is not None:
            rows_of = self._rows_of(plan, shape)
            longest = plan.longest_decode
            width = self._num_pages(max([longest, *(chunk.end for chunk in plan.chunks)]))
        first = sum(rows_of.decodes[: self._rank])
        own = slice(first, first + rows_of.decodes[self._rank])
        if plan is not None and self.counts_lengths:
            lengths_host = self._lengths_after(plan)[own]
        rows = self._rows.first(shape.num_decode_rows, width)
        each = self._decode_slots.split(self._slots_each)
        slots = torch.cat([part[:num] for part, num in zip(each, rows_of.decodes, strict=True)])
        read_slots(slots, state, rows, run)
        own = slice(own.start * run, own.stop * run)
        decodes = DecodeBatch(rows.page_table[own], rows.lengths[own], longest, lengths_host, run)
        own_slots, nothing = self._states(rows.slots[own][::run]), rows.lengths[:0]
        batch = ForwardBatch(
            token_ids=rows.token_ids,
            positions=rows.positions[own],
            slot_mapping=rows.slot_mapping[own],
            decodes=decodes,
            chunks=PrefillBatch(rows.page_table[:0], nothing, nothing, 0, (), ()),
            slots=BatchSlots(own_slots, Segments(own_slots[:0], own_slots[:0], nothing)),
            shares=rows_of.shares,
            marks=rows.slot_mapping,
        )
        if packed_chunks is None:
            return batch, SampleRows(shape, None, rows.slots, rows.output_index)
        size = 2 * sum(rows_of.chunk_rows) + 2 * shape.num_chunks + 3 * shape.num_chunk_samples
        of_all = _AllChunks.split(packed_chunks[:size], shape, rows_of)
        own_chunks = ChunkTensors.split(packed_chunks[size:], self._own_shape(rows_of, shape))
        state.lengths[of_all.slots] = of_all.ends.int()
        places = torch.arange(sum(rows_of.shares), device=slots.device)
        starts = zip(rows_of.starts, rows_of.decodes, strict=True)
        sampled = [places[start : start + num * run] for start, num in starts]
        output_index = of_all.sample_ends - state.prompt_lengths[of_all.sample_slots]
        return self._with_chunks(
            replace(
                batch,
                token_ids=torch.cat(rows_of.joined(rows.token_ids, of_all.token_ids)),
                marks=torch.cat(rows_of.joined(rows.slot_mapping, of_all.marks)),
            ),
            own_chunks,
            () if plan is None else self._own_chunks(plan),
            rows_of.chunk_rows[self._rank],
            width,
            captured=plan is None,
        ), SampleRows(
            shape=shape,
            rows=torch.cat((*sampled, of_all.sample_rows)),
            slots=torch.cat((rows.slots, of_all.sample_slots)),
            output_index=torch.cat((rows.output_index, output_index)),
        )

    def _with_chunks(
        self,
        batch: ForwardBatch,
        tensors: ChunkTensors,
        chunks: Sequence[Chunk],
        num_rows: int,
        width: int,
        *,
        captured: bool,
    ) -> ForwardBatch:
        """The batch with the chunks of this rank, which are in `tensors`, perhaps among others
        that have no rows. chunks: empty if the step is captured."""
        table, page_size = self.state.page_table, self.state.page_size
        num = len(tensors.slots) if captured else len(chunks)
        slots, row_starts = tensors.slots[:num], tensors.row_starts[: num + 1].int()
        if len(tensors.segment_slots):
            sources, states = tensors.segment_sources, tensors.segment_slots
            bounds = tensors.segment_starts.int()
            segments = Segments(self._states(sources), self._states(states), bounds)
        else:
            states = self._states(slots)
            segments = Segments(states, states, row_starts)
        mapping = slot_mapping_of(table, tensors.token_slots, tensors.positions, page_size)
        return replace(
            batch,
            positions=torch.cat((batch.positions, tensors.positions)),
            slot_mapping=torch.cat((batch.slot_mapping, mapping)),
            chunks=PrefillBatch(
                page_table=table[slots, :width],
                row_starts=row_starts,
                ends=tensors.ends[:num].int(),
                num_rows=num_rows,
                starts=tuple(chunk.start for chunk in chunks),
                lengths=tuple(len(chunk.token_ids) for chunk in chunks),
            ),
            slots=BatchSlots(batch.slots.decodes, segments),
        )

    def _states(self, slots: Tensor) -> Tensor:
        """Where layers keep the states of these slots of this rank, of the scratch slot and of the
        snapshots behind it."""
        if not self._keeps_states:
            return slots
        first, others = self._rank * self._slots_each, self.scratch_slot - self._slots_each
        return torch.where(slots < self.scratch_slot, slots - first, slots - others)


class _AllChunks(NamedTuple):
    """The chunks of all ranks; int64."""

    token_ids: Tensor  # [chunk rows of all], those of rank 0 first
    marks: Tensor  # [chunk rows of all], as in ForwardBatch
    slots: Tensor  # [num_chunks]
    ends: Tensor  # [num_chunks]
    sample_rows: Tensor  # [num_chunk_samples]: the sampled rows among all rows
    sample_slots: Tensor  # [num_chunk_samples]
    sample_ends: Tensor  # [num_chunk_samples]

    @staticmethod
    def split(packed: Tensor, shape: StepShape, rows: RankRows) -> _AllChunks:
        """Split the tensor that `RankTables` has packed into views."""
        chunks, samples = [shape.num_chunks] * 2, [shape.num_chunk_samples] * 3
        return _AllChunks(*packed.split([*[sum(rows.chunk_rows)] * 2, *chunks, *samples]))


def slot_tables(
    capacity: Capacity,
    prompt_lengths: Tensor,
    lanes: Lanes,
    *,
    max_run: int,
    rank: int,
    keeps_states: bool,
    window: int,
) -> SlotTables:
    """The tables of a rank of a stage. keeps_states: whether layers keep some by slot. The others:
    as of SlotTables."""
    options: dict[str, Any] = {
        "num_slots": capacity.num_slots,
        "max_pages": -(-capacity.max_seq_len // capacity.page_size),
        "page_size": capacity.page_size,
        "prompt_lengths": prompt_lengths,
        "lanes": lanes,
        "max_run": max_run,
    }
    if capacity.num_attending == 1:
        return SlotTables(**options, has_states=keeps_states, window=window)
    return RankTables(capacity.num_attending, rank, keeps_states=keeps_states, **options)
