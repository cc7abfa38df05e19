"""The interface of a tier behind host memory: runs of pages in files, under keys.

A key names what the pages hold: `page_key` chains the tokens of each page to those before it, from
a fingerprint of everything else that the numbers depend on (weights, dtype, scales, layout, rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

KEY_BYTES = 32


class PageStore(Protocol):
    """Keeps pages by key. Safe to call from several threads, and never called from the event loop.

    No method raises for a broken disk: a page that cannot be written is not there, and one that
    cannot be read is a miss.
    """

    def has(self, key: bytes) -> bool:
        """Whether the pages are probably there: reading may still find them damaged."""
        ...

    def write(self, key: bytes, views: Sequence[memoryview]) -> None:
        """Store the bytes of a run of pages, one view a page, under `key`."""
        ...

    def read(self, key: bytes, into: Sequence[memoryview]) -> bool:
        """Fill the views with what `write` got; False if it is not there, or is not whole."""
        ...


def page_key(parent: bytes, namespace: bytes, tokens: bytes) -> bytes:
    """The key of a run of pages with the packed `tokens` that follow those of `parent`.

    parent: the key of the run before it, or the fingerprint for the first of a prompt.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (parent, namespace, tokens):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
