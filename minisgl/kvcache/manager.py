"""The scheduler's interface to the KV cache: leases on pages.

A page has exactly one owner: the free list, the prefix cache, one lease, or one transit. All steps
run on one compute stream, so between steps launch order is the only fence: a page released while
steps up to N are launched may be written by any later step, and a page may be matched by step N + 1
once its tokens are known and launched steps write all of it. Loads and moves run beside the steps;
their pages are locked until they have ended.

With a host tier, evicted prefixes are copied to host memory and loaded when they match again. The
copies travel with plans (`Tiers.take_copies`). An offload reads its pages in the order of launches,
so they are free at once; a load is in `loads` until it has landed. With a disk, what falls out of
host memory is written there, and `disk.read` brings it back: by `moves`, which belong to no plan.
Of the device they touch only pages in `transits`, those for and from other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from minisgl.config import WindowSizes
from minisgl.kvcache.copies import ALWAYS, LoadRule
from minisgl.kvcache.disk import Disk, DiskTier
from minisgl.kvcache.host_tier import HostTier
from minisgl.kvcache.lease import Lease
from minisgl.kvcache.loads import Loads
from minisgl.kvcache.moves import Moves, Place
from minisgl.kvcache.page_pool import SCRATCH_PAGE, HostPool, PagePool
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.snapshots import Snapshots, SnapshotStats, TakenSnapshot
from minisgl.kvcache.tiers import Tiers
from minisgl.kvcache.tree import PrefixTree
from minisgl.kvcache.windows import Windows

# Pages that are offloaded together at least, in caches large enough.
MAX_PIECE = 32
MIN_PIECES = 32  # number of pieces that a cache has at least


class KVCacheManager:
    """Leases on the pages of full layers, with what the groups keep beside them. `tiers` are behind
    the device; without any, nothing here knows of them."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        cache_type: str,
        num_host_pages: int = 0,
        offloads_per_plan: int | None = None,
        max_loading: int | None = None,
        load_rule: LoadRule = ALWAYS,
        disk: Disk | None = None,
        max_in_transit: int = 0,
        num_snapshots: int | None = None,
        pages_each: int = 1,
        num_window_pages: int = 0,
        window_sizes: WindowSizes | None = None,
        looks_ahead: bool = False,
        rank: int = 0,
        moves: Moves | None = None,
    ) -> None:
        """num_host_pages: size of the host tier, which a radix cache may have; disk: behind it.
        offloads_per_plan: the most pages that a decode plan may offload. None: no limit; then
        nothing is copied ahead. max_loading: number of pages on their way from
        there that keep the lane busy until more can follow; None: any. max_in_transit: number of
        pages on the device that other engines may keep from requests, of which the largest must
        always fit. num_snapshots: of the states of requests; None: the model keeps none.
        pages_each: number of host pages that one takes.
        num_window_pages, window_sizes: of windowed layers, if these have pages of their own.
        looks_ahead: what a page has of its last token depends on the next one.
        rank, moves: where several ranks divide the requests, whose cache this is, and their moves.
        """
        self.of_ranks: tuple[KVCacheManager, ...] = (self,)  # those with pages of their own
        self.rank = rank
        self.page_size = page_size
        self.num_pages = num_pages
        self._pool = PagePool(num_pages, first=SCRATCH_PAGE + 1)
        tree = PrefixTree(page_size)
        keeps = cache_type == "radix"
        # Where a request goes on from a snapshot, it computes the last token of the prefix again.
        num_spared = int(looks_ahead and num_snapshots is None)
        self._cache = RadixCache(tree, self._pool, load_rule, keeps=keeps, num_spared=num_spared)
        self._groups = self._cache.groups
        self.leases: set[Lease] = set()
        self.snapshots: Snapshots | None = None
        if num_snapshots is not None:
            self.snapshots = Snapshots(num_snapshots if keeps else 0, self._cache, pages_each)
            self._groups.append(self.snapshots)
        self.windows: Windows | None = None
        if window_sizes is not None:
            self.windows = Windows(num_window_pages, window_sizes, self._cache)
            self._groups.append(self.windows)
        self.moves = moves or Moves()
        self.loads = Loads(self._cache, max_loading, self.moves.ids)
        self._tiers: Tiers | None = None
        if num_host_pages:
            piece = max(1, min(MAX_PIECE, num_pages // MIN_PIECES))
            host = HostTier(self._cache, HostPool(num_host_pages, piece=piece), offloads_per_plan)
            self._tiers = Tiers(host, self.loads, self.moves, disk, max_in_transit, rank)
            for group in (self.snapshots, self.windows):
                if group is not None:
                    group.use_copies(host, self.loads)

    def of(self, lease: Lease) -> KVCacheManager:
        """The cache that the lease is on."""
        return self.of_ranks[lease.rank]

    def best_for(
        self,
        key: bytes,
        num_tokens: int,
        namespace: bytes = b"",
        *,
        reuse: bool = True,
        read_on: int | None = None,
    ) -> KVCacheManager:
        """The cache on which a request should open its lease. read_on: the rank that has read its
        prefix from disk for it."""
        return self

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Number of pages in the prefix cache that no lease uses."""
        return self._cache.num_evictable

    @property
    def num_available(self) -> int:
        """Number of pages that `reserve` can provide."""
        return self.num_free + self.num_cached

    @property
    def tiers(self) -> Tiers:
        """What is behind the device, where there is host memory."""
        assert self._tiers is not None, "there is no host memory"
        return self._tiers

    @property
    def disk(self) -> DiskTier | None:
        return None if self._tiers is None else self._tiers.disk

    def snapshot_stats(self) -> SnapshotStats | None:
        """None: the model keeps no states."""
        return None if self.snapshots is None else self.snapshots.stats

    def match(self, key: bytes, num_tokens: int, namespace: bytes = b"") -> int:
        """Number of tokens that a lease would find cached. key: `num_tokens` packed tokens."""
        max_pages = self._cache.max_match(num_tokens)
        return self._cache.match_pages(key, max_pages, namespace) * self.page_size

    def acquire(
        self, key: bytes, num_tokens: int, namespace: bytes = b"", *, reuse: bool = True
    ) -> Lease:
        """Open a lease on the longest cached prefix that leaves at least one token to compute.

        Only prefixes committed in the same namespace match. `reserve` loads the pages that are in
        host memory; until it is called, the lease has none of them.
        """
        max_pages = self._cache.max_match(num_tokens)
        match = self._cache.acquire(key, max_pages if reuse else 0, namespace)
        lease = Lease(
            pages=match.pages,
            node=match.node,
            num_committed=len(match.pages),
            num_to_load=match.num_to_load,
            num_beside=match.num_beside,
            loads=self.loads.of(match.pages),
            rank=self.rank,
        )
        for group in self._groups:
            # Where the prompt leaves another, and where it ends.
            group.open(lease, {match.num_found, max_pages})
        self.leases.add(lease)
        return lease

    def reserve(
        self,
        lease: Lease,
        num_tokens: int,
        *,
        num_beside: int | None = None,
        num_granted: int = 0,
    ) -> Sequence[int] | None:
        """Grow the lease to hold `num_tokens`; returns the new pages, None if there are too few.

        num_beside: if the next plan has decode rows, which are not to wait for copies: number of
        tokens of prompts that it computes beside them. Then this returns None,
        too, if the plan would have to offload more pages than it can carry; it then offloads what
        it can, so that a later call succeeds. num_granted: pages that the plan already grants to
        its decode rows; it may offload as many more.
        """
        for group in self._groups:
            if not group.claim(lease, num_tokens):
                return None
        count = -(-num_tokens // self.page_size) - len(lease.pages)
        if count <= 0:
            return ()
        pool = self._pool
        missing = count - pool.num_free
        if missing > 0:
            self._evict(missing, num_beside, num_granted)
            if count > pool.num_free:
                return None
        pages = pool.take(count)
        lease.pages += pages
        if lease.must_load:
            first = lease.num_committed
            lease.num_committed = first + lease.num_to_load
            lease.num_to_load = lease.num_beside = 0
            assert lease.num_committed <= len(lease.pages), "it has room for the whole match"
            landing = lease.pages[first : lease.num_committed]
            beside = [
                pair
                for group in self._groups
                for pair in zip(group.to_load(lease.node), group.load(lease), strict=True)
            ]
            copied = self.tiers.host.pages
            lease.loads[self.loads.begin(lease.node, landing, copied, beside)] = len(landing)
        return pages

    def _evict(self, missing: int, num_beside: int | None, num_granted: int) -> None:
        """Free so many pages of the cache, if no leases use them, and the plan can carry what it
        has to offload."""
        if missing > self._cache.num_evictable:
            self.loads.await_unwanted(lease.loads for lease in self.leases)
            if missing > self._cache.num_evictable:
                return
        if self._tiers is None:
            self._cache.evict(missing)
        else:
            host = self._tiers.host
            host.evict(missing, host.max_offloads(missing, num_beside, num_granted))

    def is_loading(self, lease: Lease) -> bool:
        """Whether pages of the lease have not landed."""
        return not self.loads.in_flight.keys().isdisjoint(lease.loads)

    def settled(self, step: int) -> None:
        """Note that the steps up to `step` have succeeded."""
        self._pool.settled = step
        if self._tiers is not None:
            self._tiers.settled(step)

    # -- sharing -----------------------------------------------------------------------------------

    def take_snapshots(
        self, lease: Lease, start: int, end: int, step: int
    ) -> tuple[TakenSnapshot, ...]:
        """The snapshots that `step` leaves, which computes the tokens `start` .. `end` - 1."""
        return () if self.snapshots is None else self.snapshots.take(lease, start, end, step)

    def commit(self, lease: Lease, key: bytes, num_tokens: int, step: int) -> None:
        """Share the full pages among the first `num_tokens` tokens of `key`.

        They must be written by steps up to `step`, launched before any step that matches them. If
        the cache already has pages with the same tokens, the lease keeps its own until it closes.
        """
        num_pages = num_tokens // self.page_size
        fresh = lease.pages[lease.num_committed : num_pages]
        if fresh:
            node = self._cache.extend(lease.node, key, lease.num_committed, fresh)
            if node is not None:
                lease.node, lease.num_committed = node, num_pages
                self._pool.mark_written(fresh, step)
        for group in self._groups:
            group.commit(lease, key, num_pages, step)

    def close(self, lease: Lease, key: bytes = b"", num_tokens: int = 0, step: int = 0) -> None:
        """End the lease. Its pages become cached or free for any later step.

        The cache keeps the full pages among the first `num_tokens` tokens of `key`, written by
        steps up to `step`; without a key, the committed pages.
        """
        self.leases.remove(lease)
        pool, num_pages = self._pool, num_tokens // self.page_size
        fresh = lease.pages[lease.num_committed : num_pages]
        refused = self._cache.insert(lease.node, key, lease.num_committed, fresh)
        pool.mark_written(fresh, step)
        pool.free(refused)
        pool.free(lease.pages[lease.num_committed + len(fresh) :])
        for group in self._groups:
            group.close(lease, key, num_pages, step)
        self._cache.tree.release(lease.node)

    def drop_written_since(self, step: int) -> None:
        """Drop the cached pages that failed steps wrote or copied. Their leases are closed."""
        self.loads.drop_since(step)
        for group in self._groups:
            group.drop_written_since(step)
        (self._tiers or self._cache).drop_written_since(step)

    def audit(self, launched: int) -> None:
        """Recompute every invariant from scratch. O(everything); AssertionError if one fails."""
        nodes = [lease.node for lease in self.leases]
        nodes += [node for node, _ in self.loads.in_flight.values()]
        cached = [page for run in self._cache.pages.values() for page in run]
        owners = [*self._pool.free_pages, *cached]
        resident = {*self._cache.pages}
        if self._tiers is not None:
            nodes += self._tiers.transits.locked
            owners += self._tiers.transits.owned(Place.DEVICE)
            resident |= self._tiers.host.pages.keys()
            self._tiers.audit(launched)
        self._cache.tree.audit(nodes)
        assert resident == set(self._cache.tree.nodes()), "a node has no pages"
        self._cache.audit()
        for lease in self.leases:
            owners += lease.owned
            shared = lease.pages[: lease.num_committed]
            runs = [self._cache.pages.get(each, []) for each in lease.node.upwards()]
            assert shared == [*chain.from_iterable(reversed(runs))], "it shares what it locks not"
            assert not lease.must_load, "a lease was opened and has reserved nothing"
        assert sorted(owners) == list(range(1, self.num_pages)), "a page is lost or owned twice"
        assert all(self._pool.written_by[page] <= launched for page in cached), "written too early"
        for group in self._groups:
            group.audit([*self.leases], launched)
