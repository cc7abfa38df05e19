"""The choice of what carries pages, where several carriers can.

NIXL over RDMA is faster than a socket, and NIXL over TCP is slower (on one machine by half). What
UCX has found cannot be asked. So each is measured.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # after which a carrier is used only if there is no other one
NUM_TRIES = 2  # measurements of each carrier; the first one includes connecting


class Choice:
    """The speed and the failures of the carriers of pages from one engine. Threads may share it: if
    two note something at once, one of the notes may be lost."""

    def __init__(self) -> None:
        self._tries: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}  # a byte takes, at best

    def among(self, names: Sequence[str]) -> str:
        """What carries the next pages: the fastest one, once all are measured."""
        names = [name for name in names if self._failures[name] < MAX_FAILURES] or names
        for name in names:
            if self._tries[name] < NUM_TRIES:
                return name
        return min(names, key=self._seconds.__getitem__)

    def carried(self, name: str, num_bytes: int, seconds: float) -> None:
        """Note how long something took."""
        self._seconds[name] = min(self._seconds.get(name, float("inf")), seconds / num_bytes)
        self._tries[name] += 1
        is_last = self._tries[name] == NUM_TRIES == min(self._tries.values())
        if is_last and len(self._tries) > 1:
            fastest = min(self._seconds, key=self._seconds.__getitem__)
            speeds = [f"{each}: {1e-9 / self._seconds[each]:.1f} GB/s" for each in self._seconds]
            logger.info("KV pages of another engine come by %s (%s)", fastest, ", ".join(speeds))

    def failed(self, name: str) -> None:
        self._failures[name] += 1
