"""Drafts with a network that has weights: one pass over the rows of the step, which leaves its KV
behind, and then one row of each slot at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minisgl.attention.base import BatchSlots, DecodeBatch, ForwardBatch, PrefillBatch
from minisgl.attention.state import LayerState, PagedKV
from minisgl.config import LayerSpec
from minisgl.drafting.drafter import DraftStep, Draw
from minisgl.drafting.networks.network import Drafted, DraftNetwork
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments
from minisgl.kernels.slots.slot_state import slot_mapping_of


class NetworkDrafter:
    """The Drafter of a DraftNetwork, whose layers keep their KV in the pages of the target's.

    A step that verifies nothing and has no chunks drafts nothing, and leaves no KV: such steps are
    those of many requests, in which the network would cost and bring nothing. A request that goes
    through such steps has fewer of its drafts accepted later.
    """

    def __init__(self, network: DraftNetwork, rank: int = 0) -> None:
        """rank: this one, if ranks divide requests."""
        self._network = network
        self._rank = rank
        self.taps = network.taps
        self._num_layers = len(network.layer_specs("float32"))

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        return self._network.layer_specs(kv_dtype)

    def join(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        pass  # what the network knows of a request is in its KV cache

    def draft(self, step: DraftStep, token_ids: Tensor, draw: Draw) -> None:
        num_drafts, slots, state = step.run - 1, step.ending_slots(), step.state
        drafts = state.drafts.new_full((len(slots), state.drafts.shape[1]), -1)
        if num_drafts or step.chunk_ends is not None:
            drafted = self._over_step(step, token_ids)
            if num_drafts and len(slots):
                drafts[:, :num_drafts] = self._ahead(step, drafted, num_drafts, draw)
        state.drafts[slots] = drafts

    def _over_step(self, step: DraftStep, token_ids: Tensor) -> Drafted:
        """Run the rows of the step, of which those after a slot's last are overwritten later."""
        network, batch, hidden = self._network, step.batch, None
        if network.follows:
            # A token that is not known has no draft that could depend on it.
            batch = replace(batch, token_ids=step.next_tokens(token_ids).clamp(min=0))
            hidden = network.combine(step.hidden if step.tapped is None else step.tapped)
        return network(batch, hidden, self._states(step), step.attention)

    def _ahead(self, step: DraftStep, drafted: Drafted, num_drafts: int, draw: Draw) -> Tensor:
        """The drafts of each slot, [num_slots, num_drafts] int32."""
        network, state, slots = self._network, step.state, step.ending_slots()
        ends, lengths = step.ending_rows(), state.lengths[slots].long()
        # The token that a row at position p draws has the output index p + 1 - prompt's length, and
        # that of a row that follows one more.
        behind = 1 + network.follows - state.prompt_lengths[slots]
        found: list[Tensor] = []
        exists = slots != state.scratch_slot
        if network.follows:
            assert drafted.hidden is not None
            drafted = Drafted(drafted.rows[ends], drafted.hidden[ends])
            first = draw(network.logits(drafted.rows), slots, lengths - 1 + behind)
            found.append(first.where(exists, -1))
        num_rows = num_drafts - len(found)
        if not num_rows:
            return torch.stack(found, dim=1).int()
        kvs = (each for each in self._states(step) if isinstance(each, PagedKV))
        window_table = state.window_table if any(kv.windowed for kv in kvs) else None
        rows = _Ahead(step, slots, lengths, num_rows, self._rank, window_table)
        token_ids = found[0] if found else state.last_tokens[slots].long()
        for place in range(num_rows):
            batch, hidden = rows.batch(place, token_ids), rows.placed(drafted.hidden)
            step.attention.prepare(batch)
            drafted = rows.taken(network(batch, hidden, self._states(step), step.attention))
            token_ids = draw(network.logits(drafted.rows), slots, lengths + place + behind)
            exists = exists & rows.has_page[place]
            found.append(token_ids.where(exists, -1))
        return torch.stack(found, dim=1).int()

    def _states(self, step: DraftStep) -> Sequence[LayerState]:
        return step.states[len(step.states) - self._num_layers :]


class _Ahead:
    """The rows of the slots at positions that no step has computed: of `slots` from `lengths` on.
    A row whose position has no page is one of the scratch slot."""

    def __init__(
        self,
        step: DraftStep,
        slots: Tensor,
        lengths: Tensor,
        num_rows: int,
        rank: int,
        window_table: Tensor | None = None,
    ) -> None:
        """window_table: that of the state, if layers that draft have pages of windowed layers."""
        state, batch = step.state, step.batch
        columns = state.page_table.shape[1]
        positions = lengths + torch.arange(num_rows, device=slots.device)[:, None]
        places = positions // state.page_size
        pages = state.page_table[slots, places.clamp(max=columns - 1)]
        # [num_rows, num_slots], as all of these
        is_row = self.has_page = (pages > 0) & (places < columns)
        own = slice(None)  # the rows of this rank
        self._ranks = None if len(step.num_runs) == 1 else _SlotsOfRanks(step, slots)
        if self._ranks is not None:
            at, own = self._ranks.places, self._ranks.own(rank)
            slots, positions = slots[at], positions[:, at]
            is_row = is_row[:, at] & self._ranks.is_own
        of_rows, positions = slots.where(is_row, state.scratch_slot), positions.where(is_row, 0)
        self._rows = [Rows.of(*rows) for rows in zip(of_rows, positions, strict=True)]
        self._own = [rows.part(own) for rows in self._rows]
        slots = slots[own]

        def of(table: Tensor) -> tuple[Tensor, Tensor]:
            mapping = slot_mapping_of(table, of_rows, positions, state.page_size)
            return mapping[:, own], table[slots]

        self._lengths = (positions + is_row).int()[:, own]
        self._mapping, self._page_table = of(state.page_table)
        self._windowed = None if window_table is None else of(window_table)
        ends = [
            start + n for start, n in zip(batch.chunks.starts, batch.chunks.lengths, strict=True)
        ]
        self._longest = max([batch.decodes.longest, *ends]) + num_rows
        nothing = self._lengths[0, :0]
        self._no_chunks = PrefillBatch(self._page_table[:0], nothing, nothing, 0, (), ())
        none = slots[:0]
        self._batch_slots = BatchSlots(slots, Segments(none, none, nothing))

    def batch(self, place: int, token_ids: Tensor) -> ForwardBatch:
        """The rows at the position `place` after the lengths, with these tokens [num_slots]."""
        decodes = DecodeBatch(self._page_table, self._lengths[place], self._longest)
        batch = ForwardBatch(
            token_ids=self._placed(token_ids).clamp(min=0),
            rows=self._rows[place],
            own=self._own[place],
            slot_mapping=self._mapping[place],
            decodes=decodes,
            chunks=self._no_chunks,
            slots=self._batch_slots,
            shares=() if self._ranks is None else self._ranks.shares,
        )
        if self._windowed is None:
            return batch
        mapping, table = self._windowed
        decodes = replace(decodes, page_table=table)
        return replace(batch, windowed=replace(batch, slot_mapping=mapping[place], decodes=decodes))

    def placed(self, hidden: Tensor | None) -> Tensor | None:
        """What is `hidden` of each slot as the rows have it."""
        return None if hidden is None else self._placed(hidden)

    def taken(self, drafted: Drafted) -> Drafted:
        """What a network computes of the rows, by slot."""
        if self._ranks is None:
            return drafted
        rows, hidden = drafted
        places = self._ranks.rows
        return Drafted(rows[places], None if hidden is None else hidden[places])

    def _placed(self, of_slots: Tensor) -> Tensor:
        return of_slots if self._ranks is None else of_slots[self._ranks.places]


class _SlotsOfRanks:
    """The slots of a step, runs and then chunks that sample, as ranks have them that divide
    requests: rank by rank a row for each of its runs, and one for each chunk of all ranks, because
    only the device may know whose that is. Those that are not of the rank are of the scratch slot.
    """

    def __init__(self, step: DraftStep, slots: Tensor) -> None:
        num_slots, num_runs = len(slots), sum(step.num_runs)
        num_chunks, num_ranks, device = num_slots - num_runs, len(step.num_runs), slots.device
        self.shares = tuple(num + num_chunks for num in step.num_runs)
        every = torch.arange(num_slots, device=device)
        of_chunks = every[num_runs:]
        parts = [torch.cat((runs, of_chunks)) for runs in every[:num_runs].split([*step.num_runs])]
        self.places = torch.cat(parts)  # [num_rows]: of each row's slot among the slots
        # The rank of a slot; of the scratch slot the last.
        slots_each = step.state.scratch_slot // num_ranks
        ranks = (slots // slots_each).clamp(max=num_ranks - 1)
        # [num_rows]: whether a row's slot is of the rank that has the row
        self.is_own = torch.cat([ranks[part] == rank for rank, part in enumerate(parts)])
        rows: list[Tensor] = []
        first, of_rank = 0, torch.zeros_like(of_chunks)
        for rank, num in enumerate(step.num_runs):
            rows.append(torch.arange(first, first + num, device=device))
            at = of_chunks + (first + num - num_runs)
            of_rank = at.where(ranks[num_runs:] == rank, of_rank)
            first += num + num_chunks
        self.rows = torch.cat((*rows, of_rank))  # [num_slots]: the row of each slot

    def own(self, rank: int) -> slice:
        """The rows of a rank."""
        first = sum(self.shares[:rank])
        return slice(first, first + self.shares[rank])
