"""Snapshots of the states of requests: which are free, and which prefix each belongs to.

A model with a state for each request can compute on behind a cached prefix only from a snapshot of
the state at its end. A snapshot is an integer here; its owner is the free list, a node of the
radix tree, or the lease whose step writes it. Those of the tree make way for new ones, least
recently used first. Steps read and write snapshots in the order of their launch, so one that is
taken from a node may be written by the next step, whoever started from it before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from minisgl.kvcache.prefix import Node


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """How many snapshots there are, and how many of them are in the tree."""

    num: int
    num_cached: int

    @staticmethod
    def of(*parts: Snapshots | None) -> SnapshotStats | None:
        """Of all parts together; None: the model keeps no states."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        return SnapshotStats(
            sum(each.num for each in found), sum(each.num_cached for each in found)
        )


class Snapshots:
    """The snapshots 0 .. num - 1."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._free = list(range(num - 1, -1, -1))
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # least recently used first
        self._written_by = [0] * num  # the step whose launch has written it last

    @property
    def num_cached(self) -> int:
        """Number of snapshots in the tree."""
        return len(self._nodes)

    def take(self, step: int) -> int | None:
        """A snapshot that `step` writes, if need be from the tree; None if leases have all."""
        if self._free:
            taken = self._free.pop()
        elif self._nodes:
            taken, node = self._nodes.popitem(last=False)
            node.snapshot = None
        else:
            return None
        self._written_by[taken] = step
        return taken

    def free(self, snapshots: Iterable[int]) -> None:
        """Give back snapshots of a lease."""
        self._free.extend(snapshots)

    def put(self, node: Node, snapshot: int) -> None:
        """Give a node the snapshot of a lease, unless it has an equal one, which then counts as
        used."""
        if node.snapshot is not None:
            self.free([snapshot])
            self.use(node)
            return
        node.snapshot = snapshot
        self._nodes[snapshot] = node

    def use(self, node: Node) -> None:
        """Note that a request starts from the snapshot of a node."""
        assert node.snapshot is not None
        self._nodes.move_to_end(node.snapshot)

    def drop(self, node: Node) -> None:
        """Take the snapshot of a node away, if it has one."""
        if node.snapshot is not None:
            del self._nodes[node.snapshot]
            self.free([node.snapshot])
            node.snapshot = None

    def drop_written_since(self, step: int) -> None:
        """Take away what failed steps wrote from the nodes that have it."""
        for snapshot, node in list(self._nodes.items()):
            if self._written_by[snapshot] >= step:
                self.drop(node)

    def audit(self, nodes: Iterable[Node], held: Iterable[int], launched: int) -> None:
        """AssertionError unless each snapshot has one owner. nodes: of the tree; held: by leases;
        launched: the last step that is."""
        owned = {node.snapshot: node for node in nodes if node.snapshot is not None}
        assert owned == dict(self._nodes), "a snapshot is not where its node is"
        owners = sorted([*self._free, *self._nodes, *held])
        assert owners == list(range(self.num)), "a snapshot is lost or owned twice"
        assert all(self._written_by[snapshot] <= launched for snapshot in owned)
