"""Admission: which waiting requests get a slot, and pages for the tokens that they know."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from minisgl.kvcache.lease import Lease
from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import RequestStatus
from minisgl.scheduler.new_token_ratio import NewTokenRatio
from minisgl.scheduler.parts import Part
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.slots import Slots
from minisgl.scheduler.state import Running, StepWork, Waiting

LPM_WINDOW = 128  # number of waiting requests, of all clients together, that lpm compares
MAX_OVERTAKEN = 32  # a request that was passed over this many times goes first
MAX_POSTPONED = 32  # requests whose loads must wait, which others may pass in a plan


class Admission:
    """Takes requests from the queue, in turns, as long as there is room for them."""

    def __init__(
        self,
        kv: KVCacheManager,
        waiting: WaitingQueue,
        slots: Slots,
        parts: Sequence[Part],
        conservativeness: float,
        policy: str,
    ) -> None:
        self.ratio = NewTokenRatio(conservativeness)
        self._kv = kv
        self._waiting = waiting
        self._slots = slots
        # Those that may refuse one. First those that keep what waiting requests need: a request for
        # which they have no room must not take from one that they have room for what others give.
        self._parts = [part for part in parts if type(part).admits is not Part.admits]
        self._parts.sort(key=lambda part: type(part).holds is Part.holds)
        self._policy = self._longest_prefix_first if policy == "lpm" else self._first_come

    def admit(self, work: StepWork) -> list[Running]:
        """Let waiting requests join a plan, while it has a budget; returns them."""
        joined: list[Running] = []
        if not work.budget or self._slots.are_full:
            return joined
        admitted: list[Waiting] = []
        postponed: list[Waiting] = []
        reserved: dict[int, float] = defaultdict(float)
        for running in self._slots.running:
            reserved[running.lease.rank] += self.ratio.expected(running.request)
        num_granted = Counter[int]()  # pages, by rank
        for grant in work.grants:
            num_granted[self._slots.rank_of(grant.slot)] += (
                0 if grant.windowed else len(grant.pages)
            )
        # Clients that may have no more admitted.
        barred = set(filter(self._slots.has_its_share, self._waiting.clients))
        kept_for_one = set[Part]()
        for waiting in self._waiting.in_order(self._policy, LPM_WINDOW, barred):
            if not work.budget or self._slots.are_full:
                break
            if self._slots.has_its_share(waiting.client):
                barred.add(waiting.client)
                continue
            if self._waits_for_a_part(waiting, kept_for_one, barred):
                # Where none runs, one behind them may have what they all wait for.
                if len(postponed) >= MAX_POSTPONED and self._slots.running:
                    break
                postponed.append(waiting)
                continue
            if self._begins_reading(waiting):
                continue
            lease: Lease | None = None
            if not self._is_postponed(waiting):
                lease = self._take_pages(waiting, reserved, num_granted, work, barred)
            if lease is None:
                if self._is_postponed(waiting) and len(postponed) < MAX_POSTPONED:
                    postponed.append(waiting)
                    continue  # it takes no room from the others, who need not wait
                if waiting.client in barred:
                    continue
                break
            admitted.append(waiting)
            reserved[lease.rank] += self.ratio.expected(waiting.request)
            joined.append(self._join(waiting, lease, work))
        if admitted:
            self._waiting.admitted(admitted, postponed)
        return joined

    def _waits_for_a_part(
        self, waiting: Waiting, kept_for_one: set[Part], barred: set[str]
    ) -> bool:
        """Whether a part that a request asks something of must get ready first. One that was passed
        over too often is passed by no other that concerns the part, as `kept_for_one` notes, but by
        those that hold already what it waits for."""
        for part in self._parts:
            if not part.concerns(waiting.request):
                continue
            if part in kept_for_one and not part.holds(waiting.request):
                return True
            if not part.admits(waiting.request, self._slots.running, barred):
                if waiting.num_overtaken >= MAX_OVERTAKEN:
                    kept_for_one.add(part)
                return True
        return False

    def _take_pages(
        self,
        waiting: Waiting,
        reserved: dict[int, float],
        num_granted: Counter[int],
        work: StepWork,
        barred: set[str],
    ) -> Lease | None:
        """Take pages for the known tokens of a request; None if there are too few, or it is put
        off.

        reserved: tokens that the running requests of each rank are expected to need. num_granted:
        pages that the plan grants to its decode rows.
        """
        request, key = waiting.request, waiting.pack()
        num_known = len(request.token_ids)
        reuse = not request.computes_all_tokens
        read_on = waiting.read_on
        kv = self._kv.best_for(key, num_known, request.namespace, reuse=reuse, read_on=read_on)
        lease = kv.acquire(key, num_known, request.namespace, reuse=reuse)
        waiting.loads, waiting.num_loads = kv.loads if lease.must_load else None, kv.loads.num_begun
        if not self._is_postponed(waiting) and self._has_room(waiting, lease, reserved, barred):
            if lease.windows is not None:
                lease.windows.num_expected = num_known + int(self.ratio.expected(request))
            num_beside = self._num_beside_rows(lease, num_known, work)
            granted = num_granted[kv.rank]
            pages = kv.reserve(lease, num_known, num_beside=num_beside, num_granted=granted)
            if pages is not None:
                return lease
        kv.close(lease)
        return None

    def _has_room(
        self, waiting: Waiting, lease: Lease, reserved: dict[int, float], barred: set[str]
    ) -> bool:
        """Whether a request fits beside those that run on its rank, and what they still need."""
        kv = self._kv.of(lease)
        if not self._slots.running:
            return True  # `submit` checks that any request fits if no other runs
        num_cached = len(lease.pages) * kv.page_size
        expected = reserved[lease.rank] + self.ratio.expected(waiting.request)
        wanted = len(waiting.request.token_ids) - num_cached + expected
        left_free = self._slots.num_left_free(waiting.client, (kv.num_pages - 1) * kv.page_size)
        if wanted + left_free <= kv.num_available * kv.page_size:
            return True
        if left_free:  # the others need not wait for what this client must leave to them
            barred.add(waiting.client)
        return False

    def _num_beside_rows(self, lease: Lease, num_known: int, work: StepWork) -> int | None:
        """Number of tokens of prompts that the plan computes beside decode rows if a request joins
        it; None if nobody decodes."""
        if not any(running.decoding for running in self._slots.running):
            return None
        if lease.must_load or self._kv.of(lease).is_loading(lease):
            return work.num_computed
        own = num_known - lease.num_committed * self._kv.page_size
        return work.num_computed + min(work.budget, own)

    def _join(self, waiting: Waiting, lease: Lease, work: StepWork) -> Running:
        """Let a request with pages run."""
        request, page_size = waiting.request, self._kv.page_size
        num_cached = lease.num_committed * page_size
        if not waiting.retracted:
            request.num_cached_tokens = num_cached
            loaded, read = lease.loaded, waiting.from_disk
            both = range(max(loaded.start, read.start), min(loaded.stop, read.stop))
            request.num_disk_tokens = len(both) * page_size
            request.num_host_tokens = (len(loaded) - len(both)) * page_size
        request.status = RequestStatus.RUNNING
        running = Running(
            request=request,
            arrival=waiting.arrival,
            slot=self._slots.take(lease.rank),
            lease=lease,
            key=waiting.pack(),
            num_to_prefill=len(request.token_ids),
            num_scheduled=num_cached,
            last_scheduled=request.max_len - 1,
            num_room=len(lease.pages) * page_size,
            resumed=waiting.retracted,
            takes_drafts=request.takes_drafts,
            loading=self._kv.of(lease).is_loading(lease),
        )
        self._slots.join(running)
        work.join(running)
        return running

    # -- order -------------------------------------------------------------------------------------

    @staticmethod
    def _first_come(waiting: Iterable[Waiting], window: int) -> Iterable[Waiting]:
        able = (other for other in waiting if not other.reading_disk)
        return takewhile(lambda other: other.ready, able)

    def _longest_prefix_first(self, waiting: Iterable[Waiting], window: int) -> Iterable[Waiting]:
        def sort_key(waiting: Waiting) -> tuple[bool, int]:
            request, matched = waiting.request, 0
            if not request.computes_all_tokens:  # these must compute the whole prompt
                num_tokens = len(request.token_ids)
                matched = self._kv.match(waiting.pack(), num_tokens, request.namespace)
            return waiting.num_overtaken < MAX_OVERTAKEN, -matched

        # Sorting is stable: in order of arrival among equals.
        compared = islice(waiting, window)
        able = (other for other in compared if other.ready and not other.reading_disk)
        return sorted(able, key=sort_key)

    def _is_postponed(self, waiting: Waiting) -> bool:
        """Whether a request waits because others are loading. Its load would only queue up behind
        theirs, and to launch many with one plan would hold up the next. It is looked at again when
        another load has begun, which may bring its pages."""
        loads = waiting.loads
        if loads is None or waiting.num_loads != loads.num_begun:
            return False
        return loads.is_lane_busy

    # -- pages from disk ---------------------------------------------------------------------------

    def _begins_reading(self, waiting: Waiting) -> bool:
        """Whether a request has to wait because the disk has more of its prefix."""
        request, num_tokens = waiting.request, len(waiting.request.token_ids)
        has_disk = self._kv.of_ranks[0].disk is not None
        if not has_disk or waiting.asked_disk or request.computes_all_tokens:
            return False
        waiting.asked_disk = True
        kv = self._kv.best_for(waiting.pack(), num_tokens, request.namespace)
        assert kv.disk is not None

        def ended(pages: range) -> None:
            waiting.from_disk, waiting.reading_disk = pages, False
            waiting.read_on = kv.rank if pages else None

        key, namespace = waiting.pack(), request.namespace
        waiting.reading_disk = kv.disk.read(key, num_tokens, namespace, ended=ended)
        return waiting.reading_disk
