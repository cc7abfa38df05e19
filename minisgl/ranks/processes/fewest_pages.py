"""How many pages of a move all ranks have done: as many as the one with the fewest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.kvcache.moves import Done, Move


@dataclass(slots=True)
class _Count:
    done: Done
    num_left: int  # ranks
    num_pages: int


class FewestPages:
    """Waits for the last rank of each move. Thread-safe."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._counts: dict[int, _Count] = {}  # by move
        self._lock = threading.Lock()

    def expect(self, moves: Sequence[Move], done: Done) -> None:
        """done: called once for each move, when every rank has ended it."""
        with self._lock:
            for move in moves:
                self._counts[move.id] = _Count(done, self._num_ranks, len(move.pages))

    def ended(self, move_id: int, num_pages: int) -> None:
        """Note that one rank has done the first `num_pages` pages, and will do no more."""
        with self._lock:
            count = self._counts[move_id]
            count.num_left -= 1
            count.num_pages = min(count.num_pages, num_pages)
            if count.num_left:
                return
            del self._counts[move_id]
        count.done(move_id, count.num_pages)
