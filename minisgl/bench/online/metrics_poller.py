"""Polls /metrics of a minisgl server while it is measured."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from minisgl.bench.beside import beside
from minisgl.bench.offline_run import StepCounts
from minisgl.bench.online.target import Endpoint
from minisgl.client.errors import ServerError

INTERVAL_S = 0.5
LEVELS = ("minisgl_running_requests", "minisgl_queued_requests", "minisgl_token_usage_ratio")
COUNTS = {
    "num_steps": "minisgl_step_seconds_count",
    "num_graph_steps": "minisgl_graph_steps_total",
    "num_retractions": "minisgl_retractions_total",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a server at one time of a run."""

    at_s: float  # since the run began
    num_running: int
    num_queued: int
    token_usage: float  # share of the KV cache, 0 to 1


@dataclass(slots=True)
class PollResult:
    """The samples of one run; its counts are set when the run ends."""

    samples: list[Sample] = field(default_factory=list)
    counts: StepCounts | None = None  # None if the server does not report them


@asynccontextmanager
async def poll_metrics(
    target: Endpoint, interval_s: float = INTERVAL_S
) -> AsyncIterator[PollResult]:
    """Poll the server every `interval_s` seconds while the context is open."""
    polled = PollResult()
    before = await _metrics(target)
    if before is None:
        yield polled
        return
    began = time.perf_counter()

    async def look() -> None:
        while True:
            await asyncio.sleep(interval_s)
            if (found := await _metrics(target)) is not None:
                num_running, num_queued, token_usage = (found[name] for name in LEVELS)
                at_s = time.perf_counter() - began
                polled.samples.append(Sample(at_s, int(num_running), int(num_queued), token_usage))

    async with beside(look()):
        yield polled
    after = await _metrics(target)
    if after is not None:
        counted = {name: int(after[of] - before[of]) for name, of in COUNTS.items()}
        polled.counts = StepCounts(**counted)


async def _metrics(target: Endpoint) -> dict[str, float] | None:
    """The polled metrics by name; None if the server does not have them."""
    try:
        text = (await target.get(f"{target.root}/metrics")).decode()
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.labels and math.isfinite(sample.value)
        }
    except (ServerError, ValueError):
        return None
    return found if found.keys() >= {*LEVELS, *COUNTS.values()} else None
