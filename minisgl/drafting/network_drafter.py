"""Drafts with a network that has weights: one pass over the rows of the step, which leaves its KV
behind, and then one row of each slot at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minisgl.attention.base import BatchSlots, DecodeBatch, ForwardBatch, PrefillBatch
from minisgl.attention.state import LayerState
from minisgl.config import LayerSpec
from minisgl.drafting.drafter import DraftStep, Draw
from minisgl.drafting.networks.network import Drafted, DraftNetwork
from minisgl.kernels.segments import Segments
from minisgl.kernels.slots.slot_state import slot_mapping_of


class NetworkDrafter:
    """The Drafter of a DraftNetwork, whose layers keep their KV in the pages of the target's.

    A step that verifies nothing and has no chunks drafts nothing, and leaves no KV: such steps are
    those of many requests, in which the network would cost and bring nothing. A request that goes
    through such steps has fewer of its drafts accepted later.
    """

    def __init__(self, network: DraftNetwork) -> None:
        self._network = network
        self.taps = network.taps
        self._num_layers = len(network.layer_specs("float32"))

    def layer_specs(self, kv_dtype: str) -> Sequence[LayerSpec]:
        """As in Drafter."""
        return self._network.layer_specs(kv_dtype)

    def join(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """As in Drafter."""

    def draft(self, step: DraftStep, token_ids: Tensor, draw: Draw) -> None:
        """As in Drafter."""
        num_drafts, slots, state = step.run - 1, step.ending_slots(), step.state
        drafts = state.drafts.new_full((len(slots), state.drafts.shape[1]), -1)
        if num_drafts or step.batch.chunks.num_rows:
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
        rows = _Ahead(step, slots, lengths, num_rows)
        token_ids = found[0] if found else state.last_tokens[slots].long()
        for place in range(num_rows):
            batch = rows.batch(place, token_ids)
            step.attention.prepare(batch)
            drafted = network(batch, drafted.hidden, self._states(step), step.attention)
            token_ids = draw(network.logits(drafted.rows), slots, lengths + place + behind)
            exists = exists & rows.has_page[place]
            found.append(token_ids.where(exists, -1))
        return torch.stack(found, dim=1).int()

    def _states(self, step: DraftStep) -> Sequence[LayerState]:
        return step.states[len(step.states) - self._num_layers :]


class _Ahead:
    """The rows of the slots at positions that no step has computed: of `slots` from `lengths` on.
    A row whose position has no page is one of the scratch slot."""

    def __init__(self, step: DraftStep, slots: Tensor, lengths: Tensor, num_rows: int) -> None:
        state, batch = step.state, step.batch
        columns = state.page_table.shape[1]
        positions = lengths + torch.arange(num_rows, device=slots.device)[:, None]
        places = positions // state.page_size
        pages = state.page_table[slots, places.clamp(max=columns - 1)]
        # [num_rows, num_slots], as all of these
        self.has_page = (pages > 0) & (places < columns)
        self._slots = slots.where(self.has_page, state.scratch_slot)
        self._positions = positions.where(self.has_page, 0)
        self._mapping = slot_mapping_of(
            state.page_table, self._slots, self._positions, state.page_size
        )
        self._lengths = (self._positions + self.has_page).int()
        self._page_table = state.page_table[slots]
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
        return ForwardBatch(
            token_ids=token_ids.clamp(min=0),
            positions=self._positions[place],
            slot_mapping=self._mapping[place],
            decodes=decodes,
            chunks=self._no_chunks,
            slots=self._batch_slots,
        )
