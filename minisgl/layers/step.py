"""What the layers of a model need in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from minisgl.attention.base import Attention, ForwardBatch
from minisgl.attention.state import LayerState, PagedKV, StateBySlot


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of a step, what layers keep, and what they share."""

    batch: ForwardBatch
    states: Mapping[int, LayerState]  # by the number of the layer
    attention: Attention
    rotary_tables: Mapping[int, Tensor]  # of rotary_table, by the number of the layer

    def kv(self, layer: int) -> PagedKV:
        """The KV cache of a layer with attention."""
        state = self.states[layer]
        assert isinstance(state, PagedKV)
        return state

    def state(self, layer: int) -> StateBySlot:
        """The state of a layer that keeps one of each slot."""
        state = self.states[layer]
        assert isinstance(state, StateBySlot)
        return state
