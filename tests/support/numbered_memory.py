"""KV caches whose memory is a table of what each number holds.

What a page, a part of a page of windows or of a snapshot has to hold is known from the tokens up to
its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.config import WindowSizes
from minisgl.kvcache.copies import Copies
from minisgl.kvcache.lease import Lease
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.prefix import pack_tokens

PAGE, WINDOW = 2, 5
STATES, WINDOWS = "states", "windows"
KINDS: dict[str, dict[str, int]] = {
    STATES: {STATES: 2},
    WINDOWS: {WINDOWS: 2},
    "both": {STATES: 1, WINDOWS: 2},
}
ALONE = "pages alone"
SPARED = "windows, and the last page is spared"

Held = tuple[str, tuple[int, ...], int]  # of what kind, the tokens up to its end, and which part


class Engine:
    """A KV cache with the memory that it has on the device and on the host: of an engine, or of one
    of its ranks that divide requests."""

    def __init__(
        self, kind: str, num_pages: int = 60, num_snapshots: int = 6, **options: Any
    ) -> None:
        each = {} if kind == ALONE else KINDS.get(kind, KINDS[WINDOWS])
        sizes = WindowSizes(
            window=WINDOW, page_size=PAGE, in_flight=1, spare=8, pages_each=each.get(WINDOWS, 1)
        )
        self.kv = KVCacheManager(
            num_pages=num_pages,
            page_size=PAGE,
            cache_type="radix",
            num_host_pages=120,
            num_snapshots=num_snapshots if STATES in each else None,
            pages_each=each.get(STATES, 1),
            num_window_pages=40,
            window_sizes=sizes if WINDOWS in each else None,
            looks_ahead=kind == SPARED,
            **options,
        )
        self.transits = self.kv.tiers.transits
        self.device: dict[int, Held] = {}
        self.host: dict[int, Held] = {}
        self.step = 0

    def copy(self) -> None:
        """Carry out what the next plan copies."""
        self.step += 1
        copies = self.kv.tiers.take_copies(self.step) or Copies()
        for number, host_page in copies.offloads:
            self.host[host_page] = self.device[number]
        for load in copies.loads:
            for source, target in zip(load.host_pages, load.pages, strict=True):
                self.device[target] = self.host[source]
            self.kv.loads.landed(load.id)
        self.kv.settled(self.step)

    def parts(self, group: str, number: int) -> range:
        kept = self.kv.snapshots if group == STATES else self.kv.windows
        assert kept is not None
        return kept._parts(number)

    def write(self, group: str, number: int, tokens: Sequence[int]) -> None:
        for part, at in enumerate(self.parts(group, number)):
            self.device[at] = (group, tuple(tokens), part)

    def check(self, group: str, number: int, tokens: Sequence[int]) -> None:
        held = [self.device[at] for at in self.parts(group, number)]
        assert held == [(group, tuple(tokens), part) for part in range(len(held))]

    def run(self, tokens: list[int]) -> int | None:
        """Compute a prompt; returns how many tokens were found, None if there is no room."""
        key = pack_tokens(tokens)
        lease = self.kv.acquire(key, len(tokens))
        if self.kv.reserve(lease, len(tokens)) is None:
            self.kv.close(lease)
            return None
        self.copy()
        found = lease.num_committed * PAGE
        self.check_found(lease, tokens[:found])
        self.compute(lease, tokens, found)
        self.kv.audit(self.step)
        return found

    def check_found(self, lease: Lease, found: list[int]) -> None:
        for at, page in enumerate(lease.pages[: lease.num_committed], 1):
            assert self.device[page] == ("page", tuple(found[: at * PAGE]), 0)
        if self.kv.snapshots is not None and found:
            assert lease.start_snapshot is not None
            self.check(STATES, lease.start_snapshot, found)
        if lease.windows is not None:
            held = lease.windows
            assert held.first * PAGE <= max(0, len(found) - WINDOW + 1)
            for at, page in enumerate(held.pages, held.first + 1):
                self.check(WINDOWS, page, found[: at * PAGE])

    def compute(self, lease: Lease, tokens: list[int], found: int) -> None:
        whole, held = len(tokens) // PAGE, lease.windows
        taken = self.kv.take_snapshots(lease, found, len(tokens), self.step + 1)
        if held is not None:
            assert self.kv.windows is not None
            self.kv.windows.cover(held, len(lease.pages))
        self.copy()
        for at in range(lease.num_committed, whole):
            self.device[lease.pages[at]] = ("page", tuple(tokens[: (at + 1) * PAGE]), 0)
        for end, snapshot in taken:
            self.write(STATES, snapshot, tokens[:end])
        if held is not None:
            first = found // PAGE
            for at, page in enumerate(held.pages[first - held.first : whole - held.first], first):
                self.write(WINDOWS, page, tokens[: (at + 1) * PAGE])
        key = pack_tokens(tokens)
        self.kv.commit(lease, key, len(tokens), self.step)
        self.kv.close(lease, key, len(tokens), self.step)
        self.kv.settled(self.step)

    def lose_snapshot(self, tokens: list[int], num_pages: int) -> None:
        """Have the device lose the snapshot behind so many pages, as if others took it."""
        tree = self.kv._cache.tree
        *_, node = tree.path(tree.match(pack_tokens(tokens), num_pages), num_pages)
        assert self.kv.snapshots is not None
        self.kv.snapshots.ended(node)
