"""The order in which nodes of a radix tree lose their pages: least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from minisgl.kvcache.prefix import Node

# (last_used, order of insertion, leaf). An entry is stale, and skipped, if its leaf has changed.
_HeapEntry = tuple[int, int, Node]


class LeafQueue:
    """Nodes that may lose their pages, each as of its `last_used` when it was offered.

    A node that changes is not looked for: its entry is skipped when its turn comes, so the cost of
    everything here is logarithmic, amortized.
    """

    def __init__(self, may_go: Callable[[Node], bool]) -> None:
        """may_go: whether a node may lose its pages."""
        self._may_go = may_go
        self._heap: list[_HeapEntry] = []
        self._num_offers = 0

    def offer(self, node: Node, num_nodes: int) -> None:
        """Add a node. num_nodes: of the tree, which bounds the entries kept."""
        self._num_offers += 1
        heapq.heappush(self._heap, (node.last_used, self._num_offers, node))
        if len(self._heap) > 64 + 2 * num_nodes:  # amortized: most are stale
            fresh = {entry[2]: entry for entry in self._heap if self._is_fresh(entry)}
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """Remove and return the least recently used node; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_fresh(entry):
                return entry[2]
        return None

    def nodes(self) -> set[Node]:
        """Every node that `pop` may return. O(entries)."""
        return {entry[2] for entry in self._heap if self._is_fresh(entry)}

    def _is_fresh(self, entry: _HeapEntry) -> bool:
        last_used, _, node = entry
        return node.last_used == last_used and self._may_go(node)
