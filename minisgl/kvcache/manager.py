"""The scheduler's interface to the KV cache: leases on pages.

A page has exactly one owner: the free list, the prefix cache, or one lease. All steps run on one
compute stream, so launch order is the only fence: a page released while steps up to N are launched
may be written by any later step, and a page may be matched by step N + 1 once its tokens are known
and launched steps write all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.kvcache.prefix import NaiveCache, Node, PrefixCache
from minisgl.kvcache.radix import RadixCache

SCRATCH_PAGE = 0


class PageAllocator:
    """A free list of the pages 1 .. num_pages - 1; page 0 is scratch for padded rows."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> Sequence[int]:
        return self._free

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. The caller must have checked that they are free."""
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one running request, in the order of its tokens.

    The first `num_committed` pages belong to the prefix cache, locked and never written again; the
    lease owns the others. Only pages of the request's own tokens are locked, so a single request
    never needs more pages than its tokens fill.
    """

    pages: list[int]
    node: Node  # the last node of the committed pages
    num_committed: int

    @property
    def owned(self) -> list[int]:
        return self.pages[self.num_committed :]


class KVCacheManager:
    def __init__(self, *, num_pages: int, page_size: int, cache_type: str) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._allocator = PageAllocator(num_pages)
        self._cache: PrefixCache = RadixCache(page_size) if cache_type == "radix" else NaiveCache()
        self._leases: set[Lease] = set()
        # [num_pages]: for pages in the prefix cache, the last step that may have written them
        self._written_by = [0] * num_pages

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Number of pages in the prefix cache that no lease uses."""
        return self._cache.num_evictable

    @property
    def num_available(self) -> int:
        """Number of pages that `reserve` can provide."""
        return self._allocator.num_free + self._cache.num_evictable

    def match(self, key: bytes, num_tokens: int, namespace: bytes = b"") -> int:
        """Number of tokens that a lease would find cached. key: `num_tokens` packed tokens."""
        max_pages = self._max_match(num_tokens)
        return self._cache.match_pages(key, max_pages, namespace) * self.page_size

    def acquire(
        self, key: bytes, num_tokens: int, namespace: bytes = b"", *, reuse: bool = True
    ) -> Lease:
        """Open a lease on the longest cached prefix that leaves at least one token to compute.

        Only prefixes committed in the same namespace match.
        """
        max_pages = self._max_match(num_tokens) if reuse else 0
        match = self._cache.acquire(key, max_pages, namespace)
        lease = Lease(match.pages, match.node, len(match.pages))
        self._leases.add(lease)
        return lease

    def _max_match(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.page_size

    def reserve(self, lease: Lease, num_tokens: int) -> Sequence[int] | None:
        """Grow the lease to hold `num_tokens`; returns the new pages, None if there are too few."""
        count = -(-num_tokens // self.page_size) - len(lease.pages)
        if count <= 0:
            return ()
        missing = count - self._allocator.num_free
        if missing > 0:
            if missing > self._cache.num_evictable:
                return None
            self._allocator.free(self._cache.evict(missing))
        pages = self._allocator.allocate(count)
        lease.pages += pages
        return pages

    def commit(self, lease: Lease, key: bytes, num_tokens: int, step: int) -> None:
        """Share the full pages among the first `num_tokens` tokens of `key`.

        They must be written by steps up to `step`, launched before any step that matches them. If
        the cache already has pages with the same tokens, the lease keeps its own until it closes.
        """
        num_pages = num_tokens // self.page_size
        fresh = lease.pages[lease.num_committed : num_pages]
        if not fresh:
            return
        node = self._cache.extend(lease.node, key, lease.num_committed, fresh)
        if node is not None:
            lease.node, lease.num_committed = node, num_pages
            self._mark_written(fresh, step)

    def close(self, lease: Lease, key: bytes = b"", num_tokens: int = 0, step: int = 0) -> None:
        """End the lease. Its pages become cached or free for any later step.

        The cache keeps the full pages among the first `num_tokens` tokens of `key`, written by
        steps up to `step`; without a key, the committed pages.
        """
        self._leases.remove(lease)
        fresh = lease.pages[lease.num_committed : num_tokens // self.page_size]
        refused = self._cache.insert(lease.node, key, lease.num_committed, fresh)
        self._mark_written(fresh, step)
        self._allocator.free(refused)
        self._allocator.free(lease.pages[lease.num_committed + len(fresh) :])
        self._cache.release(lease.node)

    def _mark_written(self, pages: Sequence[int], step: int) -> None:
        for page in pages:
            self._written_by[page] = step

    def drop_written_since(self, step: int) -> None:
        """Drop the cached pages that failed steps wrote, after their leases are closed."""
        self._allocator.free(self._cache.drop_written_since(step, self._written_by))

    def audit(self, launched: int) -> None:
        """Recompute every invariant from scratch. O(everything); AssertionError if one fails."""
        self._cache.check([lease.node for lease in self._leases])
        cached = self._cache.pages()
        owners = [*self._allocator.free_pages, *cached]
        for lease in self._leases:
            owners += lease.owned
            shared = lease.pages[: lease.num_committed]
            assert shared == _path_pages(lease.node), "a lease does not share what it has locked"
        assert sorted(owners) == list(range(1, self.num_pages)), "a page is lost or owned twice"
        assert all(self._written_by[page] <= launched for page in cached), "written too early"


def _path_pages(node: Node) -> list[int]:
    runs: list[list[int]] = []
    at: Node | None = node
    while at is not None:
        runs.append(at.pages)
        at = at.parent
    return [page for run in reversed(runs) for page in run]
