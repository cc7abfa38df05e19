"""Runs a workload on an engine and writes down when what arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.bench.workload import Job
from minisgl.engine import AsyncEngine, OutputStream


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One finished request. Times are in seconds since the start of its run."""

    submitted_s: float
    first_token_s: float
    last_token_s: float
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt
    num_output_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.submitted_s

    @property
    def e2e_s(self) -> float:
        return self.last_token_s - self.submitted_s

    @property
    def tpot_s(self) -> float | None:
        """Between tokens, on average; None for a single one."""
        if self.num_output_tokens == 1:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All requests of a run, in the order of their submission."""

    requests: list[RequestRecord]
    num_steps: int
    num_retractions: int

    @property
    def elapsed_s(self) -> float:
        """From the first submission to the last token."""
        return max(request.last_token_s for request in self.requests)


async def run_offline(engine: AsyncEngine, jobs: Sequence[Job]) -> RunRecord:
    """Submit all jobs at once and consume every stream as a client would.

    The engine must have no other work. Raises the first error of a request, and ends the others.
    """
    before = engine.stats().counters
    started = time.perf_counter()
    streams: list[tuple[OutputStream, float]] = []
    try:
        for job in jobs:
            submitted_s = time.perf_counter() - started
            streams.append((engine.submit(job.prompt_token_ids, job.params), submitted_s))
        requests = await asyncio.gather(
            *(_consume(stream, started, submitted_s) for stream, submitted_s in streams)
        )
    finally:
        for stream, _ in streams:
            stream.abort()
    after = engine.stats().counters
    return RunRecord(
        requests,
        num_steps=after.num_steps - before.num_steps,
        num_retractions=after.num_retractions - before.num_retractions,
    )


async def _consume(stream: OutputStream, started: float, submitted_s: float) -> RequestRecord:
    arrivals: list[float] = []
    async for delta in stream:
        if delta.token_ids:
            arrivals.append(time.perf_counter() - started)
    return RequestRecord(
        submitted_s=submitted_s,
        first_token_s=arrivals[0],
        last_token_s=arrivals[-1],
        num_prompt_tokens=stream.request.num_prompt_tokens,
        num_cached_tokens=stream.request.num_cached_tokens,
        num_output_tokens=stream.request.num_output_tokens,
    )
