"""How many pages of a transfer all ranks have done: as many as the one with the fewest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.kvcache.store import Done, Transfer


@dataclass(slots=True)
class _UnderWay:
    done: Done
    num_left: int  # ranks
    num_pages: int


class Transfers:
    """Waits for the transfers of all ranks. Thread-safe."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._under_way: dict[int, _UnderWay] = {}
        self._lock = threading.Lock()

    def begin(self, transfers: Sequence[Transfer], done: Done) -> None:
        """done: called once for each transfer, when every rank has ended it."""
        with self._lock:
            for transfer in transfers:
                entry = _UnderWay(done, self._num_ranks, transfer.num_pages)
                self._under_way[transfer.id] = entry

    def ended(self, transfer: int, num_pages: int) -> None:
        """Note that one rank has done the first `num_pages` pages, and will do no more."""
        with self._lock:
            entry = self._under_way[transfer]
            entry.num_left -= 1
            entry.num_pages = min(entry.num_pages, num_pages)
            if entry.num_left:
                return
            del self._under_way[transfer]
        entry.done(transfer, entry.num_pages)
