"""Work that processes do for threads, in order of size and arrival."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from minisgl.engine.waiting_thread import WaitingThread
from minisgl.errors import EngineStoppedError, MinisglError
from minisgl.subprocesses import Worker

# Work is ordered by arrival plus one second per this many bytes: short work overtakes long work.
BYTES_PER_SECOND = 64 << 10
INTERRUPT_S = 0.1  # between attempts to end a task, which may not have begun

T = TypeVar("T")
W = TypeVar("W", bound=Worker)


@dataclass(order=True, slots=True)
class _Task:
    priority: float  # lowest first
    number: int  # order of arrival, which breaks ties of priority
    work: Callable[[Any], Any] = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)


class _Thread(Generic[W]):
    """A thread and the process that does tasks for it, started when first needed."""

    def __init__(
        self, worker: W, done: Callable[[_Thread[W], _Task, Any, Exception | None], None]
    ) -> None:
        self.worker = worker
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._thread = WaitingThread("minisgl-intake", self._work, worker.wait)
        self.add = self._thread.add
        self.ended = self._thread.ended

    def end(self) -> None:
        """End after the current task; its process is killed."""
        self.worker.close()
        self._thread.end()

    def _work(self, task: _Task) -> None:
        result, error = None, None
        try:
            result = task.work(self.worker)
        except Exception as raised:
            error = raised
        try:
            self._loop.call_soon_threadsafe(self._done, self, task, result, error)
        except RuntimeError:  # the loop was closed without closing the engine
            self.end()


class WorkQueue(Generic[W]):
    """A priority queue of work, short before long, and its threads. Used by one event loop.

    A piece of work is called with the process of a thread.
    """

    def __init__(self, make_worker: Callable[[], W], num_threads: int = 1) -> None:
        self._make_worker = make_worker
        self._num_threads = num_threads
        self._waiting: list[_Task] = []  # a heap
        self._idle: list[_Thread[W]] = []
        self._busy: dict[_Thread[W], _Task] = {}
        self._num_tasks = 0
        self._closed = False
        self._loop = asyncio.get_running_loop()

    async def run(self, work: Callable[[W], T], size: int) -> T:
        """Run `work` in a thread when its turn comes and return its result. size: in bytes."""
        if self._closed:
            raise EngineStoppedError("The engine takes no more texts.")
        self._num_tasks += 1
        priority = self._loop.time() + size / BYTES_PER_SECOND
        task = _Task(priority, self._num_tasks, work, self._loop.create_future())
        heapq.heappush(self._waiting, task)
        self._dispatch()
        try:
            result: T = await task.future
        except asyncio.CancelledError:
            self._interrupt(task)
            raise
        return result

    def _interrupt(self, task: _Task) -> None:
        """End the process of a task for which nobody waits, once it has begun."""
        for thread, current in self._busy.items():
            if current is task:
                thread.worker.interrupt()
                self._loop.call_later(INTERRUPT_S, self._interrupt, task)
                return

    def _dispatch(self) -> None:
        while self._waiting:
            if self._waiting[0].future.done():  # the caller is gone
                heapq.heappop(self._waiting)
                continue
            if self._idle:
                thread = self._idle.pop()
            elif len(self._busy) < self._num_threads:
                thread = _Thread(self._make_worker(), self._on_done)
            else:
                return
            self._busy[thread] = task = heapq.heappop(self._waiting)
            thread.add(task)

    def _on_done(
        self, thread: _Thread[W], task: _Task, result: Any, error: Exception | None
    ) -> None:
        del self._busy[thread]
        if self._closed:
            thread.end()
        else:  # to start its process again would take seconds where processors are busy
            self._idle.append(thread)
        if not task.future.done():
            if error is None:
                task.future.set_result(result)
            else:
                task.future.set_exception(error)
        self._dispatch()

    def end(self) -> list[Future[None]]:
        """Accept no more work; returns the ends of the threads, which are near."""
        self._closed = True
        threads = [*self._idle, *self._busy]
        for thread in threads:
            thread.end()
        return [thread.ended for thread in threads]

    def fail(self, reason: MinisglError) -> None:
        """Fail everything that is queued or running."""
        for task in (*self._waiting, *self._busy.values()):
            if not task.future.done():
                task.future.set_exception(reason)
        self._waiting.clear()
