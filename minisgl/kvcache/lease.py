"""The lease of a request on pages, and what it may need beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minisgl.kvcache.tree import Found, Node

# By the place of a page in a node, and the index of what is beside it.
Beside = dict[tuple[int, int], int]


def last_end(num_pages: int, first_needed: Callable[[int], int], has: Callable[[int], bool]) -> int:
    """The last of the first `num_pages` pages behind which a request finds what it needs. has:
    whether what belongs beside a page is there."""
    end = at = num_pages
    while end and at > first_needed(end):
        at -= 1
        if not has(at):
            end = at
    return end


@dataclass(slots=True, eq=False)
class WindowPages:
    """The pages of windowed layers that a lease has: those of the columns `first`, `first` + 1, ...
    of its page table."""

    first: int
    pages: list[int]
    ends: set[int] = field(default_factory=set)  # numbers of pages behind which others may go on
    num_expected: int = 0  # tokens that its request is expected to have in the end
    claim: int = 0
    extra: int = 0  # number of pages beyond the claim, until its chunk is launched
    prompt_end: int = 0  # the last of these of the prompt
    num_marked: int = 0  # up to which the cache knows them

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one running request, in the order of its tokens.

    The first `num_committed` pages belong to the prefix cache. They are locked, and only the loads
    in `loads` still write them. The lease owns the other pages. It locks no page beyond its own
    prefix, so a single request never needs more pages than its tokens fill.
    """

    pages: list[int]
    node: Node  # the last node of the committed pages, or of those to be loaded
    num_committed: int
    num_to_load: int  # at the end of the match, in host memory only: `reserve` loads them
    num_beside: int  # pages that groups load with these
    loads: dict[int, int]  # that write committed pages, and how many of these each
    rank: int = 0  # which has the pages, of several that divide the requests
    start_snapshot: int | None = None  # at the end of the match; None: there is no state
    # By the numbers of pages after which a snapshot is to be taken: those that were, and are not in
    # the cache yet.
    snapshots: dict[int, int | None] = field(default_factory=dict)
    windows: WindowPages | None = None  # pages of windowed layers, if these have their own

    @property
    def must_load(self) -> bool:
        return bool(self.num_to_load or self.num_beside)

    @property
    def owned(self) -> list[int]:
        return self.pages[self.num_committed :]

    @property
    def loaded(self) -> range:
        """Which pages were in host memory when they were matched: the last committed ones."""
        return range(self.num_committed - sum(self.loads.values()), self.num_committed)


class PageGroup(Protocol):
    """What some layers keep of a request and of prefixes beside the pages of the others."""

    indices: range  # of the pages that another memory keeps for it beside one page

    def first_needed(self, num_pages: int) -> int:
        """The first of `num_pages` pages beside which a request finds what it needs to go on."""

    def usable(self, found: Found, num_pages: int, *, may_load: bool) -> int:
        """Of the first `num_pages` pages of a match, how many a request can go on behind.
        may_load: what it needs may be in host memory."""

    def on_device(self, node: Node) -> Beside:
        """What prefixes that go through `node` need beside its pages: the numbers on the device,
        which come behind those of its pages."""

    def on_device_for(self, node: Node, pages: Sequence[int]) -> Sequence[int]:
        """What the device has beside `pages`, the last ones of a prefix that ends with `node`: the
        numbers, by page and index."""

    def to_load(self, node: Node) -> Sequence[int]:
        """What a prefix that ends with `node` needs that the device has not, in host memory."""

    def load(self, lease: Lease) -> Sequence[int]:
        """Where on the device the latter goes for a lease that loads."""

    def give_up(self) -> bool:
        """Free what host memory keeps beside a page that nobody is likely to need; False if there
        is nothing of that kind."""

    def open(self, lease: Lease, ends: Iterable[int]) -> None:
        """Begin a lease on a prefix that is `usable`. ends: numbers of pages of its prompt after
        which other requests may go on."""

    def claim(self, lease: Lease, num_tokens: int) -> bool:
        """Make sure that the lease can hold `num_tokens`; False if it cannot."""

    def commit(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        """Share what belongs to the first `num_pages` pages of `key`, written by steps up to
        `step`."""

    def close(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        """End the lease, and share the same."""

    def drop_written_since(self, step: int) -> None:
        """Drop what failed steps wrote from the cache. Their leases are closed."""

    def audit(self, leases: Sequence[Lease], launched: int) -> None:
        """Recompute every invariant from scratch; AssertionError if one fails. launched: the last
        step that is."""
