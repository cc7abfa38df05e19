"""A thread that waits, so that the event loop never does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")


class WaitingThread(Generic[Item]):
    """Waits for one thing after the other. The interpreter's exit does not wait for it."""

    def __init__(
        self, name: str, wait: Callable[[Item], None], at_end: Callable[[], object] = lambda: None
    ) -> None:
        """wait: called by the thread with each item; at_end: behind the last one. Neither raises
        anything."""
        self.ended: Future[None] = Future()
        self._wait = wait
        self._at_end = at_end
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, item: Item) -> None:
        self._items.put(item)

    def end(self) -> None:
        """Take no more items. The future `ended` completes behind the last one."""
        self._items.put(None)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            self._wait(item)
            del item  # it may hold memory of the device
        self._at_end()
        self.ended.set_result(None)
