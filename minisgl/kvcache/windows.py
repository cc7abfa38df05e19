"""The pages of layers with a sliding window, which are given up once no later query can see them.

These layers have pages of their own, beside the full pages of the other layers and for the same
tokens. A lease has those of the tokens that its next query sees, and of the chunk that is planned.
The cache may keep the others beside its own full pages. Where pages run out, it gives up those used
least recently, and keeps the full ones; a request can go on behind a prefix only where all pages
that its window reaches back to are left.

A page belongs to the free list, or to any number of leases and at most once to the cache. It is
shared once all of it is written. Launch order is the fence, as for full pages: one that is given up
may be written by the next step.

Every lease has a claim: the number of pages that it may need at once. Beside all claims, `spare`
pages are left for the chunks of prompts, which give up what is behind them when they are launched.
So a lease never lacks a page within its claim.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from minisgl.config import WindowSizes
from minisgl.kvcache.lease import Lease, WindowPages
from minisgl.kvcache.page_pool import SCRATCH_PAGE, PagePool
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.tree import Found, Node


class Windows:
    """The pages 1 .. num_pages - 1 of windowed layers, as a `PageGroup`."""

    pages_each = 0

    def __init__(self, num_pages: int, sizes: WindowSizes, cache: RadixCache) -> None:
        """cache: of full pages."""
        self.sizes = sizes
        self._cache = cache
        cache.pool.on_free = self.forget
        self._pool = PagePool(num_pages, first=SCRATCH_PAGE + 1)
        self._num_usable = num_pages - 1
        self._num_leases = [0] * num_pages  # that have a page
        # Of the cache: the page beside each full page, least recently used first; and these pages.
        self._beside: OrderedDict[int, int] = OrderedDict()
        self._cached: set[int] = set()
        self._num_claimed = 0
        self._num_extra = 0

    def _full_pages(self, found: Found) -> list[int]:
        pages = self._cache.pages
        return [page for node, common in found for page in pages[node][:common]]

    def usable(self, found: Found, num_pages: int, *, may_load: bool) -> int:
        """A request can go on behind a page if all are left that its window reaches back to."""
        full_pages, end, at = self._full_pages(found), num_pages, num_pages
        while end and at > self.sizes.first_seen(end):
            at -= 1
            if full_pages[at] not in self._beside:
                end = at
        return end

    def on_device(self, node: Node) -> Sequence[int]:
        return ()  # tiers keep whole pages

    def to_load(self, node: Node) -> Sequence[int]:
        return ()

    def load(self, lease: Lease) -> Sequence[int]:
        return ()

    def open(self, lease: Lease, ends: Iterable[int]) -> None:
        first = self.sizes.first_seen(len(lease.pages))
        for full_page in lease.pages[first:]:
            self._beside.move_to_end(full_page)
            self._num_leases[self._beside[full_page]] += 1
        lease.windows = WindowPages(first, [self._beside[each] for each in lease.pages[first:]])
        self._count_extra(lease.windows)

    def close(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        self._share(lease, key, num_pages, step)
        held = _held(lease)
        self._num_claimed -= held.claim
        held.claim = 0
        self._let_go(held, len(held.pages))

    def claim(self, lease: Lease, num_tokens: int) -> bool:
        """Claim the pages for a request of `num_tokens` tokens or more; False if there are too few.
        Any request may have its claim if it is the only one."""
        held = _held(lease)
        claim = self.sizes.num_needed(max(num_tokens, held.num_expected))
        others = self._num_claimed - held.claim
        if claim <= held.claim:
            return True
        if others and others + claim > self._num_usable - self.sizes.spare:
            return False
        self._num_claimed, held.claim = others + claim, claim
        self._count_extra(held)
        return True

    def room(self, held: WindowPages) -> int:
        """Number of tokens for which a lease has pages, or can take them for a chunk."""
        others = self._num_claimed + self._num_extra - held.claim - held.extra
        left = self._num_usable - others - len(held.pages)
        return (held.end + max(0, left)) * self.sizes.page_size

    def cover(self, held: WindowPages, num_columns: int) -> list[int]:
        """Take pages up to column `num_columns`; returns them."""
        count = num_columns - held.end
        if count <= 0:
            return []
        while self._pool.num_free < count:
            self._evict()
        pages = self._pool.take(count)
        for page in pages:
            self._num_leases[page] = 1
        held.pages += pages
        self._count_extra(held)
        return pages

    def trim(self, held: WindowPages, num_columns: int) -> None:
        """Give up what no query sees that follows the launched ones. num_columns: up to which they
        have pages, or will have them with the next step."""
        first = self.sizes.first_seen(num_columns - self.sizes.num_behind)
        self._let_go(held, max(0, min(first - held.first, len(held.pages))))

    def commit(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        """Share the pages of a lease, whose last one a launched chunk ends in, and give up what is
        behind the window."""
        self._share(lease, key, num_pages, step)
        held = _held(lease)
        self.trim(held, held.end)

    def _share(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        """Let the cache keep the pages of a lease beside its own full pages with the same tokens.
        They are written by steps up to `step`."""
        held = _held(lease)
        full_pages = self._full_pages(self._cache.tree.along(lease.node, key, num_pages))
        for full_page, page in zip(full_pages[held.first :], held.pages, strict=False):
            if full_page in self._beside:
                self._beside.move_to_end(full_page)
            elif page not in self._cached:
                self._beside[full_page] = page
                self._cached.add(page)
                self._pool.mark_written([page], step)

    def forget(self, full_pages: Iterable[int]) -> None:
        """Note that these pages of full layers are no longer in the cache."""
        for full_page in full_pages:
            page = self._beside.pop(full_page, None)
            if page is not None:
                self._leave_cache(page)

    def drop_written_since(self, step: int) -> None:
        """Drop the cached pages that failed steps wrote."""
        written_by = self._pool.written_by
        self.forget([full for full, page in self._beside.items() if written_by[page] >= step])

    def _evict(self) -> None:
        """Take the least recently used page from the cache. One that a lease has counts as used."""
        full_page, page = self._beside.popitem(last=False)
        if self._num_leases[page]:
            self._beside[full_page] = page
        else:
            self._leave_cache(page)

    def _leave_cache(self, page: int) -> None:
        self._cached.remove(page)
        if not self._num_leases[page]:
            self._pool.free([page])

    def _let_go(self, held: WindowPages, count: int) -> None:
        """Take the first `count` pages from a lease."""
        for page in held.pages[:count]:
            self._num_leases[page] -= 1
            if not self._num_leases[page] and page not in self._cached:
                self._pool.free([page])
        held.first += count
        del held.pages[:count]
        self._count_extra(held)

    def _count_extra(self, held: WindowPages) -> None:
        extra = max(0, len(held.pages) - held.claim)
        self._num_extra += extra - held.extra
        held.extra = extra

    def audit(self, leases: Sequence[Lease], launched: int) -> None:
        held = [_held(lease) for lease in leases]
        users = Counter(page for each in held for page in each.pages)
        assert all(users[page] == count for page, count in enumerate(self._num_leases))
        assert all(len(set(each.pages)) == len(each.pages) for each in held)
        assert all(_held(lease).end <= len(lease.pages) for lease in leases)
        assert self._cached == set(self._beside.values())
        assert len(self._cached) == len(self._beside), "two pages of the cache share one"
        full_pages = {page for run in self._cache.pages.values() for page in run}
        assert self._beside.keys() <= full_pages, "a page is left of a prefix that is gone"
        owned = sorted([*self._pool.free_pages, *self._cached.union(users)])
        assert owned == list(range(1, self._num_usable + 1)), "a page is lost or owned twice"
        assert all(self._pool.written_by[page] <= launched for page in self._cached)
        assert self._num_claimed == sum(each.claim for each in held)
        assert self._num_extra == sum(each.extra for each in held)
        assert all(each.extra == max(0, len(each.pages) - each.claim) for each in held)
        num_claims = sum(bool(each.claim) for each in held)
        most = self._num_usable - self.sizes.spare
        assert num_claims < 2 or self._num_claimed <= most, "claims take the room of chunks"


def _held(lease: Lease) -> WindowPages:
    assert lease.windows is not None
    return lease.windows
