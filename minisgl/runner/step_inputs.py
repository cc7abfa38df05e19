"""Keeps the slot tables on the device, and builds the inputs of steps from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from minisgl.attention.base import BatchSlots, DecodeBatch, ForwardBatch
from minisgl.device.lanes import Lanes
from minisgl.kernels.adapters import AdaptedRows
from minisgl.kernels.rows import Rows
from minisgl.kernels.slots.slot_state import SlotRows, SlotState
from minisgl.kernels.slots.slot_updates import read_slots
from minisgl.runner.chunk_inputs import chunk_inputs, with_chunk_rows
from minisgl.runner.chunk_tensors import ChunkTensors, pack_chunks
from minisgl.runner.kept_rows import KeptRows
from minisgl.runner.row_order import RowOrder
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.step_shape import StepShape
from minisgl.runner.window_inputs import with_windows
from minisgl.scheduler.plan import StepPlan


class SlotTables:
    """Device tables indexed by slot. They change only on the compute lane, in launch order.

    The length and the last token of each slot are updated on the device, so in steady decode, with
    unchanged decode rows, the host sends nothing. All tables are views of one tensor, so that the
    host can send any change (a page, a row of the batch) as an index and a value.
    """

    def __init__(
        self,
        *,
        order: RowOrder,
        max_pages: int,
        page_size: int,
        prompt_lengths: Tensor,
        lanes: Lanes,
        max_run: int = 1,
        has_states: bool = False,
        window: int = 0,
        adapted_rows: Callable[[Tensor], AdaptedRows] | None = None,
        rope_offsets: Tensor | None = None,
    ) -> None:
        """order: of the rows, for one rank. prompt_lengths: [num_slots + 1] int64 on the device,
        maintained by the caller. max_run: of all plans. has_states: of a model with a StateBySlot.
        window: of layers that have pages of their own; 0: none have. adapted_rows: which adapters
        rows of these slots have, where they can have any. rope_offsets: [num_slots + 1] int64, what
        is added to positions for rotating rows of a slot; None: nothing."""
        self.order = order
        self.scratch_slot = num_slots = order.num_slots
        self._max_pages = max_pages
        self._lanes = lanes
        self._adapted_rows, self._rope_offsets = adapted_rows, rope_offsets
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
        self._kept = KeptRows(lengths, has_any=has_states and max_run > 1)
        self._states_of = order.states_of if has_states else lambda slots: slots
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
        self._decode_slots_host = self.order.placed(plan.decode_slots)

    def _changes(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        places: list[int] = []
        values: list[int] = []
        for grant in plan.grants:
            slot = grant.slot + (self.scratch_slot + 1) * grant.windowed
            first = slot * self._max_pages + grant.index
            places += range(first, first + len(grant.pages))
            values += grant.pages
        decode_slots = self.order.placed(plan.decode_slots)
        if decode_slots is not self._decode_slots_host:
            num_rows = max(len(decode_slots), len(self._decode_slots_host))
            places += range(self._decode_slots_at, self._decode_slots_at + num_rows)
            values += decode_slots
            values += [self.scratch_slot] * (num_rows - len(decode_slots))
        return places, values

    def upload_chunks(self, plan: StepPlan, shape: StepShape) -> Tensor | None:
        """Upload the chunks of a plan, padded to `shape`, as one int64 tensor for
        `ChunkTensors.split`; None if the shape has no room for chunks."""
        if not shape.num_chunks:
            return None
        return self._lanes.upload([pack_chunks(plan, shape, self.order)])[0]

    def _lengths_after(self, plan: StepPlan) -> list[int]:
        """Number of tokens that each decode row attends to, for backends that plan on the host.

        Must be called exactly once for every plan with rows: it advances the counts.
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
        state, order, run = self.state, self.order, shape.run
        longest, width = self._max_pages * state.page_size, self._max_pages
        of_ranks = order.rows_of(plan, shape)
        own_rows = of_ranks.decode_rows(order.rank)
        lengths_host: list[int] | None = None
        if plan is not None:
            longest = plan.longest_decode
            most = max([longest, *(chunk.end for chunk in plan.chunks)])
            width = -(-most // state.page_size)
            if self.counts_lengths:
                lengths_host = self._lengths_after(plan)[own_rows]
        rows = self._rows.part(slice(shape.num_decode_rows), width)
        read_slots(order.taken(self._decode_slots, of_ranks.decodes), state, rows, run)
        decodes, kept = rows, self._kept.advance(rows.slots[::run], rows.positions, run)
        if of_ranks.are_divided:
            decodes = rows.part(own_rows)
            kept = None if kept is None else kept[own_rows.start // run : own_rows.stop // run]
        numbers, slot_mapping = rows.numbers[:3], decodes.slot_mapping
        samples = SampleRows(shape, None, rows.slots, rows.output_index, of_ranks.decodes)
        chunks: ChunkTensors | None = None
        if packed_chunks is not None:
            chunks = ChunkTensors.split(packed_chunks, shape)
            state.lengths[chunks.slots] = chunks.ends.int()
            self._kept.cover(chunks.slots, chunks.ends)
            numbers = of_ranks.joined(numbers, chunks.numbers)
            samples = samples.with_chunks(chunks, of_ranks, state.prompt_lengths)
        slots, token_ids, positions = numbers
        adapted_rows = self._adapted_rows if shape.adapted else None
        own = every = Rows.of(slots, positions, adapted_rows and adapted_rows(slots))
        if shape.adapted and self._rope_offsets is not None:
            own = every = replace(every, rope=positions + self._rope_offsets[slots])
        if of_ranks.are_divided:
            part = of_ranks.rows(order.rank)
            own = every.part(part, adapted_rows and adapted_rows(slots[part]))
        if chunks is not None:
            slot_mapping = with_chunk_rows(slot_mapping, own, state.page_table, state.page_size)
        own_chunks = None if plan is None else order.own_chunks(plan)
        num_chunk_rows = of_ranks.chunk_rows[order.rank]
        prefill, segments = chunk_inputs(
            chunks, own_chunks, num_chunk_rows, state, self._states_of, width
        )
        batch = ForwardBatch(
            token_ids=token_ids,
            rows=every,
            own=own,
            slot_mapping=slot_mapping,
            decodes=DecodeBatch(decodes.page_table, decodes.lengths, longest, lengths_host, run),
            chunks=prefill,
            slots=BatchSlots(self._states_of(decodes.slots[::run].contiguous()), segments, kept),
            shares=of_ranks.shares if of_ranks.are_divided else (),
        )
        return with_windows(batch, decodes, chunks, state), samples
