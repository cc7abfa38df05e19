"""What a minisgl server says of itself while it is measured, from its /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from minisgl.bench.target import Target, TargetError

INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """A moment of a run."""

    at_s: float  # since the run began
    num_running: int
    num_queued: int
    token_usage: float  # share of the KV cache, 0 to 1


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a server did in a run."""

    num_steps: int
    num_graph_steps: int
    num_retractions: int


@dataclass(slots=True)
class Watched:
    """Of one run; the counts are there when it has ended."""

    samples: list[Sample] = field(default_factory=list)
    counts: StepCounts | None = None  # None if the server does not tell


@asynccontextmanager
async def watch(target: Target, interval_s: float = INTERVAL_S) -> AsyncIterator[Watched]:
    """Looks at the server every so many seconds while the context is open."""
    watched = Watched()
    before = await _metrics(target)
    if before is None:
        yield watched
        return
    began = time.perf_counter()

    async def look() -> None:
        while True:
            await asyncio.sleep(interval_s)
            if (found := await _metrics(target)) is not None:
                watched.samples.append(
                    Sample(
                        time.perf_counter() - began,
                        int(found["minisgl_running_requests"]),
                        int(found["minisgl_queued_requests"]),
                        found["minisgl_token_usage_ratio"],
                    )
                )

    looking = asyncio.ensure_future(look())
    try:
        yield watched
    finally:
        looking.cancel()
    after = await _metrics(target)
    if after is not None:

        def grown(name: str) -> int:
            return int(after[name] - before[name])

        watched.counts = StepCounts(
            num_steps=grown("minisgl_step_seconds_count"),
            num_graph_steps=grown("minisgl_graph_steps_total"),
            num_retractions=grown("minisgl_retractions_total"),
        )


async def _metrics(target: Target) -> dict[str, float] | None:
    """Those without labels, by name; None where there are none of minisgl."""
    try:
        text = (await target.get(f"{target.root}/metrics")).decode()
        families = list(text_string_to_metric_families(text))
    except (TargetError, ValueError):
        return None
    found = {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels
    }
    return found if "minisgl_step_seconds_count" in found else None
