"""The keys of pages on disk and in other engines: what a page holds, whoever has computed it.

`page_keys` hashes all tokens up to the end of a page after a fingerprint of everything else that
the numbers depend on (weights, dtype, scales, layout) and the namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

KEY_BYTES = 32


class PageIndex(Protocol):
    """Which pages are on disk. Thread-safe, and without I/O: the event loop asks it."""

    def holds(self, key: bytes) -> bool:
        """Whether a page is probably there: reading may find it gone or damaged."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Hold these pages no longer, whatever is on disk."""


def key_beside(key: bytes, index: int) -> bytes:
    """The key of what is beside the page with `key`."""
    return blake2b(key + index.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()


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
