"""The memories behind the device: host memory, the disk, and other engines."""

from __future__ import annotations

from minisgl.kvcache.copies import ALWAYS, Copies
from minisgl.kvcache.disk import Disk, DiskTier
from minisgl.kvcache.host_tier import CopiesAhead, HostTier
from minisgl.kvcache.loads import Loads
from minisgl.kvcache.moves import Moves, Place
from minisgl.kvcache.page_pool import UNPLANNED
from minisgl.kvcache.transits import Transits

# With a disk, one host page in so many is kept free, for what the device evicts while pages are
# written.
SPARE_PART = 8
# While less than one device page in so many is free, what will be evicted next is copied ahead, so
# that as many pages are free or cost nothing to evict.
AHEAD_PART = 16


class Tiers:
    """What is behind the device of one cache, and the order in which plans ask it."""

    def __init__(
        self,
        host: HostTier,
        loads: Loads,
        moves: Moves,
        disk: Disk | None,
        max_in_transit: int,
        rank: int,
    ) -> None:
        self.host = host
        self._rank = rank  # whose moves these are, of those in `moves`
        self.disk: DiskTier | None = None
        self.transits = Transits(host.device, host, loads, max_in_transit, rank)
        self._loads = loads
        self._moves = moves
        num_ahead = host.device.pool.num_pages // AHEAD_PART
        self._ahead = CopiesAhead(host, num_ahead, may_drop=disk is None)
        if disk is not None:
            num_spare = -(-host.pool.num_pages // SPARE_PART)
            self.disk = DiskTier(disk, host, self._ahead, moves, num_spare, rank)

    def take_copies(self, step: int) -> Copies | None:
        """What the plan of `step` copies; None if there is nothing."""
        if self.disk is not None:
            self.disk.make_spare()
        self._ahead.copy()
        offloads = self.host.pool.take_offloads(step)
        loads, awaits = self._loads.take(step)
        return Copies(offloads, loads, awaits) if offloads or loads or awaits else None

    def offload_all(self) -> None:
        """Let the next plan take everything that no lease uses off the device."""
        self.host.evict(self.host.device.num_evictable)

    def load_always(self) -> None:
        """Load prefixes even where computing them is faster: others would wait for that."""
        self.host.device.rule = ALWAYS

    def settled(self, step: int) -> None:
        """Note that the steps up to `step` have succeeded."""
        self.host.pool.settled = step
        self.transits.settled(step)

    def drop_written_since(self, step: int) -> None:
        """Drop what failed steps wrote or copied. Their leases are closed."""
        self.host.drop_written_since(step)
        self.transits.drop_written_since(step)

    def audit(self, launched: int) -> None:
        """Recompute every invariant from scratch; AssertionError if one fails."""
        self.host.audit()
        self._ahead.audit()
        assert self.transits.has_room(0), "other engines keep too much from requests"
        self._loads.audit(self.host.pages)
        pool = self.host.pool
        host_pages = [page for run in self.host.pages.values() for page in run]
        host_pages += self.transits.owned(Place.HOST)
        assert pool.beside.keys() <= set(host_pages), "something is left of a prefix"
        host_pages = pool.with_beside(host_pages)
        owners = [*pool.free_pages, *pool.leaving, *host_pages]
        frozen: list[int] = []
        for move in (move for move in self._moves.under_way if move.rank == self._rank):
            owners += move.pages if move.source is Place.DISK else ()
            frozen += move.pages if move.target is Place.DISK else ()
        assert len(set(frozen)) == len(frozen) and pool.frozen.issuperset(frozen)
        assert sorted(owners) == list(range(pool.num_pages)), "a host page is lost or owned twice"
        for page in host_pages:
            step = pool.written_by[page]
            assert step <= launched or (step == UNPLANNED and page in pool.offloads)
