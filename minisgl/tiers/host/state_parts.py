"""The parts of snapshots of states, each as large as a page of the KV cache.

So host memory and what is behind it has pages of one size, whatever these hold. The numbers of the
parts come behind those of the device's pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minisgl.attention.state import LayerState, StateBySlot


def parts_each(state_bytes: int, page_bytes: int) -> int:
    """Number of parts of a snapshot."""
    return max(1, -(-state_bytes // page_bytes))


class StateParts:
    def __init__(
        self, states: Sequence[LayerState], num_pages: int, first_snapshot: int, page_bytes: int
    ) -> None:
        """num_pages: on the device. first_snapshot: its index among the states of a layer."""
        tensors = [
            each for state in states if isinstance(state, StateBySlot) for each in state.tensors
        ]
        self._bytes = [each.view(len(each), -1).view(torch.uint8) for each in tensors]
        self._num_pages, self._first_snapshot = num_pages, first_snapshot
        self._page_bytes = page_bytes
        self._pages_each = parts_each(sum(each.shape[1] for each in self._bytes), page_bytes)
        num_snapshots = max((len(each) - first_snapshot for each in tensors), default=0)
        self.end = num_pages + num_snapshots * self._pages_each  # of the numbers

    def pages(self, numbers: Sequence[int]) -> list[int]:
        """The numbers of pages, with the scratch page in place of parts."""
        return [number if number < self._num_pages else 0 for number in numbers]

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
        for number, row in zip(numbers, packed, strict=False):
            if not self._num_pages <= number < self.end:
                continue
            snapshot, part = divmod(number - self._num_pages, self._pages_each)
            start = part * self._page_bytes  # in the bytes of all layers, one after the other
            for layer in self._bytes:
                size = layer.shape[1]
                first, end = max(0, start), min(size, start + self._page_bytes)
                if first < end:
                    yield (
                        layer[self._first_snapshot + snapshot, first:end],
                        row[first - start : end - start],
                    )
                start -= size
