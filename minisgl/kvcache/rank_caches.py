"""The KV caches of ranks that divide the requests among them.

Each rank has pages, prefixes and snapshots of its own, on the device and in host memory, with
numbers of their own, and a lease is on those of one rank. To the scheduler they are one cache,
which chooses the rank of a request before it opens the lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.moves import Place
from minisgl.kvcache.snapshots import SnapshotStats

# Of two requests with one prefix, the first has it in use, and the second would compute it again
# elsewhere: each is worth its tokens.
PREFIX_WEIGHT = 2


class RankCaches(KVCacheManager):
    """The caches of all ranks, as one that has no pages of its own.

    A request goes to the rank that has its longest prefix, else to the emptiest. If the rank with
    the prefix has over PREFIX_WEIGHT times the prefix more tokens in use than the emptiest, the
    emptiest takes it. So requests that have only their beginning in common are on all ranks, each
    of which computes it once. Ranks that are equally good, such as idle ones, take turns.

    The rank that has read the prefix of a request from disk takes it if it has room. It was chosen
    by the same rule before the read. Pages that come for other requests would count against it now,
    and the read would be in vain.
    """

    def __init__(self, caches: Sequence[KVCacheManager], num_slots: int) -> None:
        """caches: of the ranks 0, 1, ..., of one page size, with their moves in common. num_slots:
        of each rank, which are its most open leases."""
        page_size, moves = caches[0].page_size, caches[0].moves
        super().__init__(num_pages=1, page_size=page_size, cache_type="naive", moves=moves)
        self.of_ranks = tuple(caches)
        self.num_pages += sum(cache.num_pages - 1 for cache in caches)
        self.snapshots = caches[0].snapshots
        self._num_slots = num_slots
        self._last_key, self._first = b"", -1  # the request that was asked for last; who was first

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

    def best_for(
        self,
        key: bytes,
        num_tokens: int,
        namespace: bytes = b"",
        *,
        reuse: bool = True,
        read_on: int | None = None,
    ) -> KVCacheManager:
        """The cache of the rank that is best for a request, of those with a free slot if any."""
        num_ranks = len(self.of_ranks)
        free = [each for each in self.of_ranks if len(each.leases) < self._num_slots]
        if read_on is not None:
            reader = self.of_ranks[read_on]
            if reader in free and reader.num_available * self.page_size >= num_tokens:
                return reader
        if key != self._last_key:
            self._last_key, self._first = key, (self._first + 1) % num_ranks
        coming = Counter[int]()  # pages in host memory soon, which requests will use
        for move in self.moves.under_way:
            coming[move.rank] += len(move.pages) if move.target is Place.HOST else 0

        def cost(cache: KVCacheManager) -> tuple[int, int]:
            in_use = cache.num_pages - 1 - cache.num_available + coming[cache.rank]
            found = cache.match(key, num_tokens, namespace) if reuse else 0
            turn = (cache.rank - self._first) % num_ranks
            return in_use * self.page_size - PREFIX_WEIGHT * found, turn

        return min(free or self.of_ranks, key=cost)

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
