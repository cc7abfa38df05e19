"""The nodes of the radix tree, and the tokens that name them."""

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
    """A run of pages in the radix tree. The run's tokens follow those of its parents."""

    key: bytes  # packed tokens; only the first num_pages pages of it count
    num_pages: int
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)  # by the packed first page
    num_users: int = 0  # locks that end here, plus children with users
    last_used: int = 0

    def upwards(self) -> Iterator[Node]:
        """The node and all above it, up to the root."""
        at: Node | None = self
        while at is not None:
            yield at
            at = at.parent
