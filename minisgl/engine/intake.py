"""Turns texts and conversations into token ids, before they reach the engine.

A short text is encoded on the event loop, in under a millisecond. Everything else is done by a few
daemon threads, which the end of the process does not wait for. Long texts and chat templates that
do not end do not delay short texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from minisgl.errors import (
    ContextLengthError,
    EngineStoppedError,
    MinisglError,
    QueueFullError,
    TextTooLongError,
)
from minisgl.text.rendering import Renderer, encode_call
from minisgl.text.template_facts import TemplateFacts, probe
from minisgl.text.tokenizer import MAX_SHORT_CHARS, Tokenizer

# No text of a human language has as many for each token that fits, nor has code.
MAX_CHARS_PER_TOKEN = 16
ALWAYS_TAKEN_CHARS = 1 << 20
# Up to here a text, or what a template is given, is in the line of the short ones: some 10 ms.
SHORT_BYTES = 16 << 10
# A place in line; a text takes as many as its size asks for.
PLACE_BYTES = 32 << 10
# A text lets shorter ones pass, for one second per this many bytes that it is longer.
BYTES_PER_SECOND = 64 << 10
# A line has a thread, and others while it renders what takes longer than this.
OVERDUE_S = 1.0
NUM_SPARE = 3
# The time that callers have to submit the tokens that they have just got, before a drain goes on.
SUBMIT_S = 0.1
JOIN_S = 5.0

T = TypeVar("T")
Work = Callable[[Renderer], T]


@dataclass(order=True, slots=True)
class _Task:
    rank: float
    number: int  # of jobs that are equal in rank, the first is done first
    work: Work[Any] = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)


class _Worker:
    """A thread, with a process that renders for it if needed."""

    def __init__(
        self, renderer: Renderer, done: Callable[[_Worker, _Task, Any, Exception | None], None]
    ) -> None:
        self.renderer = renderer
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="minisgl-intake", daemon=True)
        self.thread.start()

    def begin(self, job: _Task) -> None:
        self._jobs.put(job)

    def end(self) -> None:
        """End after the current job; a rendering ends at once."""
        self.renderer.close()
        self._jobs.put(None)

    def _run(self) -> None:
        self._work()
        self.renderer.close()
        self.renderer.wait()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            result, error = None, None
            try:
                result = job.work(self.renderer)
            except Exception as raised:
                error = raised
            try:
                self._loop.call_soon_threadsafe(self._done, self, job, result, error)
            except RuntimeError:  # the loop was closed without closing the engine
                return
            del job, result, error


class _WorkQueue:
    """A queue of work, short before long, with the threads that do it. For one event loop."""

    def __init__(self, make_renderer: Callable[[], Renderer], num_spare: int = 0) -> None:
        """`num_spare` more threads may take over while a rendering is overdue."""
        self._make_renderer = make_renderer
        self._num_spare = num_spare
        self._waiting: list[_Task] = []  # a heap
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, _Task] = {}
        self._num_jobs = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()

    async def run(self, work: Work[T], size: int) -> T:
        """Run `work` in a thread when its turn comes; returns its result. `size` is in bytes."""
        if self._closed:
            raise EngineStoppedError("The engine takes no more texts.")
        self._num_jobs += 1
        rank = self._loop.time() + size / BYTES_PER_SECOND
        job = _Task(rank, self._num_jobs, work, self._loop.create_future())
        heapq.heappush(self._waiting, job)
        self._dispatch()
        result: T = await job.future
        return result

    def _dispatch(self) -> None:
        while self._waiting:
            if self._waiting[0].future.done():  # the caller is gone
                heapq.heappop(self._waiting)
                continue
            worker = self._find_worker()
            if worker is None:
                if self._timer is None and len(self._busy) <= self._num_spare:
                    self._timer = self._loop.call_later(OVERDUE_S, self._look_again)
                return
            self._busy[worker] = job = heapq.heappop(self._waiting)
            worker.begin(job)

    def _look_again(self) -> None:
        self._timer = None
        self._dispatch()

    def _find_worker(self) -> _Worker | None:
        if self._idle:
            return self._idle.pop()
        if len(self._busy) > self._num_spare:
            return None
        overdue_s = time.monotonic() - OVERDUE_S
        if any(worker.renderer.began_s > overdue_s for worker in self._busy):
            return None
        return _Worker(self._make_renderer(), self._on_done)

    def _on_done(self, worker: _Worker, job: _Task, result: Any, error: Exception | None) -> None:
        del self._busy[worker]
        if self._closed or self._idle:
            worker.end()
        else:
            self._idle.append(worker)
        if not job.future.done():
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
        self._dispatch()

    def end(self) -> list[threading.Thread]:
        """Accept nothing more, without failing what waits; returns the threads, which will end."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.end()
        return [worker.thread for worker in workers]

    def fail(self, reason: MinisglError) -> None:
        """Fail everything that is queued or running."""
        for job in (*self._waiting, *self._busy.values()):
            if not job.future.done():
                job.future.set_exception(reason)
        self._waiting.clear()


class Intake:
    """Turns texts and conversations into token ids. For one event loop, that of its engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_seq_len: int,
        num_places: int,
        make_renderer: Callable[[], Renderer] = Renderer,
    ) -> None:
        """`num_places`: short texts that may be here at once; a long one takes several."""
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len
        self._max_chars = max(ALWAYS_TAKEN_CHARS, MAX_CHARS_PER_TOKEN * max_seq_len)
        self._num_places = num_places
        self._num_taken = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._loop = asyncio.get_running_loop()
        self._last_left_s = -SUBMIT_S
        self._short = _WorkQueue(make_renderer, NUM_SPARE)
        self._long_renderings = _WorkQueue(make_renderer, NUM_SPARE)
        self._long_texts = _WorkQueue(make_renderer)  # one at a time, for their memory
        self._lines = (self._short, self._long_renderings, self._long_texts)
        self._threads: list[threading.Thread] = []  # that end
        self._warming: asyncio.Future[None] | None = None
        self._facts: asyncio.Future[TemplateFacts] | None = None

    def warm(self) -> None:
        """Start a rendering process, so that the first conversation does not wait for it."""

        async def start() -> None:
            with contextlib.suppress(Exception):  # the first conversation tries again
                await self._short.run(Renderer.start, 0)

        self._warming = asyncio.ensure_future(start())

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Raises ContextLengthError for one that is seen to be too long before it is encoded (not
        with `any_length`), TextTooLongError beyond all measure, and QueueFullError.
        """
        if len(text) <= MAX_SHORT_CHARS:
            self._last_left_s = self._loop.time()
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        with self._places(len(text)):
            return await self._encode(text, "prompt", add_special_tokens, any_length)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], any_length: bool, options: Mapping[str, Any]
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template; raises as `encode` does."""
        call = encode_call(self._tokenizer.template_call(messages, **options))
        with self._places(len(call)):
            line = self._short if len(call) <= SHORT_BYTES else self._long_renderings
            text = await line.run(lambda renderer: renderer.render(call), len(call))
            return await self._encode(text, "messages", False, any_length)

    async def template_facts(self) -> TemplateFacts:
        """What the chat template does, found out once. Raises EngineStoppedError."""

        def look(renderer: Renderer) -> TemplateFacts:
            return probe(
                lambda messages, options: renderer.render(
                    encode_call(self._tokenizer.template_call(messages, **options))
                )
            )

        if self._facts is None or (self._facts.done() and self._facts.exception()):
            self._facts = asyncio.ensure_future(self._short.run(look, 0))
        return await asyncio.shield(self._facts)

    async def _encode(
        self, text: str, param: str, add_special_tokens: bool, any_length: bool
    ) -> list[int]:
        self._check_length(text, param, any_length)
        encode = partial(
            self._tokenizer.encode,
            text,
            add_special_tokens=add_special_tokens,
            param=param,
            max_tokens=None if any_length else self._max_seq_len,
        )
        if len(text) <= MAX_SHORT_CHARS:
            return encode()
        line = self._short if len(text) <= SHORT_BYTES else self._long_texts
        return await line.run(lambda _: encode(), len(text))

    def _check_length(self, text: str, param: str, any_length: bool) -> None:
        """Check the number of characters, without reading the text."""
        fewest = self._tokenizer.fewest_tokens(len(text))
        if fewest > self._max_seq_len and not any_length:
            raise ContextLengthError(
                fewest, None, self._max_seq_len, at_least=True, prompt_field=param
            )
        if len(text) > self._max_chars:
            raise TextTooLongError(
                param,
                f"The text has {len(text)} characters; at most {self._max_chars} are taken, which "
                f"is more than sequences of {self._max_seq_len} tokens hold.",
            )

    @contextlib.contextmanager
    def _places(self, size: int) -> Iterator[None]:
        """Reserve places for a text. QueueFullError if too few are free, but for a first text."""
        num = 1 + size // PLACE_BYTES
        if self._num_taken and self._num_taken + num > self._num_places:
            raise QueueFullError("Too much text is waiting to be tokenized; try again later.")
        self._num_taken += num
        self._empty.clear()
        try:
            yield
        finally:
            self._num_taken -= num
            self._last_left_s = self._loop.time()
            if not self._num_taken:
                self._empty.set()

    async def settle(self) -> None:
        """Wait until all callers have their token ids and have had time to submit them."""
        while True:
            await self._empty.wait()
            rest_s = self._last_left_s + SUBMIT_S - self._loop.time()
            if rest_s <= 0:
                return
            await asyncio.sleep(rest_s)

    def close(self, reason: MinisglError) -> None:
        """Fail everything that is here with `reason`. Idempotent."""
        self.end()
        for line in self._lines:
            line.fail(reason)

    def end(self) -> None:
        """End the lines without failing what waits, from any thread, once the loop has stopped."""
        for line in self._lines:
            self._threads += line.end()

    def join(self) -> None:
        """After `close`: block until the threads have ended, for some seconds at most.

        The library must not be at work in one when the interpreter ends.
        """
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
