"""Copy lanes for a CPU that are slow: their work is done later, by threads of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from support.waiting import LIMIT_S

from minisgl.device.copy_lanes import CopyMark, Mark
from minisgl.device.lanes import Lanes


class SlowMark:
    def __init__(self, done: Future[float]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()

    def is_reached(self) -> bool:
        return self._done.done()

    def seconds(self) -> float:
        return self._done.result()


class SlowLane:
    """Does each piece of work only after a while, or once `gate` opens."""

    gate = threading.Event()  # of all lanes
    gate.set()

    def __init__(self, lanes: Lanes) -> None:
        self._thread = ThreadPoolExecutor(1)

    def queue(self, work: Callable[[], None], after: Sequence[Mark]) -> CopyMark:
        def run() -> float:
            for mark in after:
                mark.wait()
            assert self.gate.wait(LIMIT_S)
            time.sleep(0.002)
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        return SlowMark(self._thread.submit(run))

    def hold_compute(self, mark: CopyMark) -> None:
        mark.wait()
