"""The interface of prefix caches, and the implementation that caches nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

TOKEN_BYTES = array("i").itemsize


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids into bytes, so that prefixes compare and hash at memory speed."""
    return array("i", token_ids).tobytes()


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages in the radix tree. The run's tokens follow those of its parents."""

    key: bytes  # packed tokens; only the first len(pages) pages of it count
    pages: list[int]
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)  # by the packed first page
    num_users: int = 0  # leases that end here, plus children with users
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """A locked prefix, whose pages stay cached until `release(node)`."""

    node: Node
    pages: list[int]


class PrefixCache(Protocol):
    """Finds pages by their tokens. Keys are packed tokens.

    Namespaces share no prefixes, but compete for the same pages.
    """

    @property
    def num_evictable(self) -> int:
        """Number of pages that `evict` can return."""
        ...

    def match_pages(self, key: bytes, max_pages: int, namespace: bytes = b"") -> int:
        """Number of cached pages of `key`, at most `max_pages`. Changes nothing. O(key)."""
        ...

    def acquire(self, key: bytes, max_pages: int, namespace: bytes = b"") -> Match:
        """Lock the longest cached prefix of `key`, at most `max_pages` pages. O(key)."""
        ...

    def extend(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> Node | None:
        """Take the pages `start`, `start + 1`, ... of `key`, following the locked `node`.

        `node` must end where `start` begins; its lock moves to the returned node. Returns None
        without a change if the cache already has pages with the same tokens. O(pages).
        """
        ...

    def release(self, node: Node) -> None:
        """Release one lock on `node`."""
        ...

    def insert(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> list[int]:
        """Take the pages that the cache does not have, and return the others.

        `node` as for `extend`; its lock stays where it is. O(pages).
        """
        ...

    def evict(self, num_pages: int) -> list[int]:
        """Drop at least `num_pages` pages, least recently used first, and return them.

        The caller must have checked `num_evictable`.
        """
        ...

    def drop_written_since(self, step: int, written_by: Sequence[int]) -> list[int]:
        """Drop every page whose entry in `written_by` is at least `step`. None may be locked."""
        ...

    def pages(self) -> list[int]:
        """Every page in the cache. O(cache)."""
        ...

    def check(self, locked: Sequence[Node]) -> None:
        """Recompute every invariant, given the node of each lock; AssertionError if one fails."""
        ...


class NaiveCache:
    """A prefix cache that stores nothing: every request computes its whole prompt."""

    def __init__(self) -> None:
        self._root = Node(key=b"", pages=[], parent=None)

    @property
    def num_evictable(self) -> int:
        return 0

    def match_pages(self, key: bytes, max_pages: int, namespace: bytes = b"") -> int:
        return 0

    def acquire(self, key: bytes, max_pages: int, namespace: bytes = b"") -> Match:
        return Match(self._root, [])

    def extend(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> Node | None:
        return None

    def release(self, node: Node) -> None:
        pass

    def insert(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> list[int]:
        return list(pages)

    def evict(self, num_pages: int) -> list[int]:
        return []

    def drop_written_since(self, step: int, written_by: Sequence[int]) -> list[int]:
        return []

    def pages(self) -> list[int]:
        return []

    def check(self, locked: Sequence[Node]) -> None:
        assert all(node is self._root for node in locked)
