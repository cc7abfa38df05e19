"""Moves of pages between places, outside of the order of steps, and the register of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Place(Enum):
    """Where a page can be."""

    DEVICE = "device"
    HOST = "host memory"
    DISK = "disk"
    ENGINE = "another engine"


@dataclass(frozen=True, slots=True)
class Move:
    """Pages on their way between two places, of which one is the device or host memory.

    Every rank moves its part of each page, or the rank that has the pages.
    """

    id: int  # from 1 on
    source: Place
    target: Place
    pages: tuple[int, ...]  # on the device or in host memory; nobody else writes them meanwhile
    keys: tuple[bytes, ...] = ()  # of the pages on disk
    name: bytes = b""  # of a move between engines, the same on both sides
    peers: tuple[str, ...] = ()  # addresses of the ranks from which those of this engine receive
    rank: int = 0  # that moves it, of those that divide the requests; otherwise all do

    @property
    def uses_device(self) -> bool:
        """Whether `pages` are on the device; otherwise they are in host memory."""
        return Place.DEVICE in (self.source, self.target)

    @property
    def uses_disk(self) -> bool:
        return Place.DISK in (self.source, self.target)


# Called with the id of a move and the number of pages, from its first on, that are done.
Done = Callable[[int, int], None]


class Moves:
    """The moves that have begun and not ended. Used on the engine's loop.

    Every move ends in `end`, on the loop, which tells the one that has begun it.
    """

    def __init__(self) -> None:
        self.ids = itertools.count(1)  # of all ranks' moves and loads
        self._new: list[Move] = []
        self._under_way: dict[int, tuple[Move, Callable[[int], None]]] = {}

    def begin(
        self,
        source: Place,
        target: Place,
        pages: Sequence[int],
        ended: Callable[[int], None],
        *,
        keys: Sequence[bytes] = (),
        name: bytes = b"",
        peers: Sequence[str] = (),
        rank: int = 0,
    ) -> None:
        """Begin a move, which the ranks start after the next `take`.

        ended: called with the number of pages, from the first on, that every rank has moved. No
        rank touches the pages any more then.
        """
        move = Move(
            next(self.ids), source, target, tuple(pages), tuple(keys), name, tuple(peers), rank
        )
        self._new.append(move)
        self._under_way[move.id] = move, ended

    def take(self) -> Sequence[Move]:
        """The moves that have begun since the last call, for the ranks to start."""
        new, self._new = self._new, []
        return new

    @property
    def under_way(self) -> Sequence[Move]:
        """The moves that have begun and not ended."""
        return [move for move, _ in self._under_way.values()]

    def end(self, move_id: int, num_pages: int) -> None:
        """End a move, of which every rank has moved the first `num_pages` pages. Called once."""
        _, ended = self._under_way.pop(move_id)
        ended(num_pages)
