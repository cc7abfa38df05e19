"""The pages of a memory: which nodes of the radix tree have some, and which lose them next."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.kvcache.leaves import LeafQueue
from minisgl.kvcache.page_pool import PagePool
from minisgl.kvcache.prefix import Node
from minisgl.kvcache.tree import Follower, PrefixTree


class Residency(Follower):
    """Nodes of a tree, each with all of its pages. A node may go that is not in use and has no
    child here; the least recently used goes first."""

    def __init__(self, tree: PrefixTree, pool: PagePool) -> None:
        self.pool = pool
        self.pages: dict[Node, list[int]] = {}
        self.watcher: Residency | None = None  # which `note` tells of nodes that come and go
        self._tree = tree
        self._num_below: dict[Node, int] = {}  # children that are here, if any
        self._leaves = LeafQueue(self.may_go)
        tree.followers.append(self)

    def may_go(self, node: Node) -> bool:
        return not node.num_users and node in self.pages and node not in self._num_below

    def put(self, node: Node, pages: list[int]) -> None:
        """Have a node from now on; the caller lets it go."""
        assert node.parent is not None
        self.pages[node] = pages
        self._num_below[node.parent] = self._num_below.get(node.parent, 0) + 1
        if self.watcher is not None:
            self.watcher.note(node)

    def take(self, node: Node) -> list[int]:
        """Have a node no longer, of which the caller gets the pages; its parent may go then."""
        parent, pages = node.parent, self.pages.pop(node)
        assert parent is not None
        self._num_below[parent] -= 1
        if not self._num_below[parent]:
            del self._num_below[parent]
        if self.watcher is not None:
            self.watcher.note(node)
        self.offer(parent)
        return pages

    def drop(self, node: Node) -> None:
        """Free the pages of a node, if it is here."""
        if node in self.pages:
            self.pool.free(self.take(node))

    def pop(self) -> Node | None:
        """The node that goes first, which is here still, but is offered no more; None if there is
        none."""
        return self._leaves.pop()

    def note(self, node: Node) -> None:
        """Note that `node` has come to another memory, or left it."""

    def offer(self, node: Node) -> None:
        if self.may_go(node):
            self._leaves.offer(node, self._tree.num_nodes)

    def released(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.offer(node)

    def split(self, upper: Node, node: Node) -> None:
        pages = self.pages.get(node)
        if pages is not None:
            self.pages[upper], self.pages[node] = pages[: upper.num_pages], pages[upper.num_pages :]
            self._num_below[upper] = 1

    def audit(self) -> None:
        """Recompute every invariant from scratch; AssertionError if one fails."""
        offered, num_below = self._leaves.nodes(), dict[Node, int]()
        for node, pages in self.pages.items():
            assert len(pages) == node.num_pages and node.parent is not None, "a run is not whole"
            num_below[node.parent] = num_below.get(node.parent, 0) + 1
        assert num_below == self._num_below, "a number of children is wrong"
        assert offered >= set(filter(self.may_go, self.pages)), "a leaf cannot be evicted"


class Device(Residency):
    """The pages on the device. They are a tree from the root; nodes without any hang below it."""

    def __init__(self, tree: PrefixTree, pool: PagePool) -> None:
        super().__init__(tree, pool)
        self.num_evictable = 0  # pages that are not in use

    def put(self, node: Node, pages: list[int]) -> None:
        super().put(node, pages)
        if not node.num_users:
            self.num_evictable += len(pages)

    def take(self, node: Node) -> list[int]:
        assert not node.num_users and node not in self._num_below, "a dropped page is still used"
        pages = super().take(node)
        self.num_evictable -= len(pages)
        return pages

    def locked(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node in self.pages:
                self.num_evictable -= node.num_pages

    def released(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
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
                self._tree.trim(node, num_pages)
                self.offer(node)
                return
            num_pages -= node.num_pages
            self.drop(node)
            self._tree.remove(node)

    def drop_late(self, node: Node, step: int) -> None:
        """Free the pages of `node` that were written by `step` or later, which must not be used.
        Pages of a run are written in order, so they are its tail."""
        late = [page for page in self.pages.get(node, ()) if self.pool.written_by[page] >= step]
        if late:
            self._tree.cut(node, len(late))
            self.drop(node)

    def drop_written_since(self, step: int) -> None:
        """Drop the pages that `step` or a later one has written. None may be locked."""
        for node in reversed([*self._tree.nodes()]):  # children first
            self.drop_late(node, step)
            if node not in self.pages:
                self._tree.remove(node)

    def audit(self) -> None:
        super().audit()
        evictable = sum(len(run) for node, run in self.pages.items() if not node.num_users)
        assert evictable == self.num_evictable, "the number of evictable pages is wrong"
        for node in self.pages:
            assert node.parent is not None
            assert node.parent in self.pages or node.parent.parent is None, "it has no way to it"
