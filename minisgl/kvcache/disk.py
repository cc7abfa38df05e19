"""The disk behind host memory: which pages go there, and which can come back.

Pages are written when host memory is about to evict them, from where they lie: they are frozen
until they are on disk, and free then. Only pages whose offload is settled are written, so that no
failed step leaves anything. Pages come back into host memory before their request is admitted. The
tree knows nothing of the disk: a prefix is looked up by its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from minisgl.kvcache.copies import ALWAYS, LoadRule
from minisgl.kvcache.host import HostPool
from minisgl.kvcache.moves import Moves, Place
from minisgl.kvcache.page_keys import PageIndex, page_keys
from minisgl.kvcache.prefix import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Disk:
    """What is on disk, and what it takes to use it."""

    index: PageIndex
    fingerprint: bytes  # of the model and all else that the pages depend on, but the tokens
    rule: LoadRule = ALWAYS  # for pages from disk to device


class DiskTier:
    """Looks for pages on disk, and begins the moves to it."""

    def __init__(self, disk: Disk, page_size: int, host: HostPool, moves: Moves) -> None:
        self.rule = disk.rule
        self.index = disk.index
        self._fingerprint = disk.fingerprint
        self._page_bytes = page_size * TOKEN_BYTES
        self._host = host
        self._moves = moves

    def find(self, namespace: bytes, key: bytes, start: int, end: int) -> list[bytes]:
        """The keys of the pages `start` .. `end` - 1 of `key` up to the first that is not held."""
        keys = page_keys(self._fingerprint, namespace, key, self._page_bytes, start, end)
        return [*takewhile(self.index.holds, keys)]

    def write(self, namespace: bytes, key: bytes, start: int, host_pages: Sequence[int]) -> None:
        """Begin to write the pages of `key` from page `start` on that are not on disk, nor on their
        way there. They are frozen until that has ended."""
        host = self._host
        end = start + len(host_pages)
        keys = page_keys(self._fingerprint, namespace, key, self._page_bytes, start, end)
        pairs = zip(keys, host_pages, strict=True)
        missing = [
            pair for pair in pairs if not (self.index.holds(pair[0]) or host.is_frozen(pair[1]))
        ]
        for first in range(0, len(missing), host.piece):
            names, pages = zip(*missing[first : first + host.piece], strict=True)
            host.freeze(pages)
            self._moves.begin(
                Place.HOST, Place.DISK, pages, partial(_thaw, host, pages), keys=names
            )


def _thaw(host: HostPool, pages: Sequence[int], num_written: int) -> None:
    host.thaw(pages)
