"""Copies to host memory ahead of eviction, so that a decode plan need not wait for room."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.kvcache.host_tier import HostTier
from minisgl.kvcache.prefix import Node
from minisgl.kvcache.residency import Residency
from minisgl.kvcache.tree import PrefixTree


class CopiesAhead(Residency):
    """What the device has without a copy in host memory, and which nodes were copied ahead: before
    their eviction, and not used since. Children go before parents."""

    def __init__(
        self, tree: PrefixTree, host: HostTier, num_wanted: int, *, may_drop: bool
    ) -> None:
        """num_wanted: number of pages of the device that are to be free or copied ahead. may_drop:
        whether host memory drops older pages for that; otherwise the disk makes room."""
        super().__init__(tree, host.device.pool)
        self.num_ahead = 0  # pages
        self._ahead: set[Node] = set()
        self._device = host.device
        self._host = host
        self._num_wanted = num_wanted
        self._may_drop = may_drop
        host.device.watcher = host.watcher = self

    def __contains__(self, node: Node) -> bool:
        """Whether a node was copied ahead."""
        return node in self._ahead

    def copy(self) -> None:
        """Let the next plan copy what the device evicts next, as far as a decode plan may."""
        pool, most = self._host.pool, self._host.offloads_per_plan
        num_wanted = self._num_wanted - self._device.pool.num_free
        while most is not None and self.num_ahead < num_wanted and pool.num_planned < most:
            node = self.pop()
            if node is None:
                return
            missing = max(num_wanted - self.num_ahead, pool.piece)
            self._tree.cut(node, min(most - pool.num_planned, missing))
            if not self._makes_room(node.num_pages):
                self.offer(node)
                return
            self._host.offload(node)
            self._ahead.add(node)
            self.num_ahead += node.num_pages
            self._tree.let_go(node)

    def _makes_room(self, num_pages: int) -> bool:
        """Drops no copies that the device is to evict sooner than what they would make room for."""
        if not self._may_drop:
            return self._host.pool.num_free >= num_pages
        return self._host.make_room(num_pages, lambda node: node not in self._device.pages)

    def note(self, node: Node) -> None:
        pages, is_copied = self._device.pages.get(node), node in self._host.pages
        if pages is None or not is_copied:
            self.locked([node])
        if pages is None or is_copied:
            if node in self.pages:
                self.take(node)
        elif node not in self.pages:
            self.put(node, pages)

    def locked(self, nodes: Sequence[Node]) -> None:
        """Note that `nodes` are not ahead any more."""
        for node in self._ahead.intersection(nodes) if self._ahead else ():
            self._ahead.remove(node)
            self.num_ahead -= node.num_pages

    def split(self, upper: Node, node: Node) -> None:
        super().split(upper, node)
        if node in self._ahead:
            self._ahead.add(upper)

    def audit(self) -> None:
        super().audit()
        device, host = self._device.pages.keys(), self._host.pages.keys()
        assert self.pages.keys() == device - host, "a copy is not where its node is"
        assert self._ahead <= device & host, "a node is not ahead"
        assert not any(node.num_users for node in self._ahead), "it was copied in vain"
        num_ahead = sum(node.num_pages for node in self._ahead)
        assert num_ahead == self.num_ahead, "the number of pages copied ahead is wrong"
