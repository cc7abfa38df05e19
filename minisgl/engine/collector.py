"""Waits for launched steps on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic

from minisgl.engine.protocols import Handle, Runner
from minisgl.scheduler.plan import StepResult


class Collector(Generic[Handle]):
    """A thread that waits for launched steps, so that the event loop never blocks on the device."""

    def __init__(
        self, runner: Runner[Handle], done: Callable[[int, StepResult | Exception], None]
    ) -> None:
        self._runner = runner
        self._done = done
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._handles: queue.SimpleQueue[tuple[int, Handle] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._collect, name="minisgl-collector", daemon=True)
        self._thread.start()

    def add(self, step: int, handle: Handle) -> None:
        self._handles.put((step, handle))

    def end(self) -> None:
        """Accept no more steps. The future `ended` completes once everything is collected."""
        self._handles.put(None)

    def join(self, timeout_s: float) -> bool:
        """Block until everything is collected; False after `timeout_s`. Call `end` before.

        For callers without a running loop, which cannot wait for `ended`.
        """
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _collect(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed without closing the engine
            while (item := self._handles.get()) is not None:
                step, handle = item
                try:
                    outcome: StepResult | Exception = self._runner.collect(handle)
                except Exception as error:
                    outcome = error
                del handle, item
                self._loop.call_soon_threadsafe(self._done, step, outcome)
            self._loop.call_soon_threadsafe(self.ended.set_result, None)
