"""The scheduler's interface to the KV cache: leases on pages.

A page has exactly one owner: the free list, the prefix cache, or one lease. All steps run on one
compute stream, so launch order is the only fence: a page released while steps up to N are launched
may be written by any later step, and a page may be matched by step N + 1 once its tokens are known
and launched steps write all of it.

With a host tier, evicted prefixes are copied to host memory and loaded when they match again. The
copies travel with plans (`take_copies`). An offload reads its pages in the order of launches, so
they are free at once. A load writes its pages outside of that order: they are locked until
`landed`, and nobody reads them before the plan that awaits the load.

With a disk, what falls out of host memory is written there, and `fetch` brings it back. These
transfers belong to no plan (`take_transfers`): they touch host pages only.

Other engines read pages that are lent to them, and write pages that are expected from them. Both
are out of the order of launches, too: no plan writes the ones before `drop`, or uses the others
before `adopt`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minisgl.kvcache.copies import ALWAYS, Copies, Load, LoadRule
from minisgl.kvcache.disk import Disk, DiskTier
from minisgl.kvcache.host import UNPLANNED, HostTier
from minisgl.kvcache.prefix import TOKEN_BYTES, NaiveCache, Node, PrefixCache
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.store import Transfer

SCRATCH_PAGE = 0

# Pages that are offloaded together at least, in caches large enough.
MAX_PIECE = 32
MIN_PIECES = 32  # number of pieces that a cache has at least
# With a disk, one host page in so many is kept free, for what the device evicts while pages are
# written.
SPARE_PART = 8
# While less than one device page in so many is free, what will be evicted next is copied ahead, so
# that as many pages are free or cost nothing to evict.
AHEAD_PART = 16


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
    node: Node  # the last node of the committed pages, or of those to be loaded
    num_committed: int
    num_to_load: int = 0  # pages of `node` in host memory, which `reserve` begins to load
    num_loaded: int = 0  # of the committed pages: in host memory when they were matched
    loads: frozenset[int] = frozenset()  # that write committed pages

    @property
    def owned(self) -> list[int]:
        return self.pages[self.num_committed :]

    @property
    def loaded(self) -> range:
        """Which pages were in host memory when they were matched: the last committed ones."""
        return range(self.num_committed - self.num_loaded, self.num_committed)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A load that was planned, and not known to have landed."""

    node: Node  # the last one that it fills
    pages: Sequence[int]
    step: int  # whose plan carries it; UNPLANNED before that


@dataclass(slots=True, eq=False)
class Transit:
    """Pages of a prefix that another engine reads or writes: in host memory, or on the device."""

    host_pages: Sequence[int] = ()
    pages: Sequence[int] = ()  # on the device, instead of host pages
    lease: Lease | None = None  # on these, if they leave
    failed: bool = False  # the step that was to write host pages has failed; they are free


class KVCacheManager:
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
    ) -> None:
        """num_host_pages: size of the host tier, which a radix cache may have; disk: behind it.
        offloads_per_plan: number of pages that travel there beside a decode step without disturbing
        it. None: any, and none are copied ahead. max_loading: number of pages on their way from
        there that keep the lane busy until more can follow; None: any. max_in_transit: number of
        pages on the device that other engines may keep from requests, of which the largest must
        always fit.
        """
        self.page_size = page_size
        self.num_pages = num_pages
        self._allocator = PageAllocator(num_pages)
        self._host: HostTier | None = None
        if num_host_pages:
            piece = max(1, min(MAX_PIECE, num_pages // MIN_PIECES))
            self._host = HostTier(num_host_pages, rule=load_rule, piece=piece)
        self.transfer_ids = itertools.count(1)  # also of transfers to and from other engines
        self._disk: DiskTier | None = None
        if disk is not None:
            self._disk = DiskTier(disk, page_size * TOKEN_BYTES, self.transfer_ids)
        self._spare = -(-num_host_pages // SPARE_PART)
        self._offloads_per_plan = offloads_per_plan
        self._max_loading = max_loading
        self._cache: PrefixCache = NaiveCache()
        if cache_type == "radix":
            self._cache = RadixCache(page_size, self._host, self._disk)
        self._leases: set[Lease] = set()
        # [num_pages]: for pages in the prefix cache, the last step that may have written them
        self._written_by = [0] * num_pages
        self._loads: dict[int, _InFlight] = {}
        self.num_loads = 0  # since the start
        self._new_loads: list[Load] = []  # for the next plan
        self._awaits: list[int] = []  # for the next plan
        self._settled = 0  # the last step that has succeeded
        self._max_in_transit = max_in_transit
        self._transits: set[Transit] = set()
        self.is_copying_out = False  # by the next plan, for which another engine waits

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Number of pages in the prefix cache that no lease uses."""
        return self._cache.num_evictable

    @property
    def num_host(self) -> int:
        """Number of host pages in use."""
        return 0 if self._host is None else self._host.num_pages - self._host.num_free

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

        Only prefixes committed in the same namespace match. `reserve` loads the pages that are in
        host memory; until it is called, the lease has none of them.
        """
        max_pages = self._max_match(num_tokens) if reuse else 0
        match = self._cache.acquire(key, max_pages, namespace)
        lease = Lease(match.pages, match.node, len(match.pages), match.num_host)
        if self._loads:
            self._follow_loads(lease)
        self._leases.add(lease)
        return lease

    def _follow_loads(self, lease: Lease) -> None:
        """Let the lease wait for loads of other leases that write pages of its prefix."""
        at: Node | None = lease.node
        loads: set[int] = set()
        while at is not None:
            if at.load:
                loads.add(at.load)
                lease.num_loaded += len(at.pages)
            at = at.parent
        lease.loads = frozenset(loads)

    def _max_match(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.page_size

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
        tokens of prompts that it computes beside them. There are too few pages, too, if more would
        have to be offloaded than it can carry; it carries what it can, for a later call.
        num_granted: pages that it grants to those rows, which may be what earlier calls made free.
        """
        count = -(-num_tokens // self.page_size) - len(lease.pages)
        if count <= 0:
            return ()
        missing = count - self._allocator.num_free
        if missing > 0:
            if missing > self._cache.num_evictable:
                self._hurry()
                if missing > self._cache.num_evictable:
                    return None
            max_offloads = self._max_offloads(missing, num_beside, num_granted)
            self._allocator.free(self._cache.evict(missing, max_offloads))
            if count > self._allocator.num_free:
                return None
        pages = self._allocator.allocate(count)
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
        if self._host is None or self._offloads_per_plan is None or num_beside is None:
            return None
        pace = self._offloads_per_plan + num_granted
        most = pace + num_beside // self.page_size
        return most if self._host.num_planned + missing <= most else pace

    def _load(self, lease: Lease) -> None:
        """Begin to load the end of the lease's match into its first new pages."""
        first, end = lease.num_committed, lease.num_committed + lease.num_to_load
        assert end <= len(lease.pages), "the first reserve has room for the whole match"
        pages = lease.pages[first:end]
        self.num_loads += 1
        load = self.num_loads
        host_pages = self._cache.fill(lease.node, pages, load)
        self._loads[load] = _InFlight(lease.node, pages, UNPLANNED)
        self._mark_written(pages, UNPLANNED)
        self._new_loads.append(Load(load, tuple(host_pages), tuple(pages)))
        lease.num_committed, lease.num_to_load = end, 0
        lease.num_loaded += len(pages)
        lease.loads |= {load}

    def _hurry(self) -> None:
        """Unlock the pages of loads that nobody wants any more. The next plan waits for them."""
        if self._loads:
            wanted = frozenset[int]().union(*(lease.loads for lease in self._leases))
            for load in self._loads.keys() - wanted:
                self.landed(load)

    def landed(self, load: int) -> None:
        """Make the pages of a load ordinary ones from the next plan on, which awaits it.

        Does nothing for a load that had landed or failed.
        """
        found = self._loads.pop(load, None)
        if found is not None:
            self._cache.filled(found.node)
            self._awaits.append(load)

    @property
    def is_lane_busy(self) -> bool:
        """Whether a load that began now would only queue up behind others."""
        if self._max_loading is None:
            return False
        return sum(len(load.pages) for load in self._loads.values()) >= self._max_loading

    def is_loading(self, lease: Lease) -> bool:
        """Whether pages of the lease have not landed."""
        return bool(lease.loads) and not lease.loads.isdisjoint(self._loads)

    def take_copies(self, step: int) -> Copies | None:
        """What the plan of `step` copies; None if there is nothing."""
        if self._host is None:
            return None
        if self._disk is not None and self._host.num_free < self._spare:
            self._cache.make_spare(self._spare)
        if self._offloads_per_plan is not None:
            missing = self.num_pages // AHEAD_PART - self._allocator.num_free
            if missing > 0:
                self._cache.copy_ahead(missing, self._offloads_per_plan)
        offloads = self._host.take_offloads(step)
        self.is_copying_out = False
        if not (offloads or self._new_loads or self._awaits):
            return None
        copies = Copies(offloads, tuple(self._new_loads), tuple(self._awaits))
        for load in self._new_loads:
            if load.id in self._loads:
                self._loads[load.id] = replace(self._loads[load.id], step=step)
            self._mark_written(load.pages, step)
        self._new_loads, self._awaits = [], []
        return copies

    # -- the disk ----------------------------------------------------------------------------------

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def fetch(self, key: bytes, num_tokens: int, namespace: bytes = b"") -> int:
        """Begin to read what the disk has of `key` beyond the other tiers, if that pays.

        Returns the id of the transfer, after which `acquire` may find more; 0 if there is none.
        """
        if self._disk is None or self._host is None:
            return 0
        max_pages = self._max_match(num_tokens)
        match = self._cache.acquire(key, max_pages, namespace)  # locked while room is made
        start = len(match.pages) + match.num_host
        keys = self._disk.find(namespace, key, start, max_pages)
        keys = keys[: self._host.num_pages - self._spare]
        fetch = 0
        if keys and self._disk.rule.pays(len(keys)) and self._cache.make_room(len(keys)):
            host_pages = self._host.take(len(keys))
            fetch = self._disk.fetch(namespace, key, start, keys, host_pages)
        self._cache.release(match.node)
        return fetch

    def take_transfers(self) -> list[Transfer]:
        """The transfers that are to begin."""
        return [] if self._disk is None else self._disk.take()

    def transferred(self, transfer_id: int, num_pages: int) -> range:
        """End a transfer of which every rank has done the first `num_pages` pages.

        Returns which pages of the key were fetched.
        """
        assert self._disk is not None and self._host is not None
        written = self._disk.writes.pop(transfer_id, None)
        if written is not None:
            self._host.unpin(written.host_pages)
            return range(0)
        fetch = self._disk.fetches.pop(transfer_id)
        keys, host_pages = fetch.transfer.keys, fetch.transfer.host_pages
        self._disk.forget(keys[num_pages:])
        found = host_pages[:num_pages]
        refused = self._cache.put_host(fetch.namespace, fetch.key, fetch.start, found)
        self._host.free([*host_pages[num_pages:], *refused])
        return range(fetch.start, fetch.start + num_pages)

    def settled(self, step: int) -> None:
        """Note that the steps up to `step` have succeeded."""
        self._settled = step
        if self._disk is not None:
            self._disk.settled = step

    def offload_all(self) -> None:
        """Let the next plan take everything that no lease uses off the device."""
        if self._cache.num_evictable:
            self._allocator.free(self._cache.evict(self._cache.num_evictable))

    def store_all(self) -> None:
        """Begin to write to disk what host memory has, and the disk has not."""
        if self._disk is not None:
            self._cache.store_all()

    # -- pages for and from other engines ----------------------------------------------------------

    def lend(self, key: bytes, num_tokens: int, namespace: bytes = b"") -> Transit | None:
        """Keep the cached prefix on the device as it is, for another engine to read; see `match`.

        None if the device has no page of it, a step that writes it is in flight, or too many pages
        are in transit.
        """
        lease = self.acquire(key, num_tokens, namespace)
        settled = all(self._written_by[page] <= self._settled for page in lease.pages)
        whole = not (lease.num_to_load or self.is_loading(lease))
        if lease.pages and settled and whole and self._has_room_in_transit(len(lease.pages)):
            return self._begin_transit(Transit(pages=tuple(lease.pages), lease=lease))
        self.close(lease)
        return None

    def copy_out(self, key: bytes, num_tokens: int, namespace: bytes = b"") -> Transit | None:
        """Copy the cached prefix to host pages of its own, with the next plan; see `match`.

        The prefix itself stays where it is, unlocked. None if the device has no page of it, or host
        memory no room.
        """
        lease = self.acquire(key, num_tokens, namespace)
        pages = [] if self.is_loading(lease) else lease.pages
        self.close(lease)
        if not pages or self._host is None or not self._cache.make_room(len(pages)):
            return None
        self.is_copying_out = True
        return self._begin_transit(Transit(self._host.offload(pages)))

    def expect(self, num_pages: int) -> Transit | None:
        """Host pages for `num_pages` of another engine; None if there is no room.

        Copies of launched plans may still be under way to or from them.
        """
        if self._host is None or not self._cache.make_room(num_pages):
            return None
        return self._begin_transit(Transit(self._host.take(num_pages)))

    def expect_on_device(
        self, key: bytes, start: int, num_pages: int, namespace: bytes = b""
    ) -> Transit | None:
        """Pages on the device for `num_pages` of `key` from page `start` on.

        None if what is before them is not there, or there is no room without another plan: nothing
        is evicted that has no copy, because only a plan copies it, and other plans may use the
        pages until they are launched.
        """
        has_plans = bool(self._new_loads or self._awaits)
        if has_plans or (self._host is not None and self._host.num_planned):
            return None
        match = self._cache.acquire(key, start, namespace)
        self._cache.release(match.node)
        if len(match.pages) < start or not self._has_room_in_transit(num_pages):
            return None
        missing = min(num_pages - self._allocator.num_free, self._cache.num_evictable)
        if missing > 0:
            self._allocator.free(self._cache.evict(missing, max_offloads=0))
        if num_pages > self._allocator.num_free:
            return None
        return self._begin_transit(Transit(pages=self._allocator.allocate(num_pages)))

    def _has_room_in_transit(self, num_pages: int) -> bool:
        in_transit = sum(len(transit.pages) for transit in self._transits)
        return in_transit + num_pages <= self._max_in_transit

    def _begin_transit(self, transit: Transit) -> Transit:
        self._transits.add(transit)
        return transit

    def adopt(
        self, transit: Transit, key: bytes, start: int, num_pages: int, namespace: bytes = b""
    ) -> None:
        """End a transit: its first pages hold `num_pages` of `key` from page `start` on."""
        self._transits.remove(transit)
        if transit.pages:
            self._allocator.free(self._insert(transit.pages[:num_pages], key, start, namespace))
            self._allocator.free(transit.pages[num_pages:])
            return
        assert self._host is not None
        pages = transit.host_pages
        self._host.free(self._cache.put_host(namespace, key, start, pages[:num_pages]))
        self._host.free(pages[num_pages:])

    def _insert(
        self, pages: Sequence[int], key: bytes, start: int, namespace: bytes
    ) -> Sequence[int]:
        """Have the cache take pages that no step has written; returns those that it refuses: all
        if it has lost what was before them."""
        match = self._cache.acquire(key, start, namespace)
        refused = pages
        if len(match.pages) == start:
            refused = self._cache.insert(match.node, key, start, pages)
            # With what is before them, they go if the step that writes it fails.
            path = self._cache.acquire(key, start + len(pages), namespace)
            taken = set(pages).difference(refused)
            before = [self._written_by[page] for page in path.pages if page not in taken]
            self._mark_written([*taken], max(before, default=0))
            self._cache.release(path.node)
        self._cache.release(match.node)
        return refused

    def drop(self, transit: Transit) -> None:
        """End a transit: its pages are free, or those of the prefix cache alone."""
        if transit.failed:
            return
        self._transits.remove(transit)
        if transit.lease is not None:
            self.close(transit.lease)
        elif transit.pages:
            self._allocator.free(transit.pages)
        elif self._host is not None:
            self._host.free(transit.host_pages)

    def is_written(self, transit: Transit, step: int) -> bool:
        """Whether steps up to `step` have written the pages of `copy_out`."""
        assert self._host is not None
        return all(self._host.written_by[page] <= step for page in transit.host_pages)

    def load_always(self) -> None:
        """Load prefixes even where computing them is faster: others would wait for that."""
        if self._host is not None:
            self._host.rule = ALWAYS

    # -- sharing -----------------------------------------------------------------------------------

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
        """Drop the cached pages that failed steps wrote or copied. Their leases are closed."""
        for load, found in list(self._loads.items()):
            if found.step >= step:
                self.landed(load)  # to its last page, before another step writes there
        self._new_loads = []
        self._allocator.free(self._cache.drop_written_since(step, self._written_by))
        for transit in [each for each in self._transits if not self.is_written(each, step - 1)]:
            self.drop(transit)
            transit.failed = True

    def audit(self, launched: int) -> None:
        """Recompute every invariant from scratch. O(everything); AssertionError if one fails."""
        loading = [load.node for load in self._loads.values()]
        self._cache.check([*(lease.node for lease in self._leases), *loading])
        cached = self._cache.pages()
        owners = [*self._allocator.free_pages, *cached]
        for transit in self._transits:
            owners += () if transit.lease is not None else transit.pages
        assert self._has_room_in_transit(0), "other engines keep too much from requests"
        for lease in self._leases:
            owners += lease.owned
            shared = lease.pages[: lease.num_committed]
            assert shared == _path_pages(lease.node), "a lease does not share what it has locked"
            assert not lease.num_to_load, "a lease was opened and has reserved nothing"
        assert sorted(owners) == list(range(1, self.num_pages)), "a page is lost or owned twice"
        assert all(self._written_by[page] <= launched for page in cached), "written too early"
        self._audit_host(launched)

    def _audit_host(self, launched: int) -> None:
        host_pages = self._cache.host_pages()
        if self._host is None:
            assert not (host_pages or self._loads), "there is no host tier"
            return
        host_pages += [page for transit in self._transits for page in transit.host_pages]
        owners = [*self._host.free_pages, *host_pages]
        if self._disk is not None:
            owners += self._disk.owned
            pinned = [page for write in self._disk.writes.values() for page in write.host_pages]
            assert len(set(pinned)) == len(pinned) and all(map(self._host.is_pinned, pinned))
        owners.sort()
        assert owners == list(range(self._host.num_pages)), "a host page is lost or owned twice"
        for page in host_pages:
            step = self._host.written_by[page]
            assert step <= launched or (step == UNPLANNED and self._host.is_planned(page))
        cached = set(self._cache.pages())
        for load in self._loads.values():
            assert cached.issuperset(load.pages), "pages in flight are not pinned"


def _path_pages(node: Node) -> list[int]:
    runs: list[list[int]] = []
    at: Node | None = node
    while at is not None:
        runs.append(at.pages)
        at = at.parent
    return [page for run in reversed(runs) for page in run]
