"""Transfers between host pages and the disk, on threads of their own."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from minisgl.errors import without_words
from minisgl.kvcache.copies import Traffic
from minisgl.kvcache.store import KEY_BYTES, Done, Transfer, Way
from minisgl.runner.copy_lanes import Mark
from minisgl.runner.page_files import PageFiles

logger = logging.getLogger(__name__)

# A disk is fast only with several requests at once, and checksums take a core each.
NUM_READERS = 8
NUM_WRITERS = 2
READ_BYTES = 8 << 20  # of one reader at a time, but for one page
READ_PAGES = 16
# At most, but for the first page: some parts for every reader.
MEASURED_PAGES = 256
MEASURED_BYTES = 256 << 20


class DiskLane:
    """Reads and writes host pages. Any thread may call it."""

    def __init__(
        self,
        store: PageFiles,
        views: Callable[[Sequence[int]], list[memoryview]],
        enter_thread: Callable[[], None],
    ) -> None:
        """views: the memory of host pages; it may block."""
        self.store = store
        self.pages_at_once = min(READ_PAGES, max(1, READ_BYTES // store.page_bytes))
        self._views = views
        self._readers = ThreadPoolExecutor(NUM_READERS, "minisgl-disk-read", enter_thread)
        self._writers = ThreadPoolExecutor(NUM_WRITERS, "minisgl-disk-write", enter_thread)
        self.writes, self.reads = Meter(), Meter()

    def queue(self, transfer: Transfer, after: Sequence[Mark], done: Done) -> None:
        """Begin when `after` are reached. `done` is called on any thread, whatever goes wrong, but
        not after `close`."""
        if transfer.way is Way.WRITE:
            self._writers.submit(self._write, transfer, after, done)
        else:
            _Reading(self, transfer, after, done).begin(self._readers)

    def _write(self, transfer: Transfer, after: Sequence[Mark], done: Done) -> None:
        num_pages = 0
        self.writes.begin()
        try:
            for mark in after:
                mark.wait()
            if self.store.write(transfer.keys, self._views(transfer.host_pages)):
                num_pages = len(transfer.keys)
        except Exception as error:
            logger.error("A write to the disk cache failed: %s", without_words(error))
        self.writes.end(num_pages, self.store.page_bytes)
        done(transfer.id, num_pages)

    def read_part(
        self, keys: Sequence[bytes], host_pages: Sequence[int], after: Sequence[Mark]
    ) -> int:
        """Read pages, and return how many were good. Blocks."""
        try:
            for mark in after:
                mark.wait()
            num_pages = self.store.read(keys, self._views(host_pages))
        except Exception as error:
            logger.error("A read from the disk cache failed: %s", without_words(error))
            return 0
        return num_pages

    def measure(self, num_host_pages: int) -> tuple[float, float] | None:
        """Seconds to read a page among many, and to read one; None if nothing can be written.

        Overwrites host pages, which nobody may use. Blocks.
        """
        page_bytes = self.store.page_bytes
        count = min(num_host_pages, MEASURED_PAGES, max(1, MEASURED_BYTES // page_bytes))
        host_pages = range(count)
        keys = [secrets.token_bytes(KEY_BYTES) for _ in host_pages]
        try:
            if not self.store.write(keys, self._views(host_pages)):
                return None
            self.store.leave_memory(keys)
            many_s = self._time_read(keys) / count
            self.store.leave_memory(keys)
            return many_s, self._time_read(keys[:1])
        finally:
            self.store.remove(keys)
            self.reads = Meter()  # what was measured was for nobody

    def _time_read(self, keys: Sequence[bytes]) -> float:
        ended: Future[None] = Future()
        transfer = Transfer(0, Way.READ, tuple(keys), tuple(range(len(keys))))
        began = time.perf_counter()
        self.queue(transfer, [], lambda transfer_id, num_pages: ended.set_result(None))
        ended.result()
        return time.perf_counter() - began

    def close(self) -> None:
        """Give up what has not begun, and wait for the rest."""
        for pool in (self._readers, self._writers):
            pool.shutdown(cancel_futures=True)
        self.store.close()


class _Reading:
    """A read in parts, which several threads do."""

    def __init__(
        self, lane: DiskLane, transfer: Transfer, after: Sequence[Mark], done: Done
    ) -> None:
        self._lane = lane
        self._transfer = transfer
        self._after = after
        self._done = done
        self._size = lane.pages_at_once
        self._starts = range(0, len(transfer.keys), self._size)
        self._counts = dict.fromkeys(self._starts, 0)
        self._num_left = len(self._starts)
        self._lock = threading.Lock()

    def begin(self, pool: ThreadPoolExecutor) -> None:
        for start in self._starts:
            pool.submit(self._read, start)

    def _read(self, start: int) -> None:
        part = slice(start, start + self._size)
        keys = self._transfer.keys[part]
        self._lane.reads.begin()
        count = self._lane.read_part(keys, self._transfer.host_pages[part], self._after)
        self._lane.reads.end(count, self._lane.store.page_bytes)
        with self._lock:
            self._counts[start] = count
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._done(self._transfer.id, self._num_good())

    def _num_good(self) -> int:
        num_good = 0
        for start in self._starts:
            num_good += self._counts[start]
            if num_good < min(start + self._size, len(self._transfer.keys)):
                break
        return num_good


class Meter:
    """Adds up what several threads do, and the time in which one of them is at it at least."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Traffic()
        self._num_busy = 0
        self._since = 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._num_busy:
                self._since = time.perf_counter()
            self._num_busy += 1

    def end(self, num_pages: int, page_bytes: int) -> None:
        with self._lock:
            self._num_busy -= 1
            self._total.num_pages += num_pages
            self._total.num_bytes += num_pages * page_bytes
            if not self._num_busy:
                self._total.seconds += time.perf_counter() - self._since

    def total(self) -> Traffic:
        with self._lock:
            return self._total.since(Traffic())  # a copy
