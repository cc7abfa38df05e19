"""Snapshots of the states of requests: which are free, and which prefix each belongs to.

A model with a state for each request can compute on behind a cached prefix only from a snapshot of
the state at its end. A snapshot is an integer here; its owner is the free list, a node of the
radix tree, or the lease whose step writes it. Those of the tree make way for new ones, least
recently used first. Steps read and write snapshots in the order of their launch, so one that is
taken from a node may be written by the next step, whoever started from it before. A load writes its
own before the rows of its plan, so it takes none from which one of these begins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minisgl.kvcache.lease import Beside, Lease
from minisgl.kvcache.numbered_group import NumberedGroup
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.tree import Found, Node


class TakenSnapshot(NamedTuple):
    """A snapshot that a step leaves of a request's state."""

    end: int  # number of tokens of which it is the state
    snapshot: int


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """How many snapshots there are, and how many of them are in the tree."""

    num: int
    num_cached: int


class Snapshots(NumberedGroup):
    """The snapshots 0 .. num - 1, as a `PageGroup`. In another memory one takes `pages_each` pages,
    beside the last page of its prefix."""

    def __init__(self, num: int, cache: RadixCache, pages_each: int = 1) -> None:
        super().__init__(num, cache, pages_each)
        self.num = num
        self._tree = cache.tree
        self._free = list(range(num - 1, -1, -1))
        self._cached: OrderedDict[Node, int] = OrderedDict()  # least recently used first
        # Nodes behind which only one prefix goes on, and has a snapshot, too.
        self._passed: OrderedDict[Node, None] = OrderedDict()
        # Of requests whose first chunk is not planned: a load of the same plan, which comes before
        # them, must not write what they begin from.
        self._waiting: set[Lease] = set()

    @property
    def stats(self) -> SnapshotStats:
        return SnapshotStats(self.num, len(self._cached))

    def first_needed(self, num_pages: int) -> int:
        return max(0, num_pages - 1)

    def on_device(self, node: Node) -> Beside:
        if node not in self._cached or node in self._passed:
            return {}
        numbers = zip(self.indices, self._parts(self._cached[node]), strict=True)
        return {(node.num_pages - 1, index): number for index, number in numbers}

    def on_device_for(self, node: Node, pages: Sequence[int]) -> Sequence[int]:
        return self._parts(self._cached[node]) if node in self._cached else ()

    def to_load(self, node: Node) -> Sequence[int]:
        return () if node in self._cached else self._in_host(node, node.num_pages - 1)

    def load(self, lease: Lease) -> Sequence[int]:
        if not self.to_load(lease.node):
            return ()
        snapshot = self._take()
        assert snapshot is not None, "it was claimed"
        self._cached[lease.node] = lease.start_snapshot = snapshot
        return self._parts(snapshot)

    def usable(self, found: Found, num_pages: int, *, may_load: bool) -> int:
        """A request can go on behind the deepest node that has a snapshot."""
        may_load = may_load and self.num > 0
        usable = end = 0
        for node, common in found:
            end += common
            if common != node.num_pages or end > num_pages:
                break
            if node in self._cached or (may_load and self.to_load(node)):
                usable = end
        return usable

    def give_up(self) -> bool:
        assert self._host is not None, "what it keeps is there"
        loading = self._loading()
        while self._passed and (node := next(iter(self._passed))) not in loading:
            del self._passed[node]
            if self._in_host(node, node.num_pages - 1):
                self._host.pool.drop_beside(self._host.pages[node][-1], self.indices)
                return True
        return False

    def open(self, lease: Lease, ends: Iterable[int]) -> None:
        self._passed.pop(lease.node, None)
        if lease.node in self._cached:
            lease.start_snapshot = self._cached[lease.node]
            self._cached.move_to_end(lease.node)
            if self._loads is not None:
                self._loads.wait_for(self._parts(lease.start_snapshot), lease)
        self._waiting.add(lease)
        lease.snapshots = {end: None for end in sorted(ends) if end > len(lease.pages)}

    def claim(self, lease: Lease, num_tokens: int) -> bool:
        if not (lease.must_load and self.to_load(lease.node)):
            return True
        return bool(self._free) or self._least_used() is not None

    def _least_used(self) -> Node | None:
        """The node that loses its snapshot next: no load writes it, and no request waits for it."""
        kept = self._loading().union(lease.node for lease in self._waiting)
        return next((node for node in self._cached if node not in kept), None)

    def _loading(self) -> set[Node]:
        """The last nodes of loads on their way."""
        if self._loads is None:
            return set()
        return {node for node, _ in self._loads.in_flight.values()}

    def _take(self, num_computed: int = 0) -> int | None:
        """num_computed: pages that the plan computes for whoever takes it."""
        if self._free:
            return self._free.pop()
        node = self._least_used()
        if node is None:
            return None
        if self._host is not None:
            self._host.save(node, num_computed)
        return self._cached.pop(node)

    def take(self, lease: Lease, start: int, end: int, step: int) -> tuple[TakenSnapshot, ...]:
        """The snapshots that `step` leaves, which computes the tokens `start` .. `end` - 1."""
        self._waiting.discard(lease)
        taken: list[TakenSnapshot] = []
        for boundary in lease.snapshots:
            num_tokens = boundary * self._tree.page_size
            if not start < num_tokens <= end:
                continue
            snapshot = self._take((end - start) // self._tree.page_size)
            if snapshot is not None:
                self._cache.pool.mark_written(self._parts(snapshot), step)
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
                self._pass(path)

    def _pass(self, path: Sequence[Node]) -> None:
        """Have the snapshots go first that lie before the last node of a path: what goes on behind
        their prefixes goes on behind that node, as far as is known."""
        self._passed.pop(path[-1], None)
        for node in path[:-1]:
            if len(node.children) > 1:
                self._passed.pop(node, None)
            elif node in self._cached or self.to_load(node):
                self._passed[node] = None
                if node in self._cached:
                    self._cached.move_to_end(node, last=False)

    def close(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        self.commit(lease, key, num_pages, step)
        self._waiting.discard(lease)
        self._free += [each for each in lease.snapshots.values() if each is not None]

    def ended(self, node: Node) -> None:
        """Take the snapshot of a node away, if it has one."""
        self._passed.pop(node, None)
        snapshot = self._cached.pop(node, None)
        if snapshot is not None:
            self._free.append(snapshot)

    def drop_written_since(self, step: int) -> None:
        for node, snapshot in [*self._cached.items()]:
            if self._written(snapshot) >= step:
                self.ended(node)

    def audit(self, leases: Sequence[Lease], launched: int) -> None:
        assert self._cached.keys() <= set(self._tree.nodes()), "a snapshot is left of a prefix"
        held = [each for lease in leases for each in lease.snapshots.values() if each is not None]
        owners = sorted([*self._free, *self._cached.values(), *held])
        assert owners == list(range(self.num)), "a snapshot is lost or owned twice"
        assert self._passed.keys() <= set(self._tree.nodes())
        assert self._waiting <= {*leases}
        self._audit_written(self._cached.values(), launched)
