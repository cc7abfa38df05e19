"""Host memory behind the KV cache: carries out the copies of plans.

    compute  ─[gather]──[step N ....................]──[step M: awaits the load]
    down        └─[DMA to host pages]                     ▲
    up          └──────[DMA to staging, scatter] ... ─────┘ landed

A page in host memory is one piece (all layers, keys and values), so a DMA moves megabytes at a
time, whatever the layout on the device. An offload is gathered on the compute lane, in the order of
launches: its pages may be written by the step itself. A load is scattered on its own lane, into
pages that nobody else uses before a plan awaits it; its DMAs begin when everything launched before
it is done, because that may still use the pages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.attention.state import LayerState, PagedKV, StateBySlot, distinct
from minisgl.config import LayerSpec, page_bytes
from minisgl.device.copy_lanes import CopyLane, CopyMark, Mark, copy_lane, upload_pages
from minisgl.device.lanes import Lanes
from minisgl.kernels.cache_pages.page_copies import gather_pages, scatter_pages
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kvcache.copies import Copies, HostTraffic, Load, LoadRule
from minisgl.kvcache.moves import Move, Place
from minisgl.tiers.host.numbering import Numbering
from minisgl.tiers.host.slabs import Slabs
from minisgl.tiers.host.state_parts import StateParts
from minisgl.tiers.host.window_parts import WindowParts

PIECE_BYTES = 64 << 20
# Pieces that may wait for their DMA to the host before the compute lane must. A plan fills all but
# one, and the next one finds room, because they travel during the step. One more is for loads.
NUM_STAGED = 4
# Of loads on their way, after which no other begins: they take longer than two steps, when the next
# one can follow. To launch a load takes milliseconds, during which no step can be launched.
LOADING_BYTES = 3 << 29
# A DMA of a load is no larger, because what a step uploads may have to wait for it, unless the load
# would have more DMAs than that: a stream takes a thousand calls, and then makes the caller wait.
# Ends of pieces, and host pages that are no neighbours, add more.
LOAD_BYTES = 8 << 20
MOST_DMAS = 256
MEASURED_PIECES = 8


def staging_bytes(page_bytes: int, num_host_pages: int) -> int:
    """Bytes of device memory that a host cache needs for its pieces. page_bytes: of one page."""
    return (NUM_STAGED + 1) * _pages_per_piece(page_bytes, num_host_pages) * page_bytes


def offloads_per_plan(layers: Sequence[LayerSpec], page_size: int, num_host_pages: int) -> int:
    """Number of pages that a plan may offload without the next one waiting for it. All but one of
    its pieces must have left by then, which takes less time than a decode step of a model that is
    worth it."""
    return (NUM_STAGED - 1) * _pages_per_piece(page_bytes(layers, page_size), num_host_pages)


def max_loading(layers: Sequence[LayerSpec], page_size: int) -> int:
    """Number of pages on their way to the device after which no other load begins."""
    return max(1, LOADING_BYTES // page_bytes(layers, page_size))


def _pages_per_piece(page_bytes: int, num_host_pages: int) -> int:
    """No more than that all pieces together are as large as host memory."""
    return max(1, min(PIECE_BYTES // page_bytes, num_host_pages // (NUM_STAGED + 1)))


class _Copied(NamedTuple):
    """Pages on their way."""

    mark: CopyMark
    host_pages: frozenset[int]


def _marks(lane: Iterable[_Copied], host_pages: Sequence[int]) -> list[CopyMark]:
    """The ends of the copies that use one of `host_pages`."""
    return [copied.mark for copied in lane if not copied.host_pages.isdisjoint(host_pages)]


class _Staged(NamedTuple):
    """A piece of an offload in its buffer."""

    start: int  # its rows
    end: int
    copied: CopyMark

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


class Ring:
    """A buffer on the device for pieces of offloads, one after the other."""

    def __init__(self, packed: Tensor) -> None:
        """packed: [pages, page_bytes] uint8."""
        self._packed = packed
        self._pieces: deque[_Staged] = deque()  # in the order of their copies
        self._end = 0  # of the last one

    def take(self, num_pages: int) -> tuple[Tensor, CopyMark | None]:
        """Rows for a piece, and the copy that must be done before they are written."""
        start = self._end if self._end + num_pages <= len(self._packed) else 0
        self._end = start + num_pages
        while self._pieces and self._pieces[0].copied.is_reached():
            self._pieces.popleft()
        last: CopyMark | None = None
        while any(piece.overlaps(start, self._end) for piece in self._pieces):
            last = self._pieces.popleft().copied
        return self._packed[start : self._end], last

    def leave(self, num_pages: int, copied: CopyMark) -> None:
        """Note the copy of the rows that were taken last."""
        self._pieces.append(_Staged(self._end - num_pages, self._end, copied))


class HostCopies:
    """The host pages of one rank, and the copies to and from them that plans carry.

    One thread calls `queue` and `before`; any thread may read `traffic`.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        num_pages: int,
        numbering: Numbering,
        lanes: Lanes,
        make_lane: Callable[[Lanes], CopyLane] = copy_lane,
        report: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        """num_pages: in host memory. report: gets the fraction of it that is pinned."""
        self._lanes = lanes
        paged = [each for each in distinct(states) if isinstance(each, PagedKV)]
        whole, windowed = (
            [plane for each in paged if each.windowed == kind for plane in each.planes]
            for kind in (False, True)
        )
        self.planes = Planes.of(whole) if whole else None  # of a stage without full layers
        self.page_bytes = page_bytes = numbering.page_bytes
        self._parts = StateParts(states, numbering)
        self._windows = WindowParts(windowed, numbering)
        # Whether anything is beside pages.
        self.has_parts = bool(windowed) or any(isinstance(each, StateBySlot) for each in states)
        self._piece = _pages_per_piece(page_bytes, num_pages)
        self.slabs = Slabs(num_pages, page_bytes, lanes.device, report)

        def buffer(num_pieces: int) -> Tensor:
            shape = (num_pieces * self._piece, page_bytes)
            return torch.empty(shape, dtype=torch.uint8, device=lanes.device)

        self._ring = Ring(buffer(NUM_STAGED))
        self._arriving = buffer(1)  # a piece of a load
        self._down, self._up = make_lane(lanes), make_lane(lanes)
        self._loads: dict[int, CopyMark] = {}  # that no plan has awaited
        self._offloading: deque[_Copied] = deque()  # in the order of their lane
        self._loading: deque[_Copied] = deque()
        self._traffic = HostTraffic()
        self._lock = threading.Lock()  # of the three before

    def find_planes(self) -> None:
        """As of Planes. Nothing may be under way."""
        for planes in (self.planes, self._windows.planes):
            if planes is not None:
                planes.find()

    def queue(self, copies: Copies) -> Callable[[], dict[int, CopyMark]]:
        """Queue the copies of a plan, before its step, on the compute lane.

        Returns what queues its loads, and returns their ends by id. It is to be called after the
        step has been queued, which so does not wait for some 200 launches: three milliseconds for a
        prefix of a gigabyte, in which the next step need not be launched yet.
        """
        for load_id in copies.awaits:
            mark = self._loads.pop(load_id, None)
            if mark is not None:  # otherwise it has failed with its plan
                self._up.hold_compute(mark)
        if copies.offloads:
            self._offload(copies.offloads)
        if not copies.loads:
            return dict
        before = self._lanes.mark()

        def load() -> dict[int, CopyMark]:
            marks: dict[int, CopyMark] = {}
            for load in copies.loads:  # those before one that fails are awaited
                self._loads[load.id] = marks[load.id] = self._load(load, before)
            return marks

        return load

    def _offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        pairs = sorted(pairs, key=lambda pair: pair[1])
        numbers = [page for page, _ in pairs]
        (pages,) = self._lanes.upload([self._parts.pages(numbers)])
        for start in range(0, len(pairs), self._piece):
            host_pages = [host_page for _, host_page in pairs[start : start + self._piece]]
            packed, last = self._ring.take(len(host_pages))
            if last is not None:
                self._down.hold_compute(last)
            if self.planes is not None:
                gather_pages(self.planes, pages[start : start + len(host_pages)], packed)
            self._parts.gather(numbers[start : start + len(host_pages)], packed)
            self._windows.gather(numbers[start : start + len(host_pages)], packed)
            copied = self._down.queue(self._sending(host_pages, packed), [self._lanes.mark()])
            self._ring.leave(len(host_pages), copied)
            self._note(self._offloading, copied, host_pages)

    def _sending(self, host_pages: Sequence[int], packed: Tensor) -> Callable[[], None]:
        runs = list(self.slabs.runs(host_pages))

        def send() -> None:
            for first, run in runs:
                run.copy_(packed[first : first + len(run)], non_blocking=True)

        return send

    def _load(self, load: Load, before: Mark) -> CopyMark:
        """before: the place of the load's plan."""
        pairs = sorted(zip(load.host_pages, load.pages, strict=True))
        host_pages = [host_page for host_page, _ in pairs]
        with self._lock:
            after = [before, *_marks(self._offloading, host_pages)]
        pages = [page for _, page in pairs]
        mark = self._up.queue(self._fetching(host_pages, pages), after)
        self._note(self._loading, mark, host_pages)
        return mark

    def _fetching(self, host_pages: Sequence[int], pages: Sequence[int]) -> Callable[[], None]:
        starts = range(0, len(host_pages), self._piece)
        pieces = [list(self.slabs.runs(host_pages[at : at + self._piece])) for at in starts]
        at_once = max(1, LOAD_BYTES // self.page_bytes, -(-len(host_pages) // MOST_DMAS))

        def fetch() -> None:
            targets = upload_pages(self._parts.pages(pages), self._lanes.device)
            for start, runs in zip(starts, pieces, strict=True):
                for first, run in runs:
                    for some, part in zip(
                        self._arriving[first : first + len(run)].split(at_once),
                        run.split(at_once),
                        strict=True,
                    ):
                        some.copy_(part, non_blocking=True)
                some = targets[start : start + self._piece]
                if self.planes is not None:
                    scatter_pages(self.planes, some, self._arriving)
                self._parts.scatter(pages[start : start + self._piece], self._arriving)
                self._windows.scatter(pages[start : start + self._piece], self._arriving)

        return fetch

    def before(self, move: Move) -> Sequence[Mark]:
        """What must be done before a move begins."""
        if move.target is Place.DEVICE:  # what was launched may still use the pages
            return [self._lanes.mark()]
        with self._lock:
            self._count_ended()
            if move.source is Place.DEVICE:
                # They were written by steps that have ended, or by loads that have landed, but
                # perhaps on another rank alone.
                return [copied.mark for copied in self._loading]
            return [*_marks(self._offloading, move.pages), *_marks(self._loading, move.pages)]

    def _note(self, lane: deque[_Copied], mark: CopyMark, host_pages: Sequence[int]) -> None:
        with self._lock:
            lane.append(_Copied(mark, frozenset(host_pages)))
            self._count_ended()

    def _count_ended(self) -> None:
        for lane, total in (
            (self._offloading, self._traffic.offloads),
            (self._loading, self._traffic.loads),
        ):
            while lane and lane[0].mark.is_reached():
                copied = lane.popleft()
                total.num_pages += len(copied.host_pages)
                total.num_bytes += len(copied.host_pages) * self.page_bytes
                total.seconds += copied.mark.seconds()

    def traffic(self) -> HostTraffic:
        with self._lock:
            self._count_ended()
            return self._traffic.since(HostTraffic())  # a copy

    def measure(self, compute_s: float) -> LoadRule:
        """The rule by which loads pay if the tokens of a page are computed in `compute_s`.

        Loads into the scratch page, and blocks meanwhile; nothing may run.
        """
        self._time_load(1)  # compiles the kernel
        alone_s, _ = self._time_load(1)
        num_pages = min(self._piece, self.slabs.num_pages) * MEASURED_PIECES
        _, busy_s = self._time_load(num_pages)
        load_s = busy_s / num_pages
        return LoadRule(load_s, compute_s, delay_s=max(0.0, alone_s - load_s))

    def _time_load(self, num_pages: int) -> tuple[float, float]:
        """Seconds from the call to the end of a load, and those in which the lane was busy."""
        distinct = min(self._piece, self.slabs.num_pages)
        host_pages = [page % distinct for page in range(num_pages)]
        scratch = [0] * num_pages
        began = time.perf_counter()
        mark = self._up.queue(self._fetching(host_pages, scratch), [])
        mark.wait()
        return time.perf_counter() - began, mark.seconds()

    def close(self) -> None:
        """Free the host memory. No copy may be under way."""
        self.slabs.close()
