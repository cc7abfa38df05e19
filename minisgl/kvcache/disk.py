"""The disk behind host memory: which pages go there, and which come back.

Pages are written when host memory is about to evict them, from where they lie: they are pinned
until they are on disk, and free then. Only pages whose offload is settled are written, so that no
failed step leaves anything. Pages come back into host memory before their request is admitted. The
tree knows nothing of the disk: a prefix is looked up by its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from minisgl.kvcache.copies import ALWAYS, LoadRule
from minisgl.kvcache.store import PageIndex, Transfer, Way, page_keys


@dataclass(frozen=True, slots=True)
class Disk:
    """What is on disk, and what it takes to use it."""

    index: PageIndex
    fingerprint: bytes  # of the model and all else that the pages depend on, but the tokens
    rule: LoadRule = ALWAYS  # for pages from disk to device


@dataclass(frozen=True, slots=True)
class Fetch:
    """Pages that are read from disk, and where they belong."""

    transfer: Transfer
    key: bytes  # packed tokens
    namespace: bytes
    start: int  # the first page of `key` that is read


class DiskTier:
    """Collects transfers, and remembers those under way."""

    def __init__(self, disk: Disk, page_bytes: int, ids: Iterator[int]) -> None:
        """page_bytes: bytes of the packed tokens of a page. ids: for transfers."""
        self.rule = disk.rule
        self.fetches: dict[int, Fetch] = {}
        self.writes: dict[int, Transfer] = {}
        self.settled = 0  # the last step that is known to have succeeded
        self._index = disk.index
        self._fingerprint = disk.fingerprint
        self._page_bytes = page_bytes
        self._ids = ids
        self._new: list[Transfer] = []

    def find(self, namespace: bytes, key: bytes, start: int, end: int) -> list[bytes]:
        """The keys of the pages `start` .. `end` - 1 of `key` up to the first that is not held."""
        keys = page_keys(self._fingerprint, namespace, key, self._page_bytes, start, end)
        return [*takewhile(self._index.holds, keys)]

    def missing(
        self, namespace: bytes, key: bytes, start: int, host_pages: Sequence[int]
    ) -> list[tuple[bytes, int]]:
        """The (key, host page) pairs, of pages from `start` on, that are not on disk."""
        end = start + len(host_pages)
        keys = page_keys(self._fingerprint, namespace, key, self._page_bytes, start, end)
        pairs = zip(keys, host_pages, strict=True)
        return [pair for pair in pairs if not self._index.holds(pair[0])]

    def write(self, pairs: Sequence[tuple[bytes, int]]) -> Transfer:
        transfer = self._add(Way.WRITE, [key for key, _ in pairs], [page for _, page in pairs])
        self.writes[transfer.id] = transfer
        return transfer

    def fetch(
        self, namespace: bytes, key: bytes, start: int, keys: Sequence[bytes], pages: Sequence[int]
    ) -> int:
        """Read pages into host `pages`, which the fetch owns; returns the transfer's id."""
        transfer = self._add(Way.READ, keys, pages)
        self.fetches[transfer.id] = Fetch(transfer, key, namespace, start)
        return transfer.id

    def _add(self, way: Way, keys: Sequence[bytes], host_pages: Sequence[int]) -> Transfer:
        transfer = Transfer(next(self._ids), way, tuple(keys), tuple(host_pages))
        self._new.append(transfer)
        return transfer

    def take(self) -> list[Transfer]:
        """The transfers that were added since the last call."""
        new, self._new = self._new, []
        return new

    def forget(self, keys: Sequence[bytes]) -> None:
        """Look for these pages no longer: a rank does not have them."""
        self._index.forget(keys)

    @property
    def owned(self) -> list[int]:
        """The host pages that fetches own."""
        return [page for fetch in self.fetches.values() for page in fetch.transfer.host_pages]
