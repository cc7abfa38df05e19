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

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.attention.base import LayerKV
from minisgl.config import KVSpec
from minisgl.kernels.cache_pages.dispatch import gather_pages, scatter_pages
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kvcache.copies import Copies, HostTraffic, Load, LoadRule, Traffic
from minisgl.kvcache.store import Done, Transfer, Way
from minisgl.runner.copy_lanes import CopyLane, CopyMark, copy_lane
from minisgl.runner.disk_lane import DiskLane
from minisgl.runner.lanes import Lanes
from minisgl.runner.nixl_pages import NixlPages, is_installed
from minisgl.runner.page_exchange import PageExchange
from minisgl.runner.page_files import PageFiles
from minisgl.runner.page_wire import Address

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 30  # a power of two, to which torch rounds pinned memory
PIECE_BYTES = 32 << 20
# Pieces that may wait for their DMA to the host before the compute lane must. Then there is one for
# loads.
NUM_STAGED = 8
MEASURED_PIECES = 8
# The assumed speed of a disk that cannot be measured, because this process may not write there.
UNKNOWN_DISK_BYTES_PER_S = 1e9


def staging_bytes(layers: Sequence[KVSpec], page_size: int) -> int:
    """Bytes of device memory that a host cache needs for its pieces."""
    page_bytes = sum(spec.bytes_per_token for spec in layers) * page_size
    return (NUM_STAGED + 1) * _pages_per_piece(page_bytes) * page_bytes


def _pages_per_piece(page_bytes: int) -> int:
    return max(1, PIECE_BYTES // page_bytes)


class _Copied(NamedTuple):
    """Pages on their way."""

    mark: CopyMark
    host_pages: frozenset[int]
    total: Traffic  # to which they will be added


class Slabs:
    """Host pages in slabs of pinned memory, allocated one after the other by a thread.

    It begins at once: the system pins some 3 GB a second, and prefixes that fall out of the KV
    cache would wait for it. On an H200 they did, for six seconds of a round of conversations.
    """

    def __init__(self, num_pages: int, page_bytes: int, lanes: Lanes) -> None:
        self.num_pages = num_pages
        self._page_bytes = page_bytes
        self._pinned = lanes.device.type == "cuda"
        self._pages_per_slab = min(num_pages, max(1, SLAB_BYTES // page_bytes))
        self._thread = ThreadPoolExecutor(1, "minisgl-pinning", lanes.enter_thread)
        self._slabs: list[Future[Tensor]] = [
            self._thread.submit(self._allocate, min(self._pages_per_slab, num_pages - first))
            for first in range(0, num_pages, self._pages_per_slab)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(slab.result().nbytes for slab in self._slabs if slab.done())

    def _allocate(self, num_pages: int) -> Tensor:
        shape = (num_pages, self._page_bytes)
        if self._pinned:
            try:
                return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                logger.warning(
                    "The system pins no more memory for --host-cache; copies to the rest are slow: "
                    "%s",
                    error,
                )
        return torch.empty(shape, dtype=torch.uint8)

    def runs(self, host_pages: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The host pages, ascending, as few tensors [n, page_bytes], each with the index of its
        first page in `host_pages`. Blocks until memory for them is allocated."""
        start = 0
        for end in range(1, len(host_pages) + 1):
            first, last = host_pages[start], host_pages[end - 1]
            slab = first // self._pages_per_slab
            if end < len(host_pages):
                following = host_pages[end]
                if following == last + 1 and following // self._pages_per_slab == slab:
                    continue
            row = first - slab * self._pages_per_slab
            yield start, self._slabs[slab].result()[row : row + end - start]
            start = end

    def views(self, host_pages: Sequence[int]) -> list[memoryview]:
        """The memory of host pages, in any order. Blocks as `runs` does."""
        return [row.numpy().data for _, run in self.runs(host_pages) for row in run.unbind()]

    def regions(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of each slab. Blocks until it is allocated."""
        for slab in list(self._slabs):
            memory = slab.result()
            yield memory.data_ptr(), memory.nbytes

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._slabs.clear()


@dataclass(slots=True)
class _Stage:
    """Room for a piece of an offload on the device."""

    packed: Tensor  # [pages per piece, page_bytes] uint8
    copied: CopyMark | None = None  # its last piece


class HostCache:
    """The host pages of one rank, the disk behind them, and exchanges with other engines.

    One thread calls `queue` and `transfer`; any thread may call `listen` and read `traffic`.
    """

    def __init__(
        self,
        kv: Sequence[LayerKV],
        num_pages: int,
        lanes: Lanes,
        make_lane: Callable[[Lanes], CopyLane] = copy_lane,
        store: PageFiles | None = None,
    ) -> None:
        """num_pages: in host memory."""
        self._lanes = lanes
        self._planes = Planes.of([plane for layer in kv for plane in (layer.k, layer.v)])
        page_bytes = self._planes.page_bytes
        self._piece = _pages_per_piece(page_bytes)
        self.slabs = Slabs(num_pages, page_bytes, lanes)

        def stage() -> Tensor:
            return torch.empty((self._piece, page_bytes), dtype=torch.uint8, device=lanes.device)

        self._stages = [_Stage(stage()) for _ in range(NUM_STAGED)]
        self._next_stage = itertools.cycle(self._stages)
        self._arriving = stage()  # a piece of a load
        self._down, self._up = make_lane(lanes), make_lane(lanes)
        self._loads: dict[int, CopyMark] = {}  # that no plan has awaited
        self._under_way: deque[_Copied] = deque()
        self._traffic = HostTraffic.none()
        self._lock = threading.Lock()  # of the two before
        self._disk: DiskLane | None = None
        if store is not None:
            self._disk = DiskLane(store, self.slabs.views, lanes.enter_thread)
        self._exchange: PageExchange | None = None

    @property
    def page_bytes(self) -> int:
        return self._planes.page_bytes

    def queue(self, copies: Copies) -> dict[int, CopyMark]:
        """Queue the copies of a plan, before its step, on the compute lane.

        Returns the ends of its loads by id.
        """
        for load_id in copies.awaits:
            mark = self._loads.pop(load_id, None)
            if mark is not None:  # otherwise it has failed with its plan
                self._up.hold_compute(mark)
        if copies.offloads:
            self._offload(copies.offloads)
        marks = {load.id: self._load(load) for load in copies.loads}
        self._loads |= marks
        return marks

    def _offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        pairs = sorted(pairs, key=lambda pair: pair[1])
        (pages,) = self._lanes.upload([[page for page, _ in pairs]])
        for start in range(0, len(pairs), self._piece):
            host_pages = [host_page for _, host_page in pairs[start : start + self._piece]]
            stage = next(self._next_stage)
            if stage.copied is not None:
                self._down.hold_compute(stage.copied)
            gather_pages(self._planes, pages[start : start + len(host_pages)], stage.packed)
            send = self._sending(host_pages, stage.packed)
            stage.copied = self._down.queue(send, [self._lanes.mark()])
            self._note(stage.copied, host_pages, self._traffic.offloads)

    def _sending(self, host_pages: Sequence[int], packed: Tensor) -> Callable[[], None]:
        runs = list(self.slabs.runs(host_pages))

        def send() -> None:
            for first, run in runs:
                run.copy_(packed[first : first + len(run)], non_blocking=True)

        return send

    def _load(self, load: Load) -> CopyMark:
        pairs = sorted(zip(load.host_pages, load.pages, strict=True))
        host_pages = [host_page for host_page, _ in pairs]
        after = [self._lanes.mark(), *self._offloads_to(host_pages)]
        pages = torch.tensor([page for _, page in pairs], dtype=torch.int64)
        mark = self._up.queue(self._fetching(host_pages, pages), after)
        self._note(mark, host_pages, self._traffic.loads)
        return mark

    def _fetching(self, host_pages: Sequence[int], pages: Tensor) -> Callable[[], None]:
        """pages: [len(host_pages)] int64, on the CPU."""
        starts = range(0, len(host_pages), self._piece)
        pieces = [list(self.slabs.runs(host_pages[at : at + self._piece])) for at in starts]

        def fetch() -> None:
            targets = pages
            if self._lanes.device.type == "cuda":
                targets = pages.pin_memory().to(self._lanes.device, non_blocking=True)
            for start, runs in zip(starts, pieces, strict=True):
                for first, run in runs:
                    self._arriving[first : first + len(run)].copy_(run, non_blocking=True)
                some = targets[start : start + self._piece]
                scatter_pages(self._planes, some, self._arriving)

        return fetch

    def transfer(self, transfers: Sequence[Transfer], done: Done) -> None:
        """Begin transfers, after all copies that were queued before.

        `done` is called for each on any thread, whatever goes wrong, but not after `close`.
        """
        for transfer in transfers:
            after = [copied.mark for copied in self._copies_of(transfer.host_pages)]
            uses_disk = transfer.way in (Way.WRITE, Way.READ)
            lane = self._disk if uses_disk else self._exchange
            assert lane is not None, f"nothing can {transfer.way.value} here"
            lane.queue(transfer, after, done)

    def listen(self, address: str, token: bytes, rank: int) -> str:
        """Take part in transfers between engines; returns where the same rank of others finds this
        one. It comes before any of them; the last call counts.

        address: of the engine. token: of the cluster. Raises OSError.
        """
        if self._exchange is not None:
            self._exchange.close()
        where = Address.parse(address).of_rank(rank)
        views, enter_thread = self.slabs.views, self._lanes.enter_thread
        nixl = None
        if is_installed():
            nixl = NixlPages(self.slabs.regions, where.is_private(), enter_thread)
        self._exchange = PageExchange(where, token, rank, views, enter_thread, nixl)
        return str(self._exchange.address)

    def _copies_of(self, host_pages: Sequence[int]) -> list[_Copied]:
        """The copies under way that read or write one of `host_pages`."""
        with self._lock:
            self._count_ended()
            return [
                copied for copied in self._under_way if not copied.host_pages.isdisjoint(host_pages)
            ]

    def _offloads_to(self, host_pages: Sequence[int]) -> list[CopyMark]:
        """The offloads under way that write one of `host_pages`."""
        copies = self._copies_of(host_pages)
        return [copied.mark for copied in copies if copied.total is self._traffic.offloads]

    def _note(self, mark: CopyMark, host_pages: Sequence[int], total: Traffic) -> None:
        with self._lock:
            self._under_way.append(_Copied(mark, frozenset(host_pages), total))
            self._count_ended()

    def _count_ended(self) -> None:
        left: deque[_Copied] = deque()
        for copied in self._under_way:
            if not copied.mark.is_reached():
                left.append(copied)
                continue
            copied.total.num_pages += len(copied.host_pages)
            copied.total.num_bytes += len(copied.host_pages) * self.page_bytes
            copied.total.seconds += copied.mark.seconds()
        self._under_way = left

    def traffic(self) -> HostTraffic:
        with self._lock:
            self._count_ended()
            copied = self._traffic.since(HostTraffic.none())  # a copy
        if self._disk is None:
            return copied
        return replace(copied, writes=self._disk.writes.total(), reads=self._disk.reads.total())

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

    def measure_disk(self, host: LoadRule) -> LoadRule:
        """The rule by which reads from the disk pay, which are followed by loads under `host`.

        Overwrites host pages, and blocks meanwhile; nothing may run.
        """
        assert self._disk is not None
        read_s = alone_s = self.page_bytes / UNKNOWN_DISK_BYTES_PER_S
        measured = self._disk.measure(self.slabs.num_pages)
        if measured is not None:
            read_s, alone_s = measured
        delay_s = host.delay_s + max(0.0, alone_s - read_s)
        return LoadRule(host.load_s + read_s, host.compute_s, delay_s)

    def _time_load(self, num_pages: int) -> tuple[float, float]:
        """Seconds from the call to the end of a load, and those in which the lane was busy."""
        distinct = min(self._piece, self.slabs.num_pages)
        host_pages = [page % distinct for page in range(num_pages)]
        scratch = torch.zeros(num_pages, dtype=torch.int64)
        began = time.perf_counter()
        mark = self._up.queue(self._fetching(host_pages, scratch), [])
        mark.wait()
        return time.perf_counter() - began, mark.seconds()

    def close(self) -> None:
        """Free the host memory. No copy may be under way."""
        if self._exchange is not None:
            self._exchange.close()
        if self._disk is not None:
            self._disk.close()
        self.slabs.close()
