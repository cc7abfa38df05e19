"""The nodes of the prefix cache, and the tokens that name them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
    snapshot: int | None = None  # of the state of a request that ends with the run

    @property
    def num_pages(self) -> int:
        return len(self.pages) or len(self.host_pages)

    @property
    def is_bare(self) -> bool:
        """Whether it has pages on the device only."""
        return bool(self.pages) and not self.host_pages

    def upwards(self) -> Iterator[Node]:
        """The node and all above it, up to the root."""
        at: Node | None = self
        while at is not None:
            yield at
            at = at.parent


@dataclass(frozen=True, slots=True)
class Match:
    """A locked prefix, which stays cached until `release(node)`: pages on the device, then
    `num_host` pages in host memory.

    Where a prefix is of use only with a snapshot, it ends with its deepest one; `num_found` pages
    were found.
    """

    node: Node
    pages: list[int]
    num_host: int = 0
    num_found: int = 0
