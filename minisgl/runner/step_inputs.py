"""Keeps the slot tables on the device, and builds the inputs of steps from them."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.base import BatchSlots, DecodeBatch, ForwardBatch, PrefillBatch
from minisgl.device.lanes import Lanes
from minisgl.kernels.segments import Segments
from minisgl.kernels.slots.slot_state import SlotRows, SlotState, slot_mapping_of
from minisgl.kernels.slots.slot_updates import read_slots
from minisgl.runner.chunk_tensors import ChunkTensors, StepShape, pack_chunks
from minisgl.runner.kept_rows import KeptRows
from minisgl.runner.row_order import RowOrder
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.window_inputs import with_windows
from minisgl.scheduler.plan import StepPlan


class SlotTables(RowOrder):
    """Device tables indexed by slot. They change only on the compute lane, in launch order.

    The length and the last token of each slot are updated on the device, so in steady decode, with
    unchanged decode rows, the host sends nothing. All tables are views of one tensor, so that the
    host can send any change (a page, a row of the batch) as an index and a value.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_pages: int,
        page_size: int,
        prompt_lengths: Tensor,
        lanes: Lanes,
        max_run: int = 1,
        has_states: bool = False,
        window: int = 0,
    ) -> None:
        """prompt_lengths: [num_slots + 1] int64 on the device, maintained by the caller. max_run:
        of all plans. has_states: of a model with a StateBySlot. window: of layers that have pages
        of their own; 0: none have."""
        self.scratch_slot = num_slots
        self._max_pages = max_pages
        self._lanes = lanes
        every = num_slots + 1
        num_entries = every * max_pages
        sizes = [num_entries, num_entries if window else 0, every, every, every * (max_run - 1)]
        sizes += [every, num_slots]
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=lanes.device)
        page_table, window_table, lengths, last_tokens, drafts, takes, rows = self._all.split(sizes)
        self.state = SlotState(
            page_table=page_table.view(num_slots + 1, max_pages),
            lengths=lengths,
            last_tokens=last_tokens,
            drafts=drafts.fill_(-1).view(every, max_run - 1),
            takes_drafts=takes,
            prompt_lengths=prompt_lengths,
            page_size=page_size,
            window_table=window_table.view(every, max_pages) if window else None,
            window=window,
        )
        # What sampling changes of the slots, int32, which the last stage returns to the others.
        self.returned = self._all[sum(sizes[:2]) : sum(sizes[:5])] if max_run > 1 else last_tokens
        # Rows past the end of the batch always refer to the scratch slot.
        self._decode_slots = rows.fill_(num_slots)
        self._takes_drafts_at, self._decode_slots_at = sum(sizes[:5]), sum(sizes[:6])
        self._decode_slots_host: tuple[int, ...] = ()
        self._rows = SlotRows.allocate(num_slots * max_run, max_pages, lanes.device, window)
        self._max_run = max_run
        self.scratch_state = num_slots  # where layers keep the state of padded rows
        self._kept = KeptRows(lengths, has_any=has_states and max_run > 1)
        # True if the host counts the lengths of the slots, too. Requires that no step is captured,
        # and that runs have one token.
        self.counts_lengths = max_run == 1
        self._lengths_host = [0] * num_slots

    def update(self, plan: StepPlan) -> None:
        """Apply the page grants and the decode slots of a plan. Runs on the compute lane."""
        places, values = self._changes(plan)
        if self._max_run > 1 and plan.joins:  # a run ends where a slot has no page
            joined = [join.slot for join in plan.joins]
            self.state.page_table.index_fill_(0, self._lanes.upload([joined])[0], 0)
            places += [self._takes_drafts_at + slot for slot in joined]
            values += [int(join.takes_drafts) for join in plan.joins]
        if places:
            device_places, device_values = self._lanes.upload([places, values])
            self._all.index_copy_(0, device_places, device_values.int())
        self._decode_slots_host = plan.decode_slots

    def _changes(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        places: list[int] = []
        values: list[int] = []
        for grant in plan.grants:
            slot = grant.slot + (self.scratch_slot + 1) * grant.windowed
            first = slot * self._max_pages + grant.index
            places += range(first, first + len(grant.pages))
            values += grant.pages
        if plan.decode_slots is not self._decode_slots_host:
            num_rows = max(len(plan.decode_slots), len(self._decode_slots_host))
            places += range(self._decode_slots_at, self._decode_slots_at + num_rows)
            values += plan.decode_slots
            values += [self.scratch_slot] * (num_rows - len(plan.decode_slots))
        return places, values

    def upload_chunks(self, plan: StepPlan, shape: StepShape) -> Tensor | None:
        """Upload the chunks of a plan, padded to `shape`, as one int64 tensor for
        `ChunkTensors.split`; None if the shape has no room for chunks."""
        if not shape.num_chunks:
            return None
        return self._lanes.upload([pack_chunks(plan, shape, self.scratch_slot)])[0]

    def _lengths_after(self, plan: StepPlan) -> list[int]:
        """Number of tokens that each decode row attends to, for backends that plan on the host.

        Must be called exactly once for every plan, because it advances the counts.
        """
        lengths = self._lengths_host
        for slot in plan.decode_slots:
            lengths[slot] += 1
        for chunk in plan.chunks:
            lengths[chunk.slot] = chunk.end
        return [lengths[slot] for slot in plan.decode_slots]

    def inputs(
        self, plan: StepPlan | None, shape: StepShape, packed_chunks: Tensor | None
    ) -> tuple[ForwardBatch, SampleRows]:
        """Build the inputs of a step and advance the lengths. Runs on the compute lane.

        plan: for the host-side arguments of backends; None for a captured step. packed_chunks: of
        `upload_chunks`.
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
        rows = self._rows.first(shape.num_decode_rows, width)
        read_slots(self._decode_slots[: shape.num_decodes], self.state, rows, shape.run)
        decodes = DecodeBatch(rows.page_table, rows.lengths, longest, lengths_host, shape.run)
        decode_slots = rows.slots[:: shape.run]
        num_kept = self._kept.advance(decode_slots, rows.positions, shape.run)
        if packed_chunks is None:
            nothing = rows.lengths[:0]
            no_chunks = PrefillBatch(rows.page_table[:0], nothing, nothing, 0, (), ())
            no_segments = Segments(rows.slots[:0], rows.slots[:0], nothing)
            slots = BatchSlots(decode_slots, no_segments, num_kept)
            inputs = ForwardBatch(
                rows.token_ids, rows.positions, rows.slot_mapping, decodes, no_chunks, slots
            )
            inputs = with_windows(inputs, rows, None, self.state)
            return inputs, SampleRows(shape, None, rows.slots, rows.output_index)

        state, chunks = self.state, ChunkTensors.split(packed_chunks, shape)
        state.lengths[chunks.slots] = chunks.ends.int()
        self._kept.cover(chunks.slots, chunks.ends)
        row_starts = chunks.row_starts.int()
        segments = Segments(chunks.slots, chunks.slots, row_starts)
        if shape.num_segments:
            bounds = chunks.segment_starts.int()
            segments = Segments(chunks.segment_sources, chunks.segment_slots, bounds)
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
                row_starts=row_starts,
                ends=chunks.ends.int(),
                num_rows=shape.num_chunk_rows,
                starts=starts,
                lengths=lengths,
            ),
            slots=BatchSlots(decode_slots, segments, num_kept),
        )
        inputs = with_windows(inputs, rows, chunks, state)
        decode_rows = torch.arange(shape.num_decode_rows, device=slot_mapping.device)
        output_index = chunks.sample_ends - state.prompt_lengths[chunks.sample_slots]
        return inputs, SampleRows(
            shape=shape,
            rows=torch.cat((decode_rows, chunks.sample_rows + shape.num_decode_rows)),
            slots=torch.cat((rows.slots, chunks.sample_slots)),
            output_index=torch.cat((rows.output_index, output_index)),
        )

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.state.page_size)
