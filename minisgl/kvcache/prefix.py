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
    """A run of pages in the radix tree. The run's tokens follow those of its parents.

    It has pages on the device, in host memory, or equal ones in both: each tier has all of the run
    or nothing. The pages on the device are a tree from the root, below which the others hang.
    """

    key: bytes  # packed tokens; only the first num_pages pages of it count
    pages: list[int]  # on the device
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)  # by the packed first page
    num_users: int = 0  # leases and loads that end here, plus children with users
    last_used: int = 0
    num_resident: int = 0  # children with pages on the device
    host_pages: list[int] = field(default_factory=list)
    num_bare: int = 0  # children with pages on the device only
    is_ahead: bool = False  # copied to host memory before its eviction, and not used since
    load: int = 0  # the load that fills `pages`; 0: they are filled

    @property
    def num_pages(self) -> int:
        return len(self.pages) or len(self.host_pages)

    @property
    def is_bare(self) -> bool:
        """Whether it has pages on the device only."""
        return bool(self.pages) and not self.host_pages


@dataclass(frozen=True, slots=True)
class Match:
    """A locked prefix, which stays cached until `release(node)`: pages on the device, then
    `num_host` pages in host memory."""

    node: Node
    pages: list[int]
    num_host: int = 0


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
        """Lock the longest cached prefix of `key`, at most `max_pages` pages. O(key).

        Its end in host memory is left out where computing it is faster than loading it.
        """
        ...

    def fill(self, node: Node, pages: Sequence[int], load: int) -> list[int]:
        """Give device pages to the end of a match, the locked `node`, for a load to fill them.

        Returns the host pages to load from. The load locks `node`, too, until `filled(node)`.
        """
        ...

    def filled(self, node: Node) -> None:
        """Mark the end of the load that `fill` began."""
        ...

    def extend(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> Node | None:
        """Take the pages `start`, `start + 1`, ... of `key`, following the locked `node`.

        `node` must end where `start` begins; its lock moves to the returned node. Returns None
        without a change if the cache already has device pages with the same tokens. O(pages).
        """
        ...

    def release(self, node: Node) -> None:
        """Release one lock on `node`."""
        ...

    def insert(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> list[int]:
        """Take the pages that the cache does not have on the device, and return the others.

        `node` as for `extend`; its lock stays where it is. O(pages).
        """
        ...

    def evict(self, num_pages: int, max_offloads: int | None = None) -> list[int]:
        """Take at least `num_pages` pages off the device, least recently used first.

        Returns them; those that host memory has room for are copied there by the next plan, unless
        it has copies. The caller must have checked `num_evictable`. With `max_offloads` they may be
        fewer: the next plan is to copy no more pages than that, whoever has it copy them.
        """
        ...

    def copy_ahead(self, num_pages: int, max_offloads: int) -> None:
        """Let the next plan copy pages to host memory that `evict` would return next, until there
        are `num_pages` that were copied ahead of their eviction. They stay on the device.

        max_offloads: as for `evict`.
        """
        ...

    def make_room(self, num_pages: int) -> bool:
        """Free host pages, least recently used first; False if there are too few."""
        ...

    def make_spare(self, num_pages: int) -> None:
        """Send host pages to disk, least recently used first, until that many are free or will be.

        Those that the device has as well are only dropped, but for what was copied ahead.
        """
        ...

    def store_all(self) -> None:
        """Send all host pages to disk, where they stay in memory, too: the latest used first."""
        ...

    def put_host(
        self, namespace: bytes, key: bytes, start: int, host_pages: Sequence[int]
    ) -> list[int]:
        """Take host pages with the tokens of `key` from page `start` on, and return the others.

        Those that the tree has in any tier are not taken, and none if it lacks what is before them.
        """
        ...

    def drop_written_since(self, step: int, written_by: Sequence[int]) -> list[int]:
        """Drop every device page whose entry in `written_by` is at least `step`, and every host
        page that such a step's plan wrote. None may be locked. Returns the device pages."""
        ...

    def pages(self) -> list[int]:
        """Every device page in the cache. O(cache)."""
        ...

    def host_pages(self) -> list[int]:
        """Every host page in the cache. O(cache)."""
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

    def fill(self, node: Node, pages: Sequence[int], load: int) -> list[int]:
        raise AssertionError("nothing is in host memory")

    def filled(self, node: Node) -> None:
        raise AssertionError("nothing is in host memory")

    def extend(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> Node | None:
        return None

    def release(self, node: Node) -> None:
        pass

    def insert(self, node: Node, key: bytes, start: int, pages: Sequence[int]) -> list[int]:
        return list(pages)

    def evict(self, num_pages: int, max_offloads: int | None = None) -> list[int]:
        return []

    def copy_ahead(self, num_pages: int, max_offloads: int) -> None:
        pass

    def make_room(self, num_pages: int) -> bool:
        return False

    def make_spare(self, num_pages: int) -> None:
        pass

    def store_all(self) -> None:
        pass

    def put_host(
        self, namespace: bytes, key: bytes, start: int, host_pages: Sequence[int]
    ) -> list[int]:
        return list(host_pages)

    def drop_written_since(self, step: int, written_by: Sequence[int]) -> list[int]:
        return []

    def pages(self) -> list[int]:
        return []

    def host_pages(self) -> list[int]:
        return []

    def check(self, locked: Sequence[Node]) -> None:
        assert all(node is self._root for node in locked)
