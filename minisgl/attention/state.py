"""What a layer keeps between steps: the KV cache of its pages, or a state of each slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from minisgl.config import UNSCALED, KVScales


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The KV cache of one layer. Page 0 is scratch: padded rows write to it, and it is never
    read.

    Both are of the dtype of the queries, or float8_e4m3fn with scales that multiply them. Tokens
    attend to what is stored, their own included, so that it does not matter in which step, or for
    which request, it was computed.
    """

    k: Tensor  # [num_pages, page_size, num_kv_heads, key_dim]
    v: Tensor  # [num_pages, page_size, num_kv_heads, value_dim]; nothing is stored if that is 0
    scales: KVScales = UNSCALED
    windowed: bool = False  # its pages are those of windowed layers, which have their own

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """The tensors of which a page has a part, for copies of pages."""
        return tuple(plane for plane in (self.k, self.v) if plane.shape[-1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.planes


@dataclass(frozen=True, slots=True)
class StateBySlot:
    """The state of each request in one layer, whatever its length, by its slot. Behind the slots
    come the scratch slot, for padded rows, and the snapshots, which are copies of states.

    The runner sets the state of a request that joins to that of a snapshot, or to zeros. A layer
    advances it by the rows of the request, in the order of their positions.
    """

    tensors: tuple[Tensor, ...]  # each [num_slots + 1 + num_snapshots, ...]

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """None: no page has a part of it."""
        return ()


LayerState = PagedKV | StateBySlot


def distinct(states: Sequence[LayerState]) -> list[LayerState]:
    """Each state once, also if several layers share it."""
    return list({id(state): state for state in states}.values())
