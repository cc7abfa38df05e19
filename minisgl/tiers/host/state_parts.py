"""The parts of snapshots of states, each as large as a page of host memory.

So host memory and what is behind it has pages of one size, whatever these hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minisgl.attention.state import LayerState, StateBySlot
from minisgl.tiers.host.numbering import Numbering


class StateParts:
    def __init__(self, states: Sequence[LayerState], numbering: Numbering) -> None:
        tensors = [
            each for state in states if isinstance(state, StateBySlot) for each in state.tensors
        ]
        self._bytes = [each.view(len(each), -1).view(torch.uint8) for each in tensors]
        self._numbering = numbering

    def pages(self, numbers: Sequence[int]) -> list[int]:
        """The numbers of pages, with the scratch page in place of parts."""
        num_pages = self._numbering.num_pages
        return [number if number < num_pages else 0 for number in numbers]

    def gather(self, numbers: Sequence[int], packed: Tensor) -> None:
        """Copy the parts among `numbers` into their rows of `packed`, [n, page_bytes] uint8."""
        for state, row in self._pairs(numbers, packed):
            row.copy_(state)

    def scatter(self, numbers: Sequence[int], packed: Tensor) -> None:
        """Copy the rows of `packed` to the parts among `numbers`."""
        for state, row in self._pairs(numbers, packed):
            state.copy_(row)

    def _pairs(self, numbers: Sequence[int], packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of states, and where they are in rows of `packed`."""
        of, page_bytes = self._numbering, self._numbering.page_bytes
        for number, row in zip(numbers, packed, strict=False):
            if not of.num_pages <= number < of.first_window_part:
                continue
            snapshot, part = divmod(number - of.num_pages, of.state_parts)
            start = part * page_bytes  # in the bytes of all layers, one after the other
            for layer in self._bytes:
                size = layer.shape[1]
                first, end = max(0, start), min(size, start + page_bytes)
                if first < end:
                    yield (
                        layer[of.first_snapshot + snapshot, first:end],
                        row[first - start : end - start],
                    )
                start -= size
