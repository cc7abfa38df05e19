"""How plans number what is copied between the device and host memory.

Host memory has pages of one size, each for a page of full layers on this rank, or for a part of
what is beside it: a snapshot of the states, a page of windowed layers. On the device the pages of
full layers come first, then the parts of snapshots, then those of pages of windowed layers. All
ranks number alike, whatever their stages have of each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Numbering:
    page_bytes: int  # of a page in host memory
    num_pages: int  # of full layers, on the device
    num_snapshots: int = 0
    first_snapshot: int = 0  # its index among the states of a layer
    state_parts: int = 1  # of a snapshot
    window_parts: int = 1  # of a page of windowed layers

    @property
    def first_window_part(self) -> int:
        return self.num_pages + self.num_snapshots * self.state_parts
