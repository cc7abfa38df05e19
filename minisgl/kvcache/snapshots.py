"""Snapshots of the states of requests: which are free, and which prefix each belongs to.

A model with a state for each request can compute on behind a cached prefix only from a snapshot of
the state at its end. A snapshot is an integer here; its owner is the free list, a node of the
radix tree, or the lease whose step writes it. Those of the tree make way for new ones, least
recently used first. Steps read and write snapshots in the order of their launch, so one that is
taken from a node may be written by the next step, whoever started from it before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minisgl.kvcache.lease import Lease
from minisgl.kvcache.tree import Follower, Found, Node, PrefixTree


class TakenSnapshot(NamedTuple):
    """A snapshot that a step leaves of a request's state."""

    end: int  # number of tokens of which it is the state
    snapshot: int


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """How many snapshots there are, and how many of them are in the tree."""

    num: int
    num_cached: int


class Snapshots(Follower):
    """The snapshots 0 .. num - 1, as a `PageGroup`."""

    def __init__(self, num: int, tree: PrefixTree) -> None:
        self.num = num
        self._tree = tree
        self._free = list(range(num - 1, -1, -1))
        self._cached: OrderedDict[Node, int] = OrderedDict()  # least recently used first
        self._written_by = [0] * num  # the step whose launch has written it last
        tree.followers.append(self)

    @property
    def stats(self) -> SnapshotStats:
        return SnapshotStats(self.num, len(self._cached))

    def usable(self, found: Found, num_pages: int) -> int:
        """A request can go on behind the deepest node that has a snapshot."""
        usable = end = 0
        for node, common in found:
            end += common
            if node in self._cached and common == node.num_pages and end <= num_pages:
                usable = end
        return usable

    def open(self, lease: Lease, ends: Iterable[int]) -> None:
        if lease.node in self._cached:
            lease.start_snapshot = self._cached[lease.node]
            self._cached.move_to_end(lease.node)
        lease.snapshots = {end: None for end in sorted(ends) if end > len(lease.pages)}

    def claim(self, lease: Lease, num_tokens: int) -> bool:
        return True

    def take(self, lease: Lease, start: int, end: int, step: int) -> tuple[TakenSnapshot, ...]:
        """The snapshots that `step` leaves, which computes the tokens `start` .. `end` - 1."""
        taken: list[TakenSnapshot] = []
        for boundary in lease.snapshots:
            num_tokens = boundary * self._tree.page_size
            if start < num_tokens <= end and (self._free or self._cached):
                snapshot = self._free.pop() if self._free else self._cached.popitem(last=False)[1]
                self._written_by[snapshot] = step
                lease.snapshots[boundary] = snapshot
                taken.append(TakenSnapshot(num_tokens, snapshot))
        return tuple(taken)

    def commit(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        """Give snapshots of a lease to the nodes that end there, as far as the tree has them."""
        for boundary, snapshot in [*lease.snapshots.items()]:
            if snapshot is None or boundary > num_pages:
                continue
            path = self._tree.path(self._tree.along(lease.node, key, boundary), boundary)
            if sum(node.num_pages for node in path) == boundary:
                del lease.snapshots[boundary]
                if self._cached.setdefault(path[-1], snapshot) != snapshot:  # it has an equal one
                    self._free.append(snapshot)
                    self._cached.move_to_end(path[-1])

    def close(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        self.commit(lease, key, num_pages, step)
        self._free += [each for each in lease.snapshots.values() if each is not None]

    def ended(self, node: Node) -> None:
        """Take the snapshot of a node away, if it has one."""
        snapshot = self._cached.pop(node, None)
        if snapshot is not None:
            self._free.append(snapshot)

    def drop_written_since(self, step: int) -> None:
        for node, snapshot in [*self._cached.items()]:
            if self._written_by[snapshot] >= step:
                self.ended(node)

    def audit(self, leases: Sequence[Lease], launched: int) -> None:
        assert self._cached.keys() <= set(self._tree.nodes()), "a snapshot is left of a prefix"
        held = [each for lease in leases for each in lease.snapshots.values() if each is not None]
        owners = sorted([*self._free, *self._cached.values(), *held])
        assert owners == list(range(self.num)), "a snapshot is lost or owned twice"
        assert all(self._written_by[each] <= launched for each in self._cached.values())
