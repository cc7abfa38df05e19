"""Host memory behind the device: what is copied there when the device evicts it, and what is lost.

Nodes that were evicted stay in the tree below those with pages on the device. A node that is loaded
again keeps its host pages until others need them, so that evicting it once more copies nothing.
Some are copied ahead of their eviction, so that a decode plan need not wait for room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

from minisgl.kvcache.lease import Beside
from minisgl.kvcache.page_pool import HostPool
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.residency import Residency
from minisgl.kvcache.tree import Node


class HostTier(Residency):
    """The pages in host memory. It may drop a node on which nothing hangs: one that is on the
    device, too, or has no children."""

    pool: HostPool

    def __init__(self, device: RadixCache, pool: HostPool, offloads_per_plan: int | None) -> None:
        """offloads_per_plan: the most pages that a decode plan may offload; None: any number."""
        super().__init__(device.tree, pool)
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
        So a plan may offload as many pages as it computes, if that is enough for what may be beside
        each of them. And it may offload as many as its rows take: otherwise a request would wait
        for room for as long as they are many.
        """
        if self.offloads_per_plan is None or num_beside is None:
            return None
        pace = self.offloads_per_plan + num_granted
        most = pace + num_beside // self.tree.page_size
        missing *= 1 + sum(len(group.indices) for group in self.device.groups)
        return most if len(self.pool.offloads) + missing <= most else pace

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
            if max_offloads is not None and (node not in self.pages or self.beside(node)):
                at_most = min(at_most, self.room_for(node, max_offloads))
                if at_most <= 0:
                    self.device.offer(node)
                    return
            self.tree.cut(node, at_most)
            num_pages -= node.num_pages
            if self.offload(node):
                self.device.drop(node)
                self.offer(node)
            else:
                self._forget(node)

    def room_for(self, node: Node, max_offloads: int) -> int:
        """How many of the last pages of `node` the next plan may offload with what groups have of
        it, if it offloads `max_offloads` at most. If that is less than this takes, the first page
        of a plan goes nevertheless: no other plan would have more room."""
        left = max_offloads - len(self.pool.offloads)
        least = 0 if self.pool.offloads or not max_offloads else 1
        own, beside = int(node not in self.pages), Counter(at for at, _ in self.beside(node))
        taken = accumulate(own + beside[at] for at in reversed(range(node.num_pages)))
        return max(least, sum(1 for _ in takewhile(lambda num: num <= left, taken)))

    def offload(self, node: Node) -> bool:
        """Copy a node here with the next plan, and what groups have of it; False if there is no
        room."""
        beside = self.beside(node)
        if node in self.pages:  # which must not make room for what belongs to it
            beside = beside if len(beside) <= self.pool.num_free else {}
        else:
            if not self.make_room(node.num_pages + len(beside)):
                beside = {}
                if not self.make_room(node.num_pages):
                    return False
            self.put(node, self.pool.offload(self.device.pages[node]))
        host_pages = self.pages[node]
        self.pool.offload_beside(
            {(host_pages[at], index): number for (at, index), number in beside.items()}
        )
        return True

    def save(self, node: Node, num_computed: int) -> None:
        """Copy the end of a node here with the next plan, as a group is about to give up what its
        pages are of no use without. Nothing happens if that plan offloads too much already.
        num_computed: pages that it computes."""
        if node not in self.device.pages or not self.beside(node):
            return
        most = self.offloads_per_plan
        room = node.num_pages if most is None else self.room_for(node, most + num_computed)
        if room:
            self.tree.cut(node, room)
            if self.offload(node):
                self.tree.let_go(node)

    def beside(self, node: Node) -> Beside:
        """What groups have of a node on the device alone, and prefixes need."""
        host_pages, held = self.pages.get(node), self.pool.beside
        return {
            (at, index): number
            for group in self.device.groups
            for (at, index), number in group.on_device(node).items()
            if host_pages is None or index not in held.get(host_pages[at], ())
        }

    def _forget(self, node: Node) -> None:
        """Remove a node and those below it, which have no pages on the device."""
        doomed = [node]
        for each in doomed:  # it grows meanwhile
            doomed += each.children.values()
        for each in reversed(doomed):
            self.drop(each)
            self.device.drop(each)
            self.tree.remove(each)

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
            if any(group.give_up() for group in self.device.groups):
                continue
            node = self.pop()
            if node is None:
                return False
            if not may_drop(node):
                self.offer(node)
                return False
            self.tree.cut(node, max(num_pages - pool.num_free, pool.piece))
            self.leave(node)
        return True

    def leave(self, node: Node) -> None:
        """Take a node out of host memory, and out of the tree if it is not on the device."""
        self.drop(node)
        if node in self.device.pages:
            self.tree.let_go(node)
        else:
            self.tree.remove(node)

    def drop_written_since(self, step: int) -> None:
        """Drop what `step` or a later one has written or copied, on the device and here. None may
        be locked."""
        written_by = self.pool.written_by
        for node in reversed([*self.tree.nodes()]):  # children first
            host_pages = self.pool.with_beside(self.pages.get(node, ()))
            if any(written_by[page] >= step for page in host_pages):
                self.drop(node)
                self.tree.let_go(node)
            self.device.drop_late(node, step)
            if node not in self.device.pages and node not in self.pages:
                self._forget(node)

    # -- what comes from elsewhere -----------------------------------------------------------------

    def adopt(
        self,
        namespace: bytes,
        key: bytes,
        start: int,
        host_pages: Sequence[int],
        num_come: int,
        places: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Take the first `num_come` of `host_pages`, and free the others: those with the tokens of
        `key` from page `start` on, then what is beside some of these, by page of `key` and index.

        What is beside a page is of use only if all of it has come. Pages that are here are not
        taken, and none if the tree lacks what is before them.
        """
        num_pages = len(host_pages) - len(places)
        tree, left = self.tree, dict(zip(places, host_pages[num_pages:], strict=True))
        missing = [*host_pages[num_come:num_pages]]
        if num_come < len(host_pages):
            missing += left.values()
            left = {}
        last, refused = tree.root(namespace), [*host_pages[: min(num_come, num_pages)]]
        path = tree.path(tree.below(last, key, 0, start), start)
        if sum(each.num_pages for each in path) == start:
            last, refused = self.put_run(path[-1] if path else last, key, start, refused)
            path = [*reversed([*last.upwards()])]
            held = [page for each in path for page in self.pages.get(each, [-1] * each.num_pages)]
            for place, index in [*left]:
                kept = self.pool.beside.setdefault(held[place], {})
                if index not in kept:
                    kept[index] = left.pop((place, index))
        tree.let_go(last)
        self.pool.free([*missing, *refused, *left.values()])


class CopiesAhead(Residency):
    """What the device has without a copy in host memory, and what was copied ahead of its eviction.
    Children are copied before their parents."""

    def __init__(self, host: HostTier, num_wanted: int, *, may_drop: bool) -> None:
        """num_wanted: number of pages of the device that are to be free or copied ahead. may_drop:
        whether host memory drops older pages for that; otherwise the disk makes room."""
        super().__init__(host.tree, host.device.pool)
        self.copied: set[Node] = set()  # ahead of their eviction, and not used since
        self.num_copied = 0  # pages of these
        self._device = host.device
        self._host = host
        self._num_wanted = num_wanted
        self._may_drop = may_drop
        host.device.watcher = host.watcher = self._note

    def copy(self) -> None:
        """Let the next plan copy what the device evicts next, as far as a decode plan may."""
        pool, most = self._host.pool, self._host.offloads_per_plan
        num_wanted = self._num_wanted - self._device.pool.num_free
        while most is not None and self.num_copied < num_wanted and len(pool.offloads) < most:
            node = self.pop()
            if node is None:
                return
            missing = max(num_wanted - self.num_copied, pool.piece)
            room = min(self._host.room_for(node, most), missing)
            if room:
                self.tree.cut(node, room)
            num_pages = node.num_pages + len(self._host.beside(node))
            if not (room and self._makes_room(num_pages) and self._copies(node, most)):
                self.offer(node)
                return
            self.copied.add(node)
            self.num_copied += node.num_pages
            self.tree.let_go(node)

    def _copies(self, node: Node, most: int) -> bool:
        """Copy a node, unless that is more now than the next plan may: prefixes may end with it
        since what was below it made room."""
        return self._host.room_for(node, most) >= node.num_pages and self._host.offload(node)

    def _makes_room(self, num_pages: int) -> bool:
        """Drops no copies that the device is to evict sooner than what they would make room for."""
        if not self._may_drop:
            return self._host.pool.num_free >= num_pages
        return self._host.make_room(num_pages, lambda node: node not in self._device.pages)

    def _note(self, node: Node) -> None:
        """Note that `node` has come to the device or host memory, or left it."""
        pages, is_copied = self._device.pages.get(node), node in self._host.pages
        if pages is None or not is_copied:
            self.locked(node)
        if pages is None or is_copied:
            if node in self.pages:
                self.take(node)
        elif node not in self.pages:
            self.put(node, pages)

    def locked(self, node: Node) -> None:
        """Note that `node` is not ahead any more."""
        if node in self.copied:
            self.copied.remove(node)
            self.num_copied -= node.num_pages

    def split(self, upper: Node, node: Node) -> None:
        super().split(upper, node)
        if node in self.copied:
            self.copied.add(upper)

    def audit(self) -> None:
        super().audit()
        device, host = self._device.pages.keys(), self._host.pages.keys()
        assert self.pages.keys() == device - host, "a copy is not where its node is"
        assert self.copied <= device & host, "a node is not ahead"
        assert not any(node.num_users for node in self.copied), "it was copied in vain"
        num_copied = sum(node.num_pages for node in self.copied)
        assert num_copied == self.num_copied, "the number of pages copied ahead is wrong"
