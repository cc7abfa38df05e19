"""Moves of pages between host memory and the disk, on threads of their own."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from minisgl.device.copy_lanes import Mark
from minisgl.errors import without_words
from minisgl.kvcache.copies import Traffic
from minisgl.kvcache.moves import Done, Move, Place
from minisgl.kvcache.page_keys import KEY_BYTES
from minisgl.tiers.disk.page_files import PageFiles

logger = logging.getLogger(__name__)

# A disk is fast only with several requests at once, and checksums take a core each.
NUM_READERS = 8
NUM_WRITERS = 2
READ_BYTES = 8 << 20  # of one reader at a time, but for one page
READ_PAGES = 16
# At most, but for the first page: some parts for every reader.
MEASURED_PAGES = 256
MEASURED_BYTES = 256 << 20
# The assumed speed of a disk that cannot be measured, because this process may not write there.
UNKNOWN_BYTES_PER_S = 1e9


class DiskMoves:
    """Reads and writes host pages. Any thread may call it."""

    def __init__(
        self,
        store: PageFiles,
        views: Callable[[Sequence[int]], list[memoryview]],
        enter_thread: Callable[[], None],
    ) -> None:
        """views: the memory of host pages; it may block."""
        self._store = store
        self._pages_at_once = min(READ_PAGES, max(1, READ_BYTES // store.page_bytes))
        self._views = views
        self._readers = ThreadPoolExecutor(NUM_READERS, "minisgl-disk-read", enter_thread)
        self._writers = ThreadPoolExecutor(NUM_WRITERS, "minisgl-disk-write", enter_thread)
        self.writes, self.reads = TrafficMeter(), TrafficMeter()

    def start(self, move: Move, after: Sequence[Mark], done: Done) -> None:
        """Begin a move when `after` are reached; several threads share a read. `done` is called on
        any thread, whatever goes wrong, but not after `close`."""
        pool, size = self._readers, self._pages_at_once
        if move.target is Place.DISK:
            pool, size = self._writers, len(move.keys)
        starts = range(0, len(move.keys), size)
        parts = [
            replace(move, pages=move.pages[at : at + size], keys=move.keys[at : at + size])
            for at in starts
        ]
        counts: dict[int, int] = {}  # of good pages, by part
        lock = threading.Lock()

        def ended(part: int, num_pages: int) -> None:
            with lock:
                counts[part] = num_pages
                if len(counts) < len(parts):
                    return
            num_good = 0  # from the first of the move on
            for index, each in enumerate(parts):
                num_good += counts[index]
                if counts[index] < len(each.keys):
                    break
            done(move.id, num_good)

        for index, part in enumerate(parts):
            pool.submit(self._carry, part, after, partial(ended, index))

    def _carry(self, part: Move, after: Sequence[Mark], ended: Callable[[int], None]) -> None:
        """Write or read pages. ended: gets the number of those that are good."""
        writes = part.target is Place.DISK
        meter = self.writes if writes else self.reads
        num_pages = 0
        meter.begin()
        try:
            for mark in after:
                mark.wait()
            views = self._views(part.pages)
            if not writes:
                num_pages = self._store.read(part.keys, views)
            elif self._store.write(part.keys, views):
                num_pages = len(part.keys)
        except Exception as error:
            what = "write to" if writes else "read from"
            logger.error("A %s the disk cache failed: %s", what, without_words(error))
        meter.end(num_pages, self._store.page_bytes)
        ended(num_pages)

    def measure(self, num_host_pages: int) -> tuple[float, float]:
        """Seconds to read a page among many, and to read one.

        Overwrites host pages, which nobody may use. Blocks.
        """
        page_bytes = self._store.page_bytes
        count = min(num_host_pages, MEASURED_PAGES, max(1, MEASURED_BYTES // page_bytes))
        host_pages = range(count)
        keys = [secrets.token_bytes(KEY_BYTES) for _ in host_pages]
        try:
            if not self._store.write(keys, self._views(host_pages)):
                return (page_bytes / UNKNOWN_BYTES_PER_S,) * 2
            self._store.leave_memory(keys)
            many_s = self._time_read(keys) / count
            self._store.leave_memory(keys)
            return many_s, self._time_read(keys[:1])
        finally:
            self._store.remove(keys)
            self.reads = TrafficMeter()  # what was measured was for nobody

    def _time_read(self, keys: Sequence[bytes]) -> float:
        ended: Future[None] = Future()
        move = Move(0, Place.DISK, Place.HOST, tuple(range(len(keys))), tuple(keys))
        began = time.perf_counter()
        self.start(move, [], lambda move_id, num_pages: ended.set_result(None))
        ended.result()
        return time.perf_counter() - began

    def close(self) -> None:
        """Give up what has not begun, and wait for the rest."""
        for pool in (self._readers, self._writers):
            pool.shutdown(cancel_futures=True)
        self._store.close()


class TrafficMeter:
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
            return replace(self._total)
