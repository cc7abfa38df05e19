"""What the tiers above know of pages elsewhere: their keys, and transfers of them.

A key names what a page holds: `page_keys` hashes all tokens up to its end after a fingerprint of
everything else that the numbers depend on (weights, dtype, scales, layout) and the namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Protocol

KEY_BYTES = 32


class PageIndex(Protocol):
    """Which pages are on disk. Thread-safe, and without I/O: the event loop asks it."""

    def holds(self, key: bytes) -> bool:
        """Whether a page is probably there: reading may find it gone or damaged."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Hold these pages no longer, whatever is on disk."""
        ...


class Way(Enum):
    """What a transfer does with pages."""

    WRITE = "write"  # to the disk
    READ = "read"  # from there
    SEND = "send"  # to another engine
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages on their way to or from host memory, or between the devices of two engines, outside of
    the order of steps.

    Every rank transfers its part of each page.
    """

    id: int  # 1, 2, ...
    way: Way
    keys: tuple[bytes, ...]  # of the pages on disk; none for other engines
    host_pages: tuple[int, ...]  # nobody else writes them meanwhile
    name: bytes = b""  # of a transfer between engines, the same on both sides
    peers: tuple[str, ...] = ()  # addresses of the ranks from which those of this engine receive
    pages: tuple[int, ...] = ()  # on the device, instead of host pages

    @property
    def num_pages(self) -> int:
        return len(self.pages or self.host_pages)


# Called with the id of a transfer and the number of pages, from its first on, that are done.
Done = Callable[[int, int], None]


def page_keys(
    fingerprint: bytes, namespace: bytes, tokens: bytes, page_bytes: int, first: int, end: int
) -> Iterator[bytes]:
    """The keys of the pages `first` .. `end` - 1 of the packed `tokens`. O(tokens + pages).

    page_bytes: bytes of the tokens of a page.
    """
    chain = blake2b(digest_size=KEY_BYTES)
    for part in (fingerprint, namespace):
        chain.update(len(part).to_bytes(8, "little"))
        chain.update(part)
    view = memoryview(tokens)
    chain.update(view[: first * page_bytes])
    for page in range(first, end):
        chain.update(view[page * page_bytes : (page + 1) * page_bytes])
        yield chain.copy().digest()
