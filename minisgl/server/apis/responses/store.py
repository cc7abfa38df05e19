"""Responses that are kept in memory for a while, so that clients can go on from them by their ids.

The oldest go when there are too many bytes: those of the client that has the most of them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

KEEP_S = 24 * 3600  # since a response was used last
ENTRY_BYTES = 1000  # that a response takes besides its texts
# That an item takes besides its text, most of it where the table of items has just grown.
ITEM_BYTES = 330
USE_BYTES = 8  # that each response takes for an item, which many may have


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and what it answers."""

    id: str
    previous_id: str | None  # of the response that it goes on from
    input: tuple[bytes, ...]  # the items of its request, each as JSON
    output: tuple[bytes, ...]  # its own
    body: bytes  # the whole response as JSON
    is_background: bool = False
    events: bytes = b""  # of its stream, if clients may ask for them

    @property
    def own_bytes(self) -> int:
        """What it takes besides its items."""
        own = len(self.body) + len(self.events)
        return own + USE_BYTES * (len(self.input) + len(self.output)) + ENTRY_BYTES


@dataclass(slots=True)
class _SharedItem:
    """An item. Many requests of one conversation have it."""

    item: bytes
    num_users: int = 0


@dataclass(slots=True)
class _Entry:
    response: StoredResponse
    used_s: float


@dataclass(slots=True)
class _Shelf:
    """The responses of one client."""

    num_bytes: int = 0
    most_bytes: int = 0  # since the tables were made, which do not shrink themselves
    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # last used at the end
    items: dict[bytes, _SharedItem] = field(default_factory=dict)

    def add(self, response: StoredResponse, now: float) -> None:
        shared = replace(
            response,
            input=tuple(map(self._share, response.input)),
            output=tuple(map(self._share, response.output)),
        )
        self.entries[response.id] = _Entry(shared, now)
        self.num_bytes += response.own_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)

    def remove(self, id: str) -> None:
        response = self.entries.pop(id).response
        self.num_bytes -= response.own_bytes
        for item in (*response.input, *response.output):
            shared = self.items[item]
            shared.num_users -= 1
            if not shared.num_users:
                del self.items[item]
                self.num_bytes -= len(item) + ITEM_BYTES
        if 2 * self.num_bytes < self.most_bytes:
            self.entries, self.items = OrderedDict(self.entries), dict(self.items)
            self.most_bytes = self.num_bytes

    def remove_oldest(self) -> None:
        self.remove(next(iter(self.entries)))

    def _share(self, item: bytes) -> bytes:
        shared = self.items.get(item)
        if shared is None:
            shared = self.items[item] = _SharedItem(item)
            self.num_bytes += len(item) + ITEM_BYTES
        shared.num_users += 1
        return shared.item


class ResponseStore:
    """The responses of all clients. Any thread may call it."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """max_bytes: of memory for all of them; 0 keeps none."""
        self.is_on = max_bytes > 0
        self._max_bytes = max_bytes
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}  # by client, see server/http/auth.py
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def keep(self, client: str, response: StoredResponse) -> None:
        """Keep a response, unless it is larger than the store."""
        with self._lock:
            self._forget_old()
            shelf = self._shelves.setdefault(client, _Shelf())
            shelf.add(response, self._clock())
            while self.num_bytes > self._max_bytes:
                max(self._shelves.values(), key=lambda each: each.num_bytes).remove_oldest()

    def find(self, client: str, id: str) -> StoredResponse | None:
        """The response with this id, if it is kept for this client; it counts as used now."""
        with self._lock:
            self._forget_old()
            shelf = self._shelves.get(client)
            entry = shelf.entries.get(id) if shelf else None
            if shelf is None or entry is None:
                return None
            entry.used_s = self._clock()
            shelf.entries.move_to_end(id)
            return entry.response

    def remove(self, client: str, id: str) -> bool:
        """Forget a response; returns whether it was there."""
        with self._lock:
            shelf = self._shelves.get(client)
            if shelf is None or id not in shelf.entries:
                return False
            shelf.remove(id)
            return True

    def _forget_old(self) -> None:
        oldest_s = self._clock() - KEEP_S
        for shelf in self._shelves.values():
            while shelf.entries and next(iter(shelf.entries.values())).used_s < oldest_s:
                shelf.remove_oldest()
