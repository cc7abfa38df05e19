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
from minisgl.kvcache.moves import Moves, Place
from minisgl.kvcache.page_keys import PageIndex, page_keys
from minisgl.kvcache.tree import Node


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

    def read(
        self,
        key: bytes,
        num_tokens: int,
        namespace: bytes = b"",
        *,
        ended: Callable[[range], None] = lambda pages: None,
    ) -> bool:
        """Begin to read what the disk has of `key` beyond the other tiers, if that pays.

        Returns whether it has begun. ended: called at the end with the pages of `key` that have
        come: `acquire` may find more then.
        """
        pool, index = self._host.pool, self._disk.index
        max_pages = self._host.device.max_match(num_tokens)
        match = self._host.device.acquire(key, max_pages, namespace)  # locked while room is made
        start = len(match.pages) + match.num_to_load
        size, fingerprint = self._host.tree.page_bytes, self._disk.fingerprint
        names = page_keys(fingerprint, namespace, key, size, start, max_pages)
        keys = [*takewhile(index.holds, names)][: pool.num_pages - self._num_spare]
        begins = bool(keys) and self._disk.rule.pays(len(keys)) and self._host.make_room(len(keys))
        if begins:
            pages = pool.take(len(keys))

            def move_ended(num_pages: int) -> None:
                index.forget(keys[num_pages:])  # a rank does not have them
                self._host.adopt(namespace, key, start, pages, num_pages)
                ended(range(start, start + num_pages))

            self._moves.begin(Place.DISK, Place.HOST, pages, move_ended, keys=keys)
        self._host.tree.release(match.node)
        return begins

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
        for node in sorted(
            self._host.tree.nodes(), key=lambda node: -node.last_used
        ):  # parents first
            if node in self._host.pages:
                self._write(node)

    def _write(self, node: Node) -> bool:
        """Begin to write the host pages of `node` that are not on disk, nor on their way there.
        They are frozen until that has ended. False if their offload is not settled."""
        pool, host_pages = self._host.pool, self._host.pages[node]
        if not pool.are_settled(host_pages):
            return False
        namespace, key, start = self._host.tree.place(node)
        size, end = self._host.tree.page_bytes, start + len(host_pages)
        keys = page_keys(self._disk.fingerprint, namespace, key, size, start, end)
        missing = [
            (name, page)
            for name, page in zip(keys, host_pages, strict=True)
            if not (self._disk.index.holds(name) or page in pool.frozen)
        ]
        for first in range(0, len(missing), pool.piece):
            names, pages = zip(*missing[first : first + pool.piece], strict=True)
            pool.freeze(pages)

            def ended(num_written: int, pages: Sequence[int] = pages) -> None:
                pool.thaw(pages)

            self._moves.begin(Place.HOST, Place.DISK, pages, ended, keys=names)
        return True
