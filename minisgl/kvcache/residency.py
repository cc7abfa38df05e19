"""The pages of a memory: which nodes of the radix tree have some, and which lose them next."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from minisgl.kvcache.page_pool import PagePool
from minisgl.kvcache.tree import Follower, Node, PrefixTree

# (last_used, order of insertion, node). An entry is stale, and skipped, if its node has changed.
_HeapEntry = tuple[int, int, Node]


class Residency(Follower):
    """Nodes of a tree, each with all of its pages. A node may go that is not in use and has no
    child here; the least recently used goes first.

    A node that changes is not looked for among those that may go: its entry is skipped when its
    turn comes, so the cost of everything here is logarithmic, amortized.
    """

    def __init__(self, tree: PrefixTree, pool: PagePool) -> None:
        self.pool = pool
        self.pages: dict[Node, list[int]] = {}
        self.watcher: Callable[[Node], None] = lambda node: None  # called with what comes and goes
        self.tree = tree
        self._num_below: dict[Node, int] = {}  # children that are here, if any
        self._heap: list[_HeapEntry] = []
        self._num_offers = 0
        tree.followers.append(self)

    def may_go(self, node: Node) -> bool:
        return not node.num_users and node in self.pages and node not in self._num_below

    def put(self, node: Node, pages: list[int]) -> None:
        """Have a node from now on; the caller lets it go."""
        assert node.parent is not None
        self.pages[node] = pages
        self._num_below[node.parent] = self._num_below.get(node.parent, 0) + 1
        self.watcher(node)

    def put_run(
        self, node: Node, key: bytes, start: int, pages: Sequence[int]
    ) -> tuple[Node, list[int]]:
        """Have pages of `key` below `node`, where none are; returns the last node and the others.

        Nodes that are in another memory only get theirs back.
        """
        tree, num_put, refused = self.tree, 0, list[int]()
        found = tree.below(node, key, start, start + len(pages))
        for node in tree.path(found, len(pages)):
            run = pages[num_put : num_put + node.num_pages]
            if node in self.pages:
                refused += run
            else:
                self.put(node, list(run))
                tree.let_go(node)
            num_put += len(run)
        if num_put < len(pages):
            node = tree.add(node, key, start + num_put, start + len(pages))
            self.put(node, list(pages[num_put:]))
        return node, refused

    def take(self, node: Node) -> list[int]:
        """Have a node no longer, of which the caller gets the pages; its parent may go then."""
        parent, pages = node.parent, self.pages.pop(node)
        assert parent is not None
        self._num_below[parent] -= 1
        if not self._num_below[parent]:
            del self._num_below[parent]
        self.watcher(node)
        self.offer(parent)
        return pages

    def drop(self, node: Node) -> None:
        """Free the pages of a node, if it is here."""
        if node in self.pages:
            self.pool.free(self.take(node))

    def offer(self, node: Node) -> None:
        if not self.may_go(node):
            return
        self._num_offers += 1
        heapq.heappush(self._heap, (node.last_used, self._num_offers, node))
        if len(self._heap) > 64 + 2 * self.tree.num_nodes:  # amortized: most are stale
            fresh = {entry[2]: entry for entry in self._heap if self._is_fresh(entry)}
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """The node that goes first, which is offered no more; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_fresh(entry):
                return entry[2]
        return None

    def _is_fresh(self, entry: _HeapEntry) -> bool:
        last_used, _, node = entry
        return node.last_used == last_used and self.may_go(node)

    def released(self, node: Node) -> None:
        self.offer(node)

    def split(self, upper: Node, node: Node) -> None:
        pages = self.pages.get(node)
        if pages is not None:
            self.pages[upper], self.pages[node] = pages[: upper.num_pages], pages[upper.num_pages :]
            self._num_below[upper] = 1

    def audit(self) -> None:
        """Recompute every invariant from scratch; AssertionError if one fails."""
        offered = {entry[2] for entry in self._heap if self._is_fresh(entry)}
        for node, pages in self.pages.items():
            assert len(pages) == node.num_pages, "a run is not whole"
        num_below = Counter(node.parent for node in self.pages)
        assert num_below == self._num_below, "a number of children is wrong"
        assert offered >= set(filter(self.may_go, self.pages)), "a leaf cannot be evicted"
