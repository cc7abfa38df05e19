"""The disk behind host memory: which pages go there, and which can come back.

Pages are written when host memory is about to evict them, from where they lie: they are frozen
until they are on disk, and free then. Only pages whose offload is settled are written, so that no
failed step leaves anything. Pages come back into host memory before their request is admitted. The
tree knows nothing of the disk: a prefix is looked up by its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from minisgl.kvcache.copies import ALWAYS, LoadRule
from minisgl.kvcache.host_tier import CopiesAhead, HostTier
from minisgl.kvcache.lease import last_end
from minisgl.kvcache.moves import Moves, Place
from minisgl.kvcache.page_keys import PageIndex, key_beside, page_keys
from minisgl.kvcache.tree import Node

# Closing an engine writes there for no longer than this.
STORE_S = 10.0


@dataclass(frozen=True, slots=True)
class Disk:
    """What is on disk, and what it takes to use it."""

    index: PageIndex
    fingerprint: bytes  # of the model and all else that the pages depend on, but the tokens
    rule: LoadRule = ALWAYS  # for pages from disk to device


@dataclass(slots=True, eq=False, repr=False)
class DiskTier:
    """Looks for pages on disk, and begins the moves to it and from it."""

    _disk: Disk
    _host: HostTier
    _ahead: CopiesAhead
    _moves: Moves
    _num_spare: int  # host pages that are kept free
    _rank: int  # whose host memory it is

    def read(
        self,
        key: bytes,
        num_tokens: int,
        namespace: bytes = b"",
        *,
        ended: Callable[[range], None] = lambda pages: None,
    ) -> bool:
        """Begin to read what the disk has of `key` beyond the other tiers, if that pays.

        Returns whether it has begun. If only a part comes, it goes on with what requests can go on
        behind nevertheless. ended: called at the end with the pages of `key` that have come:
        `acquire` may find more then.
        """
        pool, index = self._host.pool, self._disk.index
        max_pages = self._host.device.max_match(num_tokens)
        match = self._host.device.acquire(key, max_pages, namespace)  # locked while room is made
        start = len(match.pages) + match.num_to_load
        size, fingerprint = self._host.tree.page_bytes, self._disk.fingerprint
        names = page_keys(fingerprint, namespace, key, size, start, max_pages)
        most = pool.num_pages - self._num_spare
        for group in self._host.device.groups:
            most -= len(group.indices) * (max_pages - group.first_needed(max_pages))
        keys = [*takewhile(index.holds, names)][: max(0, most)]
        num_saved, beside = self._usable(keys, start)
        # Without those that the tree has; but what is beside a page comes with it.
        wanted = min((page for page, _ in beside), default=start + num_saved)
        first = max(start, min(match.num_found, wanted))
        count = start + num_saved - first
        num_all = count + len(beside)
        pays = count > 0 and self._disk.rule.pays(num_all, num_saved)
        begins = pays and self._host.make_room(num_all)
        if begins:
            pages = pool.take(num_all)
            names_beside = [key_beside(keys[page - start], index) for page, index in beside]
            keys = [*keys[first - start : num_saved], *names_beside]

            def move_ended(num_moved: int) -> None:
                index.forget(keys[num_moved:])  # a rank does not have them
                self._host.adopt(namespace, key, first, pages, num_moved, beside)

                def and_shorter(come: range) -> None:
                    ended(range(first, max(first + min(count, num_moved), come.stop)))

                # Behind what has come without what belongs beside it no request can go on: perhaps
                # behind a shorter part. The rest is there for whoever computes it anew.
                is_whole = num_moved == num_all
                if is_whole or not self.read(key, num_tokens, namespace, ended=and_shorter):
                    and_shorter(range(0))

            source, target = Place.DISK, Place.HOST
            self._moves.begin(source, target, pages, move_ended, keys=keys, rank=self._rank)
        self._host.tree.release(match.node)
        return begins

    def _usable(self, keys: Sequence[bytes], start: int) -> tuple[int, list[tuple[int, int]]]:
        """Of pages on disk from page `start` on, how many a request can go on behind; and what it
        needs beside them, by page and index."""
        device, holds = self._host.device, self._disk.index.holds
        end, asked = start + len(keys), -1
        while end != asked:
            asked = end
            for group in device.groups:

                def has(page: int, indices: range = group.indices) -> bool:
                    beside = (key_beside(keys[page - start], each) for each in indices)
                    return page < start or all(map(holds, beside))

                end = last_end(end - device.num_spared, group.first_needed, has)
                end = max(start, end + device.num_spared)
        return end - start, device.places_beside(start, end)

    def make_spare(self) -> None:
        """Send host pages to disk, least recently used first, until enough are free or will be.

        A page that is on the device, too, loses its host copy unwritten, unless it was copied
        ahead.
        """
        host, pool = self._host, self._host.pool
        while pool.num_free + len(pool.leaving) < self._num_spare:
            node = host.pop()
            if node is None:
                return
            if node in self._ahead.copied:
                host.offer(node)  # until the device has evicted it
                return
            self._host.tree.cut(node, pool.piece)
            if node not in host.device.pages and not self._write(node):
                host.offer(node)  # until its offload is settled
                return
            host.leave(node)

    def store_all(self) -> None:
        """Begin to write what host memory has, and the disk has not: the latest used first."""
        nodes = filter(self._host.pages.__contains__, self._host.tree.nodes())  # parents first
        for node in sorted(nodes, key=lambda node: -node.last_used):
            self._write(node)

    def _write(self, node: Node) -> bool:
        """Begin to write the host pages of `node` that are not on disk, nor on their way there, and
        what is beside them. They are frozen until that has ended. False if their offload is not
        settled."""
        pool, host_pages = self._host.pool, self._host.pages[node]
        if not pool.are_settled(pool.with_beside(host_pages)):
            return False
        namespace, key, start = self._host.tree.place(node)
        size, end = self._host.tree.page_bytes, start + len(host_pages)
        keys = page_keys(self._disk.fingerprint, namespace, key, size, start, end)
        named: list[tuple[bytes, int]] = []
        for name, page in zip(keys, host_pages, strict=True):
            named.append((name, page))
            beside = pool.beside.get(page, {}).items()
            named += [(key_beside(name, index), each) for index, each in beside]
        missing = [
            (name, page)
            for name, page in named
            if not (self._disk.index.holds(name) or page in pool.frozen)
        ]
        for first in range(0, len(missing), pool.piece):
            names, pages = zip(*missing[first : first + pool.piece], strict=True)
            pool.freeze(pages)

            def ended(num_written: int, pages: Sequence[int] = pages) -> None:
                pool.thaw(pages)

            source, target = Place.HOST, Place.DISK
            self._moves.begin(source, target, pages, ended, keys=names, rank=self._rank)
        return True
