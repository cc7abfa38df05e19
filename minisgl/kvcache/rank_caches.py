"""The KV caches of ranks that divide the requests among them.

Each rank has pages, prefixes and snapshots of its own, with numbers of their own, and a lease is on
those of one rank. To the scheduler they are one cache, which chooses the rank of a request when it
opens the lease.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.kvcache.lease import Lease
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.snapshots import SnapshotStats

# Of two requests with one prefix, the first has it in use, and the second would compute it again
# elsewhere: each is worth its tokens.
PREFIX_WEIGHT = 2


class RankCaches(KVCacheManager):
    """The caches of all ranks, as one that has no pages of its own. Without a host tier, a disk and
    transits.

    A request goes to the rank that has its longest prefix, else to the emptiest. If the rank with
    the prefix has over PREFIX_WEIGHT times the prefix more tokens in use than the emptiest, the
    emptiest takes it. So requests that have only their beginning in common are on all ranks, each
    of which computes it once. Of ranks that are equally good, the first takes the request.
    """

    def __init__(self, caches: Sequence[KVCacheManager], num_slots: int) -> None:
        """caches: of the ranks, of one page size. num_slots: of each rank, which are its most open
        leases."""
        super().__init__(num_pages=1, page_size=caches[0].page_size, cache_type="naive")
        self.of_ranks = tuple(caches)
        self.num_pages += sum(cache.num_pages - 1 for cache in caches)
        self.num_ranks = len(caches)
        self.snapshots = caches[0].snapshots
        self._num_slots = num_slots

    def of(self, lease: Lease) -> KVCacheManager:
        """The cache of the rank that has the pages of a lease."""
        return self.of_ranks[lease.rank]

    @property
    def num_free(self) -> int:
        return sum(cache.num_free for cache in self.of_ranks)

    @property
    def num_cached(self) -> int:
        return sum(cache.num_cached for cache in self.of_ranks)

    def snapshot_stats(self) -> SnapshotStats | None:
        found = [each.snapshots.stats for each in self.of_ranks if each.snapshots is not None]
        num, num_cached = sum(each.num for each in found), sum(each.num_cached for each in found)
        return SnapshotStats(num, num_cached) if found else None

    def match(self, key: bytes, num_tokens: int, namespace: bytes = b"") -> int:
        """Number of tokens that a lease would find cached on the rank that has most."""
        return max(cache.match(key, num_tokens, namespace) for cache in self.of_ranks)

    def acquire(
        self, key: bytes, num_tokens: int, namespace: bytes = b"", *, reuse: bool = True
    ) -> Lease:
        """Open a lease on the rank that is best for the request. One must have a free slot."""

        def cost(rank: int) -> int:
            cache = self.of_ranks[rank]
            in_use = cache.num_pages - 1 - cache.num_available
            found = cache.match(key, num_tokens, namespace) if reuse else 0
            return in_use * self.page_size - PREFIX_WEIGHT * found

        caches = enumerate(self.of_ranks)
        ranks = [rank for rank, cache in caches if len(cache.leases) < self._num_slots]
        rank = min(ranks, key=cost)
        lease = self.of_ranks[rank].acquire(key, num_tokens, namespace, reuse=reuse)
        lease.rank = rank
        return lease

    def settled(self, step: int) -> None:
        for cache in self.of_ranks:
            cache.settled(step)

    def drop_written_since(self, step: int) -> None:
        for cache in self.of_ranks:
            cache.drop_written_since(step)

    def audit(self, launched: int) -> None:
        for cache in self.of_ranks:
            cache.audit(launched)
            assert len(cache.leases) <= self._num_slots
