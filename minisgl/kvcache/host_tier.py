"""Host memory behind the device: what is copied there when the device evicts it, and what is lost.

Nodes that were evicted stay in the tree below those with pages on the device. A node that is loaded
again keeps its host pages until others need them, so that evicting it once more copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.kvcache.host import HostPool
from minisgl.kvcache.prefix import Node
from minisgl.kvcache.residency import Device, Residency
from minisgl.kvcache.tree import PrefixTree


class HostTier(Residency):
    """The pages in host memory. It may drop a node on which nothing hangs: one that is on the
    device, too, or has no children."""

    pool: HostPool

    def __init__(
        self, tree: PrefixTree, device: Device, pool: HostPool, offloads_per_plan: int | None
    ) -> None:
        """offloads_per_plan: the most pages that a decode plan may offload; None: any number."""
        super().__init__(tree, pool)
        self.offloads_per_plan = offloads_per_plan
        self.device = device

    def may_go(self, node: Node) -> bool:
        if node.num_users or node not in self.pages:
            return False
        return node in self.device.pages or node not in self._num_below

    # -- what the device gives up ------------------------------------------------------------------

    def max_offloads(self, missing: int, num_beside: int | None, num_granted: int) -> int | None:
        """How many pages the next plan may offload to provide `missing` ones; None: any number.

        Where host memory pays, a page is copied in a fraction of the time in which it is computed.
        So a plan may offload as many pages as it computes. And it may offload as many as its rows
        take: otherwise a request would wait for room for as long as they are many.
        """
        if self.offloads_per_plan is None or num_beside is None:
            return None
        pace = self.offloads_per_plan + num_granted
        most = pace + num_beside // self._tree.page_size
        return most if self.pool.num_planned + missing <= most else pace

    def evict(self, num_pages: int, max_offloads: int | None = None) -> None:
        """Free at least the `num_pages` pages of the device that go first, of which there must be
        as many. Those that host memory has room for are copied there by the next plan, unless it
        has copies.

        With `max_offloads` they are fewer once the next plan offloads so many pages, those of
        earlier calls included.
        """
        while num_pages > 0:
            node = self.device.pop()
            assert node is not None, "the caller has checked that there are enough"
            at_most = max(num_pages, self.pool.piece)
            if max_offloads is not None and node not in self.pages:
                at_most = min(at_most, max_offloads - self.pool.num_planned)
                if at_most <= 0:
                    self.device.offer(node)
                    return
            self._tree.cut(node, at_most)
            num_pages -= node.num_pages
            if node in self.pages or self.offload(node):
                self.device.drop(node)
                self.offer(node)
            else:
                self._forget(node)

    def offload(self, node: Node) -> bool:
        """Copy a node here with the next plan; False if there is no room."""
        if not self.make_room(node.num_pages):
            return False
        self.put(node, self.pool.offload(self.device.pages[node]))
        return True

    def _forget(self, node: Node) -> None:
        """Remove a node and those below it, which have no pages on the device."""
        doomed = [node]
        for each in doomed:  # it grows meanwhile
            doomed += each.children.values()
        for each in reversed(doomed):
            self.drop(each)
            self.device.drop(each)
            self._tree.remove(each)

    # -- what host memory gives up -----------------------------------------------------------------

    def make_room(
        self, num_pages: int, may_drop: Callable[[Node], bool] = lambda node: True
    ) -> bool:
        """Free host pages, least recently used first, up to a node that `may_drop` keeps; False if
        there are too few."""
        pool = self.pool
        if num_pages > pool.num_pages:
            return False
        while pool.num_free < num_pages:
            node = self.pop()
            if node is None:
                return False
            if not may_drop(node):
                self.offer(node)
                return False
            self._tree.cut(node, max(num_pages - pool.num_free, pool.piece))
            self.leave(node)
        return True

    def leave(self, node: Node) -> None:
        """Take a node out of host memory, and out of the tree if it is not on the device."""
        self.drop(node)
        if node in self.device.pages:
            self._tree.let_go(node)
        else:
            self._tree.remove(node)

    def drop_written_since(self, step: int) -> None:
        """Drop what `step` or a later one has written or copied, on the device and here. None may
        be locked."""
        written_by = self.pool.written_by
        for node in reversed([*self._tree.nodes()]):  # children first
            if any(written_by[page] >= step for page in self.pages.get(node, ())):
                self.drop(node)
                self._tree.let_go(node)
            self.device.drop_late(node, step)
            if node not in self.device.pages and node not in self.pages:
                self._forget(node)

    # -- what comes from elsewhere -----------------------------------------------------------------

    def adopt(
        self, namespace: bytes, key: bytes, start: int, host_pages: Sequence[int], num_pages: int
    ) -> None:
        """Take the first `num_pages` of `host_pages`, with the tokens of `key` from page `start`
        on, and free the others.

        Those that the tree has in any tier are not taken, and none if it lacks what is before them.
        """
        if not num_pages:
            self.pool.free(host_pages)
            return
        tree, end = self._tree, start + num_pages
        root = tree.root(namespace)
        path = tree.path(tree.below(root, key, 0, end), end)
        last, at = path[-1] if path else root, sum(each.num_pages for each in path)
        num_refused = num_pages
        if start <= at < end:
            last = tree.add(last, key, at, end)
            num_refused = at - start
            self.put(last, list(host_pages[num_refused:num_pages]))
        tree.let_go(last)
        self.pool.free([*host_pages[num_pages:], *host_pages[:num_refused]])
