"""The scheduler's interface to the KV cache: leases on pages.

A page has exactly one owner: the free list, the prefix cache, one lease, or one transit. All steps
run on one compute stream, so between steps launch order is the only fence: a page released while
steps up to N are launched may be written by any later step, and a page may be matched by step N + 1
once its tokens are known and launched steps write all of it. Loads and moves run beside the steps;
their pages are locked until they have ended.

With a host tier, evicted prefixes are copied to host memory and loaded when they match again. The
copies travel with plans (`take_copies`). An offload reads its pages in the order of launches, so
they are free at once; a load is in `loads` until it has landed. With a disk, what falls out of host
memory is written there, and `read_disk` brings it back: by `moves`, which belong to no plan. Of the
device they touch only pages in `transits`, those for and from other engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minisgl.kvcache.copies import ALWAYS, Copies, LoadRule
from minisgl.kvcache.disk import Disk, DiskTier
from minisgl.kvcache.host import UNPLANNED, HostPool
from minisgl.kvcache.loads import Loads
from minisgl.kvcache.moves import Moves, Place
from minisgl.kvcache.page_pool import SCRATCH_PAGE, PagePool
from minisgl.kvcache.prefix import Node
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.snapshots import Snapshots, SnapshotStats
from minisgl.kvcache.transits import Transits
from minisgl.kvcache.windows import WindowPages, Windows

# Pages that are offloaded together at least, in caches large enough.
MAX_PIECE = 32
MIN_PIECES = 32  # number of pieces that a cache has at least
# With a disk, one host page in so many is kept free, for what the device evicts while pages are
# written.
SPARE_PART = 8
# While less than one device page in so many is free, what will be evicted next is copied ahead, so
# that as many pages are free or cost nothing to evict.
AHEAD_PART = 16


class TakenSnapshot(NamedTuple):
    """A snapshot that a step leaves of a request's state."""

    end: int  # number of tokens of which it is the state
    snapshot: int


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
    num_to_load: int = 0  # at the end of the match, in host memory only: `reserve` loads them
    num_loaded: int = 0  # of the committed pages: in host memory when they were matched
    loads: frozenset[int] = frozenset()  # that write committed pages
    start_snapshot: int | None = None  # at the end of the match; None: it has no pages
    # Numbers of pages after which a snapshot is to be taken, and those that were and are not in the
    # cache yet.
    boundaries: tuple[int, ...] = ()
    snapshots: dict[int, int] = field(default_factory=dict)
    windows: WindowPages | None = None  # pages of windowed layers, if these have their own
    rank: int = 0  # which has the pages, of several that divide the requests

    @property
    def owned(self) -> list[int]:
        return self.pages[self.num_committed :]

    @property
    def loaded(self) -> range:
        """Which pages were in host memory when they were matched: the last committed ones."""
        return range(self.num_committed - self.num_loaded, self.num_committed)


class KVCacheManager:
    num_ranks = 1  # that have pages of their own, see `RankCaches`

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
        looks_ahead: bool = False,
    ) -> None:
        """num_host_pages: size of the host tier, which a radix cache may have; disk: behind it.
        offloads_per_plan: the most pages that a decode plan may offload. None: no limit; then
        nothing is copied ahead. max_loading: number of pages on their way from
        there that keep the lane busy until more can follow; None: any. max_in_transit: number of
        pages on the device that other engines may keep from requests, of which the largest must
        always fit. num_snapshots: of the states of requests; None: the model keeps none.
        looks_ahead: what a page has of its last token depends on the next one.
        """
        self.page_size = page_size
        self.num_pages = num_pages
        self._device = PagePool(num_pages, first=SCRATCH_PAGE + 1)
        piece = max(1, min(MAX_PIECE, num_pages // MIN_PIECES))
        self._host = HostPool(num_host_pages, rule=load_rule, piece=piece)
        self.moves = Moves()
        self._disk: DiskTier | None = None
        if disk is not None:
            self._disk = DiskTier(disk, page_size, self._host, self.moves)
        self._spare = -(-num_host_pages // SPARE_PART)
        self._offloads_per_plan = offloads_per_plan
        keeps = cache_type == "radix"
        self.snapshots = None if num_snapshots is None else Snapshots(num_snapshots)
        self._takes_snapshots = keeps and bool(num_snapshots)
        self.windows: Windows | None = None  # see WindowedCacheManager
        tiers, ahead = (self._host, self._disk), looks_ahead
        self._cache = RadixCache(page_size, *tiers, self.snapshots, keeps=keeps, looks_ahead=ahead)
        self._leases: set[Lease] = set()
        self.loads = Loads(self._cache, self._device, max_loading)
        self.transits = Transits(self._cache, self._device, self._host, self.loads, max_in_transit)

    def of(self, lease: Lease) -> KVCacheManager:
        """The cache that the lease is on."""
        return self

    @property
    def num_free(self) -> int:
        return self._device.num_free

    @property
    def num_cached(self) -> int:
        """Number of pages in the prefix cache that no lease uses."""
        return self._cache.num_evictable

    @property
    def num_host(self) -> int:
        """Number of host pages in use."""
        return self._host.num_pages - self._host.num_free

    @property
    def num_available(self) -> int:
        """Number of pages that `reserve` can provide."""
        return self._device.num_free + self._cache.num_evictable

    def snapshot_stats(self) -> SnapshotStats | None:
        """None: the model keeps no states."""
        return SnapshotStats.of(self.snapshots)

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
        max_pages = self._cache.max_match(num_tokens) if reuse else 0
        match = self._cache.acquire(key, max_pages, namespace)
        lease = Lease(match.pages, match.node, len(match.pages), match.num_host)
        loads = self.loads.above(match.node)
        lease.loads, lease.num_loaded = frozenset(loads), sum(loads.values())
        if self.snapshots is not None:
            lease.start_snapshot = match.node.snapshot
            # Where the prompt ends, and where it leaves another that has no snapshot there.
            ends = {match.num_found, self._cache.max_match(num_tokens)}
            if self._takes_snapshots:
                lease.boundaries = tuple(sorted(end for end in ends if end > len(match.pages)))
        self._leases.add(lease)
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
        count = -(-num_tokens // self.page_size) - len(lease.pages)
        if count <= 0:
            return ()
        missing = count - self._device.num_free
        if missing > 0:
            if missing > self._cache.num_evictable:
                self.loads.await_unwanted(lease.loads for lease in self._leases)
                if missing > self._cache.num_evictable:
                    return None
            max_offloads = self._max_offloads(missing, num_beside, num_granted)
            self._device.free(self._cache.evict(missing, max_offloads))
            if count > self._device.num_free:
                return None
        pages = self._device.take(count)
        lease.pages += pages
        if lease.num_to_load:
            self._load(lease)
        return pages

    def _max_offloads(self, missing: int, num_beside: int | None, num_granted: int) -> int | None:
        """How many pages the next plan may offload to provide `missing` ones; None: any number.

        Where host memory pays, a page is copied in a fraction of the time in which it is computed.
        So a plan may offload as many pages as it computes. And it may offload as many as its rows
        take: otherwise a request would wait for room for as long as they are many.
        """
        if not self._host.num_pages or self._offloads_per_plan is None or num_beside is None:
            return None
        pace = self._offloads_per_plan + num_granted
        most = pace + num_beside // self.page_size
        return most if self._host.num_planned + missing <= most else pace

    def _load(self, lease: Lease) -> None:
        """Begin to load the end of the lease's match into its first new pages."""
        first, end = lease.num_committed, lease.num_committed + lease.num_to_load
        assert end <= len(lease.pages), "the first reserve has room for the whole match"
        pages = lease.pages[first:end]
        load = self.loads.begin(lease.node, pages)
        lease.num_committed, lease.num_to_load = end, 0
        lease.num_loaded += len(pages)
        lease.loads |= {load}

    def is_loading(self, lease: Lease) -> bool:
        """Whether pages of the lease have not landed."""
        return bool(lease.loads) and not lease.loads.isdisjoint(self.loads.in_flight)

    def take_copies(self, step: int) -> Copies | None:
        """What the plan of `step` copies; None if there is nothing."""
        if not self._host.num_pages:
            return None
        if self._disk is not None and self._host.num_free < self._spare:
            self._cache.make_spare(self._spare)
        if self._offloads_per_plan is not None:
            missing = self.num_pages // AHEAD_PART - self._device.num_free
            if missing > 0:
                self._cache.copy_ahead(missing, self._offloads_per_plan)
        offloads = self._host.take_offloads(step)
        loads, awaits = self.loads.take(step)
        return Copies(offloads, loads, awaits) if offloads or loads or awaits else None

    # -- the disk ----------------------------------------------------------------------------------

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def read_disk(
        self,
        key: bytes,
        num_tokens: int,
        namespace: bytes = b"",
        *,
        ended: Callable[[range], None] = lambda pages: None,
    ) -> bool:
        """Begin to read what the disk has of `key` beyond the other tiers, if that pays.

        Returns whether it has begun. ended: called at the end with the pages of `key` that have
        come: `acquire` may find more then.
        """
        disk, host = self._disk, self._host
        if disk is None:
            return False
        max_pages = self._cache.max_match(num_tokens)
        match = self._cache.acquire(key, max_pages, namespace)  # locked while room is made
        start = len(match.pages) + match.num_host
        keys = disk.find(namespace, key, start, max_pages)
        keys = keys[: host.num_pages - self._spare]
        pays = bool(keys) and disk.rule.pays(len(keys))
        begins = pays and self._cache.make_room(len(keys))
        if begins:
            pages = host.take(len(keys))

            def move_ended(num_pages: int) -> None:
                disk.index.forget(keys[num_pages:])  # a rank does not have them
                self._cache.put_host(namespace, key, start, pages, num_pages)
                ended(range(start, start + num_pages))

            self.moves.begin(Place.DISK, Place.HOST, pages, move_ended, keys=keys)
        self._cache.release(match.node)
        return begins

    def settled(self, step: int) -> None:
        """Note that the steps up to `step` have succeeded."""
        self._device.settled = self._host.settled = step
        self.transits.settled(step)

    def load_always(self) -> None:
        """Load prefixes even where computing them is faster: others would wait for that."""
        self._host.rule = ALWAYS

    def offload_all(self) -> None:
        """Let the next plan take everything that no lease uses off the device."""
        if self._cache.num_evictable:
            self._device.free(self._cache.evict(self._cache.num_evictable))

    def store_all(self) -> None:
        """Begin to write to disk what host memory has, and the disk has not."""
        if self._disk is not None:
            self._cache.store_all()

    # -- sharing -----------------------------------------------------------------------------------

    def take_snapshots(
        self, lease: Lease, start: int, end: int, step: int
    ) -> tuple[TakenSnapshot, ...]:
        """The snapshots that `step` leaves, which computes the tokens `start` .. `end` - 1."""
        taken: list[TakenSnapshot] = []
        for boundary in lease.boundaries:
            num_tokens = boundary * self.page_size
            if start < num_tokens <= end and self.snapshots is not None:
                snapshot = self.snapshots.take(step)
                if snapshot is not None:
                    lease.snapshots[boundary] = snapshot
                    taken.append(TakenSnapshot(num_tokens, snapshot))
        return tuple(taken)

    def _place_snapshots(self, lease: Lease, key: bytes, num_pages: int) -> None:
        """Give snapshots of a lease to the cache, as far as that has their pages."""
        for boundary, snapshot in list(lease.snapshots.items()):
            if boundary <= num_pages and self._cache.place_snapshot(
                lease.node, key, boundary, snapshot
            ):
                del lease.snapshots[boundary]

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
                self._device.mark_written(fresh, step)
        if lease.snapshots:
            self._place_snapshots(lease, key, num_pages)

    def close(self, lease: Lease, key: bytes = b"", num_tokens: int = 0, step: int = 0) -> None:
        """End the lease. Its pages become cached or free for any later step.

        The cache keeps the full pages among the first `num_tokens` tokens of `key`, written by
        steps up to `step`; without a key, the committed pages.
        """
        self._leases.remove(lease)
        fresh = lease.pages[lease.num_committed : num_tokens // self.page_size]
        refused = self._cache.insert(lease.node, key, lease.num_committed, fresh)
        self._device.mark_written(fresh, step)
        self._device.free(refused)
        self._device.free(lease.pages[lease.num_committed + len(fresh) :])
        if self.snapshots is not None and lease.snapshots:
            self._place_snapshots(lease, key, num_tokens // self.page_size)
            self.snapshots.free(lease.snapshots.values())
        self._cache.release(lease.node)

    def drop_written_since(self, step: int) -> None:
        """Drop the cached pages that failed steps wrote or copied. Their leases are closed."""
        self.loads.drop_since(step)
        if self.snapshots is not None:
            self.snapshots.drop_written_since(step)
        dropped = self._cache.drop_written_since(step, self._device.written_by)
        self._device.free(dropped)
        self.transits.drop_written_since(step)

    def audit(self, launched: int) -> None:
        """Recompute every invariant from scratch. O(everything); AssertionError if one fails."""
        loading = [load.node for load in self.loads.in_flight.values()]
        locked = [*(lease.node for lease in self._leases), *loading, *self.transits.locked]
        self._cache.check(locked)
        cached = self._cache.pages()
        owners = [*self._device.free_pages, *cached, *self.transits.owned(Place.DEVICE)]
        self.transits.audit()
        for lease in self._leases:
            owners += lease.owned
            shared = lease.pages[: lease.num_committed]
            path = [page for each in reversed([*lease.node.upwards()]) for page in each.pages]
            assert shared == path, "a lease does not share what it has locked"
            assert not lease.num_to_load, "a lease was opened and has reserved nothing"
        assert sorted(owners) == list(range(1, self.num_pages)), "a page is lost or owned twice"
        written_by = self._device.written_by
        assert all(written_by[page] <= launched for page in cached), "written too early"
        self._audit_host(launched)
        if self.snapshots is not None:
            held = [each for lease in self._leases for each in lease.snapshots.values()]
            self.snapshots.audit(self._cache.nodes(), held, launched)

    def _audit_host(self, launched: int) -> None:
        host_pages = [*self._cache.host_pages(), *self.transits.owned(Place.HOST)]
        owners = [*self._host.free_pages, *host_pages]
        frozen: list[int] = []
        for move in self.moves.under_way:
            owners += move.pages if move.source is Place.DISK else ()
            frozen += move.pages if move.target is Place.DISK else ()
        assert len(set(frozen)) == len(frozen) and all(map(self._host.is_frozen, frozen))
        owners.sort()
        assert owners == list(range(self._host.num_pages)), "a host page is lost or owned twice"
        for page in host_pages:
            step = self._host.written_by[page]
            assert step <= launched or (step == UNPLANNED and self._host.is_planned(page))
        cached = set(self._cache.pages())
        for load in self.loads.in_flight.values():
            assert cached.issuperset(load.pages), "pages in flight are not locked"
