"""What page groups have in common: how their parts are numbered, and where copies of them are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minisgl.kvcache.host_tier import HostTier
from minisgl.kvcache.loads import Loads
from minisgl.kvcache.page_pool import UNPLANNED
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.tree import Follower, Node


class NumberedGroup(Follower):
    """Snapshots, or pages of windowed layers: 0 .. num - 1, each of which takes `pages_each` pages
    of another memory. The device counts who has written these parts with who has written pages."""

    def __init__(self, num: int, cache: RadixCache, pages_each: int) -> None:
        self._cache = cache
        self._host: HostTier | None = None
        self._loads: Loads | None = None
        first = sum(len(group.indices) for group in cache.groups)
        self.indices = range(first, first + pages_each)
        self._written_by = cache.pool.written_by
        self._first_part = len(self._written_by)
        self._written_by += [0] * (num * pages_each)
        cache.tree.followers.append(self)

    def use_copies(self, host: HostTier, loads: Loads) -> None:
        """Have a tier behind the device, which keeps them, too."""
        self._host, self._loads = host, loads

    def _parts(self, number: int) -> range:
        """The numbers of its parts, behind those of the device's pages."""
        first = self._first_part + number * len(self.indices)
        return range(first, first + len(self.indices))

    def _written(self, number: int) -> int:
        """The last step that may have written it."""
        return self._written_by[self._parts(number)[0]]

    def _in_host(self, node: Node, at: int) -> Sequence[int]:
        """What host memory has beside page `at` of a node."""
        if self._host is None or node not in self._host.pages:
            return ()
        return self._host.pool.beside_of(self._host.pages[node][at], self.indices)

    def _audit_written(self, numbers: Iterable[int], launched: int) -> None:
        is_planned = self._loads is None or not self._loads.new
        steps = [*map(self._written, numbers)]
        assert all(each <= launched or (each == UNPLANNED and not is_planned) for each in steps)
