"""Loads from host memory that plans carry: which are on their way, and what the next plan does.

A load writes its pages outside of the order of launches: they are locked until it has landed, and
nobody reads them before the plan that awaits it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from minisgl.kvcache.copies import Load
from minisgl.kvcache.lease import Lease
from minisgl.kvcache.page_pool import UNPLANNED
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.tree import Node


@dataclass(slots=True, eq=False, repr=False)
class Loads:
    _cache: RadixCache
    # Number of pages on their way that keep the lane busy until more can follow; None: any.
    _max_pages: int | None
    _ids: Iterator[int]  # which no other rank's loads have
    num_begun: int = 0  # since the start
    # Those that are not known to have landed: the last node that each fills, and what it writes.
    in_flight: dict[int, tuple[Node, Sequence[int]]] = field(default_factory=dict)
    _of_page: dict[int, int] = field(default_factory=dict)  # the load that fills each page
    # What the next plan begins, and awaits.
    new: list[Load] = field(default_factory=list)
    awaits: list[int] = field(default_factory=list)

    @property
    def is_lane_busy(self) -> bool:
        """Whether a load that began now would only queue up behind others."""
        return self._max_pages is not None and len(self._of_page) >= self._max_pages

    def begin(
        self,
        node: Node,
        pages: Sequence[int],
        copied: Mapping[Node, list[int]],
        beside: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Load the end of a match, the locked `node`, into `pages` with the next plan. copied: what
        host memory has of each node. beside: what else comes from where, and where it goes."""
        self.num_begun += 1
        load_id, host_pages = next(self._ids), list[int]()
        resident = self._cache.pages
        absent = takewhile(lambda each: each in copied and each not in resident, node.upwards())
        for each in reversed([*absent]):
            start = len(host_pages)
            host_pages += copied[each]
            self._cache.put(each, list(pages[start : len(host_pages)]))
        self._cache.tree.lock(node)
        sources = (*host_pages, *(source for source, _ in beside))
        targets = (*pages, *(target for _, target in beside))
        self.in_flight[load_id] = node, targets
        self._of_page.update(dict.fromkeys(targets, load_id))
        self._cache.pool.mark_written(targets, UNPLANNED)
        self.new.append(Load(load_id, sources, targets))
        return load_id

    def of(self, pages: Iterable[int]) -> dict[int, int]:
        """The loads that write some of `pages`, and how many each."""
        if not self.in_flight:
            return {}
        return Counter(self._of_page[page] for page in pages if page in self._of_page)

    def wait_for(self, numbers: Iterable[int], lease: Lease) -> None:
        """Let a lease wait for the loads that write some of `numbers`."""
        for load_id in self.of(numbers):
            lease.loads.setdefault(load_id, 0)

    def landed(self, load_id: int) -> None:
        """Make the pages of a load ordinary ones from the next plan on, which awaits it.

        Does nothing for a load that had landed or failed.
        """
        if load_id in self.in_flight:
            node, pages = self.in_flight.pop(load_id)
            for page in pages:
                del self._of_page[page]
            self._cache.tree.release(node)
            self.awaits.append(load_id)

    def await_unwanted(self, wanted: Iterable[Iterable[int]]) -> None:
        """Unlock the pages of loads that nobody wants any more. The next plan waits for them."""
        if self.in_flight:
            for load_id in self.in_flight.keys() - set[int]().union(*wanted):
                self.landed(load_id)

    def drop_since(self, step: int) -> None:
        """Have the next plan await the loads of failed steps, so that their pages can be used
        again."""
        written_by = self._cache.pool.written_by
        for load_id, (_, pages) in [*self.in_flight.items()]:
            if written_by[pages[0]] >= step:
                self.landed(load_id)
        self.new = []

    def take(self, step: int) -> tuple[tuple[Load, ...], tuple[int, ...]]:
        """The loads that the plan of `step` begins, and those that it awaits."""
        taken = tuple(self.new), tuple(self.awaits)
        for load in self.new:
            self._cache.pool.mark_written(load.pages, step)
        self.new, self.awaits = [], []
        return taken

    def audit(self, copied: Container[Node]) -> None:
        """AssertionError if a page is filled that is not locked, or has no copy to fill it from."""
        filled = {page for _, pages in self.in_flight.values() for page in pages}
        assert filled == self._of_page.keys()
        filled = {page for page in filled if page < self._cache.pool.num_pages}
        for node, pages in self._cache.pages.items():
            if node.num_users and node in copied:
                filled.difference_update(pages)
        assert not filled, "pages in flight are not locked"
