"""Runs a workload on an engine and records when its tokens arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise
from typing import Any

from minisgl.bench.workload.requests import ScheduledRequest
from minisgl.bench.workload.structured import STRUCTURED
from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream
from minisgl.parts.masks.host import Constraint
from minisgl.request import Extra, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One finished request. Times are in seconds since the start of its run."""

    submitted_s: float
    first_token_s: float
    last_token_s: float
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt
    num_host_tokens: int = 0  # of these, loaded from host memory
    num_disk_tokens: int = 0  # of the cached ones, read from disk
    num_output_tokens: int
    num_drafted_tokens: int = 0  # guesses of output tokens that were verified
    num_accepted_tokens: int = 0  # of these, those that are in the output
    structured: bool = False  # the output followed a schema

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.submitted_s

    @property
    def e2e_s(self) -> float:
        return self.last_token_s - self.submitted_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between tokens; None for a single token, and for a vector."""
        if self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The steps of an engine during a run."""

    num_steps: int
    num_graph_steps: int = 0  # of these, those that ran as a CUDA graph
    num_retractions: int

    @property
    def graph_share(self) -> float | None:
        """The share of the steps that ran as a CUDA graph; None without steps."""
        return self.num_graph_steps / self.num_steps if self.num_steps else None


@dataclass(frozen=True, slots=True)
class RunRecord(StepCounts):
    """A run: its steps, and all requests in the order of their submission."""

    requests: list[RequestRecord]

    @property
    def elapsed_s(self) -> float:
        """From the first submission to the last token."""
        return max(request.last_token_s for request in self.requests)


# Waits for the end of a request, in one way or another. Returns when its first and its last token
# arrived, by time.perf_counter.
Consumer = Callable[[OutputStream], Awaitable[tuple[float, float]]]
# Makes one request, given when the run started.
Ask = Callable[[float], Awaitable[RequestRecord]]


async def run_offline(
    engine: AsyncEngine,
    jobs: Sequence[ScheduledRequest],
    temperature: float = 0.0,
    max_concurrency: int | None = None,
) -> RunRecord:
    """Submit all requests at once, or `max_concurrency` at a time, and wait for the first token and
    the end of each.

    In between, no request wakes the event loop, which for 256 requests would take milliseconds of
    every step. The engine must have no other work. Raises the first error of a request, and
    ends the others.
    """
    return await _generate(engine, jobs, temperature, _wait, max_concurrency)


async def run_streaming(engine: AsyncEngine, jobs: Sequence[ScheduledRequest]) -> RunRecord:
    """Like `run_offline`, but take every token as it arrives, like a streaming client."""
    return await _generate(engine, jobs, 0.0, _stream)


async def run_embeddings(
    engine: AsyncEngine, jobs: Sequence[ScheduledRequest], max_concurrency: int | None = None
) -> RunRecord:
    """Ask for the vectors of all prompts at once, or of `max_concurrency` at a time, each as a
    request of its own, and wait for them.

    The end of a request is its vector, and it has no tokens. The engine must have no other work.
    """

    adapters = _adapters(engine)

    async def embedded(job: ScheduledRequest, started: float) -> RequestRecord:
        submitted_s = time.perf_counter() - started
        [found] = await engine.vectors.embed([job.prompt], extras=next(adapters))
        ended_s = time.perf_counter() - started
        return RequestRecord(
            submitted_s=submitted_s,
            first_token_s=ended_s,
            last_token_s=ended_s,
            num_prompt_tokens=found.num_prompt_tokens,
            num_cached_tokens=found.num_cached_tokens,
            num_output_tokens=0,
        )

    return await _run(engine, [partial(embedded, job) for job in jobs], max_concurrency)


def gaps(times: Sequence[float], start: float, end: float) -> list[float]:
    """The seconds between consecutive times that are both within `start` and `end`."""
    return [after - before for before, after in pairwise(times) if start <= before and after <= end]


async def _generate(
    engine: AsyncEngine,
    jobs: Sequence[ScheduledRequest],
    temperature: float,
    consume: Consumer,
    max_concurrency: int | None = None,
) -> RunRecord:

    async def answered(
        job: ScheduledRequest, params: SamplingParams, extras: Sequence[Extra], started: float
    ) -> RequestRecord:
        submitted = time.perf_counter()
        stream = engine.submit(job.prompt, params, extras=extras)
        try:
            first, last = await consume(stream)
        finally:
            stream.abort()
        request = stream.request
        return RequestRecord(
            submitted_s=submitted - started,
            first_token_s=first - started,
            last_token_s=last - started,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_host_tokens=request.num_host_tokens,
            num_disk_tokens=request.num_disk_tokens,
            num_output_tokens=request.num_output_tokens,
            num_drafted_tokens=request.num_drafted_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            structured=job.structured,
        )

    asks = [
        partial(answered, job, job.params(temperature), (*await _extras(engine, job), *adapted))
        for job, adapted in zip(jobs, _adapters(engine), strict=False)
    ]
    return await _run(engine, asks, max_concurrency)


async def _run(engine: AsyncEngine, asks: Sequence[Ask], max_concurrency: int | None) -> RunRecord:
    """Ask all at once, or `max_concurrency` at a time. Raises the first error of one, when the
    others have ended too."""
    room: AbstractAsyncContextManager[Any] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    before = engine.stats()
    started = time.perf_counter()

    async def in_turn(ask: Ask) -> RequestRecord:
        async with room:
            return await ask(started)

    tasks = [asyncio.ensure_future(in_turn(ask)) for ask in asks]
    try:
        records = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    after = engine.stats()
    return RunRecord(
        records,
        num_steps=after.counters.num_steps - before.counters.num_steps,
        num_retractions=after.counters.num_retractions - before.counters.num_retractions,
        num_graph_steps=after.totals.num_graph_steps - before.totals.num_graph_steps,
    )


async def _extras(engine: AsyncEngine, job: ScheduledRequest) -> tuple[Extra, ...]:
    return (Constraint((await engine.compile(STRUCTURED)).matcher()),) if job.structured else ()


def _adapters(engine: AsyncEngine) -> Iterator[tuple[Extra, ...]]:
    """What asks for an adapter, of which requests take turns; of nothing where none is loaded."""
    return cycle([(each,) for each in engine.adapters.values()] or [()])


async def _wait(stream: OutputStream) -> tuple[float, float]:
    delta = await anext(stream)
    first = time.perf_counter()
    if delta.finish_reason is not None:
        return first, first
    await stream.wait_finished()
    return first, time.perf_counter()


async def _stream(stream: OutputStream) -> tuple[float, float]:
    times = [time.perf_counter() async for delta in stream if delta.token_ids]
    return times[0], times[-1]
