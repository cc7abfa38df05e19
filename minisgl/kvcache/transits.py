"""Pages for and from other engines: who keeps them before, during and after their move.

Other engines read pages that are lent to them, and write pages that are expected from them. Both
are out of the order of launches: no plan writes the ones before `drop`, or uses the others before
`adopt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minisgl.kvcache.host_tier import HostTier
from minisgl.kvcache.loads import Loads
from minisgl.kvcache.moves import Place
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.tree import Node


@dataclass(slots=True, eq=False)
class Transit:
    """Pages of a prefix that another engine reads or writes: in host memory, or on the device. In
    host memory, those with what is `beside` them come last."""

    place: Place
    pages: Sequence[int]
    beside: Sequence[tuple[int, int]] = ()  # by page of the prefix and index
    rank: int = 0  # which has the pages, as of a lease
    node: Node | None = None  # of the prefix cache, whose pages these are, if they are lent
    # Called once when a step has copied the pages, or has failed to: they are free then.
    copied: Callable[[bool], None] | None = None
    failed: bool = False

    @property
    def num_pages(self) -> int:
        """Of the prefix alone."""
        return len(self.pages) - len(self.beside)

    def lacked_by(self, num_pages: int) -> tuple[list[int], int]:
        """The pages for an engine that has the first `num_pages` of the prefix; and how many of
        them, at the end, are beside others."""
        beside = zip(self.beside, self.pages[self.num_pages :], strict=True)
        further = [page for (place, _), page in beside if place >= num_pages]
        return [*self.pages[num_pages : self.num_pages], *further], len(further)


@dataclass(slots=True, eq=False, repr=False)
class Transits:
    _cache: RadixCache
    _host: HostTier
    _loads: Loads
    _max_on_device: int  # number of pages that other engines may keep from requests
    _rank: int  # whose pages these are
    _all: set[Transit] = field(default_factory=set)

    # -- pages that leave --------------------------------------------------------------------------

    def num_on_device(self, key: bytes, num_tokens: int, namespace: bytes = b"") -> int:
        """Number of pages of the cached prefix that can be lent or copied out."""
        max_pages = self._cache.max_match(num_tokens)
        match = self._cache.acquire(key, max_pages, namespace, may_load=False)
        self._cache.tree.release(match.node)
        return len(match.pages)

    def lend(self, key: bytes, num_tokens: int, namespace: bytes = b"") -> Transit | None:
        """Keep the cached prefix on the device as it is, for another engine to read; see `match`.

        None if the device has no page of it, a step that writes it is in flight, or too many pages
        are in transit.
        """
        match = self._cache.acquire(key, self._cache.max_match(num_tokens), namespace)
        pages = match.pages
        settled = self._cache.pool.are_settled(pages)
        whole = not (match.num_to_load or match.num_beside or self._loads.of(match.pages))
        if pages and settled and whole and self.has_room(len(pages)):
            return self._begin(Transit(Place.DEVICE, pages, node=match.node))
        self._cache.tree.release(match.node)
        return None

    def copy_out(
        self,
        key: bytes,
        num_tokens: int,
        namespace: bytes = b"",
        copied: Callable[[bool], None] = lambda is_whole: None,
    ) -> Transit | None:
        """Copy the cached prefix, and what a request needs beside it to go on, to host pages of its
        own, with the next plan; see `match`.

        The prefix itself stays where it is, unlocked. None if the device has no page of it, or host
        memory no room.
        """
        cache = self._cache
        match = cache.acquire(key, cache.max_match(num_tokens), namespace, may_load=False)
        pages, beside = [*match.pages], cache.places_beside(0, len(match.pages))
        end = len(pages) - cache.num_spared  # of what the receiver can use
        for group in cache.groups:
            seen = match.pages[group.first_needed(end) : end]
            pages += group.on_device_for(match.node, seen)
        cache.tree.release(match.node)
        is_whole = len(pages) == len(match.pages) + len(beside) and not self._loads.of(pages)
        return self._copy(pages if is_whole else [], copied, beside)

    def copy_lent(
        self, lent: Transit, copied: Callable[[bool], None] = lambda is_whole: None
    ) -> Transit | None:
        """Copy a lent prefix out instead, whose pages are unlocked; None if there is no room."""
        copy = self._copy(lent.pages, copied)
        self.drop(lent)
        return copy

    def _copy(
        self,
        pages: Sequence[int],
        copied: Callable[[bool], None],
        beside: Sequence[tuple[int, int]] = (),
    ) -> Transit | None:
        if not pages or not self._host.make_room(len(pages)):
            return None
        host_pages = self._host.pool.offload(pages)
        return self._begin(Transit(Place.HOST, host_pages, beside, copied=copied))

    @property
    def is_copying_out(self) -> bool:
        """Whether another engine waits for what the next plan copies."""
        return any(
            transit.copied is not None and transit.pages[0] in self._host.pool.offloads
            for transit in self._all
        )

    def settled(self, step: int) -> None:
        """Tell of the copies that steps up to `step` have made."""
        for transit in [*self._all]:
            if transit.copied is not None and self.is_written(transit, step):
                self._tell(transit, is_whole=True)

    def is_written(self, transit: Transit, step: int) -> bool:
        """Whether steps up to `step` have written the pages of `copy_out`."""
        if transit.place is Place.DEVICE:
            return True
        return all(self._host.pool.written_by[page] <= step for page in transit.pages)

    def drop_written_since(self, step: int) -> None:
        """Drop what failed steps were to copy."""
        for transit in [each for each in self._all if not self.is_written(each, step - 1)]:
            self.drop(transit)
            transit.failed = True
            self._tell(transit, is_whole=False)

    def give_up(self) -> None:
        """Tell those who wait for copies that there will be none."""
        for transit in self._all:
            self._tell(transit, is_whole=False)

    @staticmethod
    def _tell(transit: Transit, *, is_whole: bool) -> None:
        copied, transit.copied = transit.copied, None
        if copied is not None:
            copied(is_whole)

    # -- pages that come ---------------------------------------------------------------------------

    def expect(self, num_pages: int, start: int = 0) -> Transit | None:
        """Host pages for `num_pages` of another engine from page `start` of a prefix on, and for
        what is beside them; None if there is no room.

        Copies of launched plans may still be under way to or from them.
        """
        beside = self._cache.places_beside(start, start + num_pages)
        num_all = num_pages + len(beside)
        if not self._host.make_room(num_all):
            return None
        return self._begin(Transit(Place.HOST, self._host.pool.take(num_all), beside))

    def expect_on_device(
        self, key: bytes, start: int, num_pages: int, namespace: bytes = b""
    ) -> Transit | None:
        """Pages on the device for `num_pages` of `key` from page `start` on.

        None if what is before them is not there, or there is no room without another plan: nothing
        is evicted that has no copy, because only a plan copies it, and other plans may use the
        pages until they are launched.
        """
        if self._loads.new or self._loads.awaits or self._host.pool.offloads:
            return None
        match = self._cache.acquire(key, start, namespace)
        self._cache.tree.release(match.node)
        if len(match.pages) < start or not self.has_room(num_pages):
            return None
        missing = min(num_pages - self._cache.pool.num_free, self._cache.num_evictable)
        self._host.evict(missing, max_offloads=0)
        if num_pages > self._cache.pool.num_free:
            return None
        return self._begin(Transit(Place.DEVICE, self._cache.pool.take(num_pages)))

    def adopt(
        self, transit: Transit, key: bytes, start: int, num_pages: int, namespace: bytes = b""
    ) -> None:
        """End a transit, of which the first `num_pages` have come, with `key` from page `start`
        on."""
        self._all.remove(transit)
        pages = transit.pages
        if transit.place is Place.DEVICE:
            self._cache.pool.free(self._insert(pages[:num_pages], key, start, namespace))
            self._cache.pool.free(pages[num_pages:])
        else:
            self._host.adopt(namespace, key, start, pages, num_pages, transit.beside)

    def _insert(
        self, pages: Sequence[int], key: bytes, start: int, namespace: bytes
    ) -> Sequence[int]:
        """Have the cache take pages that no step has written; returns those that it refuses: all
        if it has lost what was before them."""
        match = self._cache.acquire(key, start, namespace)
        refused = pages
        if len(match.pages) == start:
            refused = self._cache.insert(match.node, key, start, pages)
            # With what is before them, they go if the step that writes it fails.
            path = self._cache.acquire(key, start + len(pages), namespace)
            taken = set(pages).difference(refused)
            written_by = self._cache.pool.written_by
            before = [written_by[page] for page in path.pages if page not in taken]
            self._cache.pool.mark_written(taken, max(before, default=0))
            self._cache.tree.release(path.node)
        self._cache.tree.release(match.node)
        return refused

    # -- both --------------------------------------------------------------------------------------

    def has_room(self, num_pages: int) -> bool:
        """Whether other engines may keep so many more pages of the device from requests."""
        on_device = [len(each.pages) for each in self._all if each.place is Place.DEVICE]
        return sum(on_device) + num_pages <= self._max_on_device

    def _begin(self, transit: Transit) -> Transit:
        transit.rank = self._rank
        self._all.add(transit)
        return transit

    def drop(self, transit: Transit) -> None:
        """End a transit: its pages are free, or those of the prefix cache alone."""
        if transit.failed:
            return
        self._all.remove(transit)
        if transit.node is not None:
            self._cache.tree.release(transit.node)
        else:
            tier = self._cache if transit.place is Place.DEVICE else self._host
            tier.pool.free(transit.pages)

    @property
    def locked(self) -> list[Node]:
        """The ends of the prefixes that are lent."""
        return [transit.node for transit in self._all if transit.node is not None]

    def owned(self, place: Place) -> list[int]:
        """The pages that are neither in the prefix cache nor in a lease."""
        owners = [each for each in self._all if each.node is None and each.place is place]
        return [page for transit in owners for page in transit.pages]
