"""The prefix cache: what a request finds of its prompt on the device, and what it leaves there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from minisgl.kvcache.copies import LoadRule
from minisgl.kvcache.lease import PageGroup
from minisgl.kvcache.page_pool import PagePool
from minisgl.kvcache.residency import Residency
from minisgl.kvcache.tree import Found, Node, PrefixTree

# Of an image, of whose tokens each has 31 bits of its content: so many are no others'.
MIN_IMAGE_KEYS = 8


@dataclass(frozen=True, slots=True)
class Match:
    """A locked prefix, which stays cached until `tree.release(node)`: pages on the device, then
    `num_to_load` in another memory, and `num_beside` there that groups load with them. Of
    `num_found` pages it has those that are of use."""

    node: Node
    pages: list[int]
    num_to_load: int
    num_beside: int
    num_found: int


class RadixCache(Residency):
    """The pages on the device. They are a tree from the root; nodes without any hang below it."""

    def __init__(
        self,
        tree: PrefixTree,
        pool: PagePool,
        rule: LoadRule,
        *,
        keeps: bool = True,
        num_spared: int = 0,
    ) -> None:
        """rule: whether the end of a prefix is loaded that the device has not. keeps: otherwise it
        takes no page, and every request computes its whole prompt. num_spared: pages at the end of
        a match that are of no use."""
        super().__init__(tree, pool)
        self.rule = rule
        self.groups: list[PageGroup] = []  # what a request needs beside the pages of a prefix
        self.num_evictable = 0  # pages that are not in use
        self._keeps = keeps
        self.num_spared = num_spared

    # -- finding -----------------------------------------------------------------------------------

    def max_match(self, num_tokens: int) -> int:
        """Number of pages of the longest prefix that leaves at least one token to compute."""
        return (num_tokens - 1) // self.tree.page_size

    def match_pages(self, key: bytes, max_pages: int, namespace: bytes = b"") -> int:
        """Number of pages of `key` that are cached and of use, at most `max_pages`. Changes
        nothing. O(key)."""
        found = self.tree.match(key, max_pages, namespace)
        return self._num_useful(found, self._num_sure(key, sum(common for _, common in found)))

    def _num_sure(self, key: bytes, num_pages: int) -> int:
        """Of the first `num_pages` pages, which match, those without the beginning of an image that
        has too few keys to be no other."""
        page_size = self.tree.page_size
        end = num_pages * page_size
        last = memoryview(key).cast("i")[max(0, end - MIN_IMAGE_KEYS) : end]
        num_keys = next((place for place, id in enumerate(reversed(last)) if id >= 0), len(last))
        return (end - num_keys) // page_size if num_keys < MIN_IMAGE_KEYS else num_pages

    def _num_useful(self, found: Found, num_pages: int, *, may_load: bool = True) -> int:
        """Of the first `num_pages` pages of a match, those that all groups can go on behind. What
        one leaves may be too much for another, so all are asked until they agree."""
        num_pages, asked = max(0, num_pages - self.num_spared), -1
        while num_pages != asked:
            asked = num_pages
            for group in self.groups:
                num_pages = group.usable(found, num_pages, may_load=may_load)
        return num_pages

    def acquire(
        self, key: bytes, max_pages: int, namespace: bytes = b"", *, may_load: bool = True
    ) -> Match:
        """Lock the longest cached prefix of `key` that is of use, at most `max_pages` pages.
        O(key).

        Its end in another memory is left out where computing it is faster than loading it, and
        always without `may_load`.
        """
        tree = self.tree
        root = tree.root(namespace)
        found = tree.below(root, key, 0, max_pages)
        num_found = sum(common for _, common in found)
        path = tree.path(found, self._num_useful(found, self._num_sure(key, num_found)))
        on_device = [*takewhile(self.pages.__contains__, path)]
        pages = [page for node in on_device for page in self.pages[node]]
        num_to_load = sum(node.num_pages for node in path[len(on_device) :])
        node = path[-1] if path else root
        num_beside = sum(len(group.to_load(node)) for group in self.groups)
        if num_to_load or num_beside:
            found = [(each, each.num_pages) for each in path]
            num_here = self._num_useful(found, len(pages), may_load=False)
            num_saved = len(pages) + num_to_load - num_here
            if not (may_load and self.rule.pays(num_to_load + num_beside, num_saved)):
                path, pages = tree.path(found, num_here), pages[:num_here]
                node, num_to_load, num_beside = path[-1] if path else root, 0, 0
        tree.lock(node, path)
        return Match(node, pages, num_to_load, num_beside, num_found)

    def places_beside(self, start: int, end: int, num_spared: int = 0) -> list[tuple[int, int]]:
        """What a request needs to go on behind `end` pages, or without the last `num_spared` of
        them, beside those from page `start` on: by page and index."""
        return [
            (page, index)
            for group in self.groups
            for page in range(max(start, group.first_needed(end - num_spared)), end)
            for index in group.indices
        ]

    # -- adding ------------------------------------------------------------------------------------

    def extend(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> Node | None:
        """Take the pages `start`, `start + 1`, ... of `key`, following the locked `node`.

        `node` must end where `start` begins; its lock moves to the returned node. Returns None
        without a change if the cache already has device pages with the same tokens. O(pages).
        """
        if not self._keeps or self.tree.child(node, key, start) in self.pages:
            return None
        added, _ = self.put_run(node, key, start, pages)
        self.tree.lock(added)
        self.tree.release(node)
        return added

    def insert(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> Sequence[int]:
        """Take the pages that the cache does not have on the device, and return the others.

        `node` must end where `start` begins; its lock stays where it is. O(pages).
        """
        if not (self._keeps and pages):
            return pages
        last, refused = self.put_run(node, key, start, pages)
        self.tree.let_go(last)
        return refused

    # -- what may go -------------------------------------------------------------------------------

    def put(self, node: Node, pages: list[int]) -> None:
        super().put(node, pages)
        if not node.num_users:
            self.num_evictable += len(pages)

    def take(self, node: Node) -> list[int]:
        assert not node.num_users and node not in self._num_below, "a dropped page is still used"
        pages = super().take(node)
        self.num_evictable -= len(pages)
        return pages

    def locked(self, node: Node) -> None:
        if node in self.pages:
            self.num_evictable -= node.num_pages

    def released(self, node: Node) -> None:
        if node in self.pages:
            self.num_evictable += node.num_pages
            self.offer(node)

    def evict(self, num_pages: int) -> None:
        """Free the `num_pages` pages that go first, of which there must be as many."""
        while num_pages:
            node = self.pop()
            assert node is not None, "the caller has checked that there are enough"
            if node.num_pages > num_pages:  # evicting the tail is enough
                pages = self.pages[node]
                self.pool.free(pages[-num_pages:])
                del pages[-num_pages:]
                self.num_evictable -= num_pages
                self.tree.trim(node, num_pages)
                self.offer(node)
                return
            num_pages -= node.num_pages
            self.drop(node)
            self.tree.remove(node)

    def drop_late(self, node: Node, step: int) -> None:
        """Free the pages of `node` that were written by `step` or later, which must not be used.
        Pages of a run are written in order, so they are its tail."""
        late = [page for page in self.pages.get(node, ()) if self.pool.written_by[page] >= step]
        if late:
            self.tree.cut(node, len(late))
            self.drop(node)

    def drop_written_since(self, step: int) -> None:
        """Drop the pages that `step` or a later one has written. None may be locked."""
        for node in reversed([*self.tree.nodes()]):  # children first
            self.drop_late(node, step)
            if node not in self.pages:
                self.tree.remove(node)

    def audit(self) -> None:
        super().audit()
        evictable = sum(len(run) for node, run in self.pages.items() if not node.num_users)
        assert evictable == self.num_evictable, "the number of evictable pages is wrong"
        for node in self.pages:
            assert node.parent is not None
            assert node.parent in self.pages or node.parent.parent is None, "it has no way to it"
