"""What the device knows about each slot, and the inputs of a step made from it.

A step is made for a *shape*: so many decode rows and, behind them, so many rows of chunks. Run
eagerly the shape is the plan's own. A captured step has a shape at least as large: its other decode
rows are of the scratch slot, its other chunks are empty, and its other chunk rows are tokens that
the scratch slot has at position 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from minisgl.attention.base import DecodeBatch, ForwardBatch, PrefillBatch
from minisgl.kernels.slots.dispatch import read_slots
from minisgl.kernels.slots.state import SlotRows, SlotState, slot_mapping_of
from minisgl.runner.lanes import Lanes
from minisgl.scheduler.plan import StepPlan


class StepShape(NamedTuple):
    """How many rows of each kind a step has; chunks only where there are chunk rows."""

    num_decodes: int
    num_chunk_rows: int = 0
    num_chunks: int = 0

    @staticmethod
    def of(plan: StepPlan) -> StepShape:
        num_chunk_rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        return StepShape(len(plan.decode_slots), num_chunk_rows, len(plan.chunks))


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of a step whose logits are sampled, in the order of StepPlan."""

    rows: Tensor | None  # [num_samples] int64 among the step's rows; None: they are all its rows
    slots: Tensor  # [num_samples] int64
    output_index: Tensor  # [num_samples] int64: of the token to be sampled


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a step on the device: int64 all."""

    token_ids: Tensor  # [num_chunk_rows], and so the next two
    positions: Tensor
    token_slots: Tensor
    row_starts: Tensor  # [num_chunks + 1]
    slots: Tensor  # [num_chunks], and so the next
    ends: Tensor
    sample_rows: Tensor  # [num_samples]: those of the chunks that sample, among the chunk rows
    sample_slots: Tensor  # [num_samples]
    sample_ends: Tensor  # [num_samples]

    @staticmethod
    def split(packed: Tensor, shape: StepShape, num_samples: int) -> Chunks:
        """The parts of what `_pack_chunks` has packed."""
        tokens, chunks = shape.num_chunk_rows, shape.num_chunks
        sizes = [tokens] * 3 + [chunks + 1] + [chunks] * 2 + [num_samples] * 3
        return Chunks(*packed.split(sizes))


class SlotTables:
    """Device tables indexed by slot. They change on the compute lane only, in launch order.

    A slot's length and last token are the device's own knowledge: in steady decode the host sends
    nothing, because the decode rows are those of the last step. What it does send, a page, a row of
    the batch, is a pair of a place and a value: all tables lie in one tensor.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        prompt_lengths: Tensor,
        lanes: Lanes,
    ) -> None:
        """prompt_lengths: [num_slots + 1] int64 on the device, which someone else keeps."""
        self.scratch_slot = num_slots
        self._max_pages = max_pages
        self._lanes = lanes
        sizes = [(num_slots + 1) * max_pages, num_slots + 1, num_slots + 1, num_slots]
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=lanes.device)
        page_table, lengths, last_tokens, decode_slots = self._all.split(sizes)
        self.state = SlotState(
            page_table=page_table.view(num_slots + 1, max_pages),
            lengths=lengths,
            last_tokens=last_tokens,
            prompt_lengths=prompt_lengths,
            page_size=page_size,
        )
        # Rows past the batch are of the scratch slot, always.
        self._decode_slots = decode_slots.fill_(num_slots)
        self._decode_slots_at = sum(sizes[:3])
        self._decode_slots_host: tuple[int, ...] = ()
        self._rows = SlotRows.allocate(num_slots, max_pages, lanes.device)
        # Whether eager steps, all of them, keep the lengths of the slots on the host too.
        self.counts_lengths = True
        self._lengths_host = [0] * num_slots

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's grants and its choice of decode rows. Runs on the compute lane."""
        places, values = self._changes(plan)
        if places:
            device_places, device_values = self._lanes.upload([places, values])
            self._all.index_copy_(0, device_places, device_values.int())
        self._decode_slots_host = plan.decode_slots

    def _changes(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        places: list[int] = []
        values: list[int] = []
        for grant in plan.grants:
            first = grant.slot * self._max_pages + grant.index
            places += range(first, first + len(grant.pages))
            values += grant.pages
        if plan.decode_slots is not self._decode_slots_host:
            num_rows = max(len(plan.decode_slots), len(self._decode_slots_host))
            places += range(self._decode_slots_at, self._decode_slots_at + num_rows)
            values += plan.decode_slots
            values += [self.scratch_slot] * (num_rows - len(plan.decode_slots))
        return places, values

    def upload_chunks(self, plan: StepPlan, shape: StepShape, num_samples: int) -> Tensor:
        """The plan's chunks padded to `shape`, packed; to be split by `Chunks.split`.

        num_samples: rows to sample, of which those that no chunk needs are of the scratch slot.
        """
        return self._lanes.upload([_pack_chunks(plan, shape, num_samples, self.scratch_slot)])[0]

    def _lengths_after(self, plan: StepPlan) -> list[int]:
        """Tokens that each decode row of the plan attends to, for backends that plan on the host.

        Counts along, so it must see every plan, once.
        """
        lengths = self._lengths_host
        for slot in plan.decode_slots:
            lengths[slot] += 1
        for chunk in plan.chunks:
            lengths[chunk.slot] = chunk.end
        return [lengths[slot] for slot in plan.decode_slots]

    def inputs(
        self, plan: StepPlan | None, shape: StepShape, chunks: Chunks | None
    ) -> tuple[ForwardBatch, SampleRows]:
        """Build a step's inputs and advance the lengths. Runs on the compute lane.

        plan: of an eager step, to tell the backends what the host knows; None: of a captured one.
        """
        longest, width = self._max_pages * self.state.page_size, self._max_pages
        lengths_host: list[int] | None = None
        starts: tuple[int, ...] = ()
        lengths: tuple[int, ...] = ()
        if plan is not None:
            lengths_host = self._lengths_after(plan) if self.counts_lengths else None
            longest = plan.longest_decode
            starts = tuple(chunk.start for chunk in plan.chunks)
            lengths = tuple(len(chunk.token_ids) for chunk in plan.chunks)
            width = self._num_pages(max([longest, *(chunk.end for chunk in plan.chunks)]))
        rows = self._rows.first(shape.num_decodes, width)
        read_slots(self._decode_slots[: shape.num_decodes], self.state, rows)
        decodes = DecodeBatch(rows.page_table, rows.lengths, longest, lengths_host)
        if chunks is None:
            nothing = rows.lengths[:0]
            no_chunks = PrefillBatch(rows.page_table[:0], nothing, nothing, 0, (), ())
            inputs = ForwardBatch(
                rows.token_ids, rows.positions, rows.slot_mapping, decodes, no_chunks
            )
            return inputs, SampleRows(None, rows.slots, rows.output_index)

        state = self.state
        state.lengths[chunks.slots] = chunks.ends.int()
        slot_mapping = slot_mapping_of(
            state.page_table, chunks.token_slots, chunks.positions, state.page_size
        )
        inputs = ForwardBatch(
            token_ids=torch.cat((rows.token_ids, chunks.token_ids)),
            positions=torch.cat((rows.positions, chunks.positions)),
            slot_mapping=torch.cat((rows.slot_mapping, slot_mapping)),
            decodes=decodes,
            chunks=PrefillBatch(
                page_table=state.page_table[chunks.slots, :width],
                row_starts=chunks.row_starts.int(),
                ends=chunks.ends.int(),
                num_rows=shape.num_chunk_rows,
                starts=starts,
                lengths=lengths,
            ),
        )
        decode_rows = torch.arange(shape.num_decodes, device=slot_mapping.device)
        output_index = chunks.sample_ends - state.prompt_lengths[chunks.sample_slots]
        return inputs, SampleRows(
            rows=torch.cat((decode_rows, chunks.sample_rows + shape.num_decodes)),
            slots=torch.cat((rows.slots, chunks.sample_slots)),
            output_index=torch.cat((rows.output_index, output_index)),
        )

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.state.page_size)


def _pack_chunks(
    plan: StepPlan, shape: StepShape, num_samples: int, scratch_slot: int
) -> NDArray[np.int64]:
    """The parts of `Chunks`, one behind the other, each padded behind what the plan has.

    Nothing is done in Python for each token: there may be thousands, and the event loop waits.
    """
    chunks = plan.chunks
    lengths = [len(chunk.token_ids) for chunk in chunks]
    row_starts = [0, *itertools.accumulate(lengths)]
    slots = [chunk.slot for chunk in chunks]
    ends = [chunk.end for chunk in chunks]
    sampling = [place for place, chunk in enumerate(chunks) if chunk.samples]
    room, num_chunks = shape.num_chunk_rows, shape.num_chunks
    parts: tuple[tuple[Sequence[ArrayLike], int, int], ...] = (  # what there is, size, filler
        ([chunk.token_ids for chunk in chunks], room, 0),
        ([np.arange(chunk.start, chunk.end) for chunk in chunks], room, 0),
        ([np.repeat(np.array(slots, dtype=np.int64), lengths)], room, scratch_slot),
        ([row_starts], num_chunks + 1, row_starts[-1]),
        ([slots], num_chunks, scratch_slot),
        ([ends], num_chunks, 0),
        ([[row_starts[place + 1] - 1 for place in sampling]], num_samples, 0),
        ([[slots[place] for place in sampling]], num_samples, scratch_slot),
        ([[ends[place] for place in sampling]], num_samples, 0),
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
