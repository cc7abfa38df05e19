"""Waits for loads from host memory on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic

from minisgl.engine.protocols import Handle, Runner


class Landings(Generic[Handle]):
    """A thread that waits for the loads of launched steps, beside the one that waits for steps."""

    def __init__(self, runner: Runner[Handle], landed: Callable[[int], None]) -> None:
        """landed: called on the running loop with the id of each load."""
        self._runner = runner
        self._landed = landed
        self._loop = asyncio.get_running_loop()
        self._handles: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="minisgl-landings", daemon=True).start()

    def add(self, handle: Handle) -> None:
        self._handles.put(handle)

    def end(self) -> None:
        """Accept no more steps."""
        self._handles.put(None)

    def _wait(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed without closing the engine
            while (handle := self._handles.get()) is not None:
                for load in self._runner.loads(handle):
                    self._loop.call_soon_threadsafe(self._landed, load)
