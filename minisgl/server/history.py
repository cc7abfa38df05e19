"""The last hour of the metrics that the page draws, for people who look at it later."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable
from itertools import accumulate

from msgspec import Struct
from prometheus_client.utils import floatToGoString

from minisgl.engine.stats import EngineStats, Histogram, Totals
from minisgl.scheduler.state import SchedulerCounters

SECONDS = 15  # between samples
SPAN = 3600  # seconds that are kept


class Samples(Struct):
    """The samples of one engine: of each series a value for each slot, the oldest first."""

    slots: list[int]  # Unix times divided by the seconds between samples
    series: dict[str, list[float]]  # by the names in /metrics


class MetricsHistory(Struct):
    """GET /metrics/history"""

    seconds: int  # between samples
    replicas: dict[str, Samples]  # of a server without replicas under the name ""


class History:
    """Samples of an engine's statistics. They take about 200 KB at most."""

    def __init__(
        self, stats: Callable[[], EngineStats | None], clock: Callable[[], float] = time.time
    ) -> None:
        """stats: None while there is no engine. clock: Unix time in seconds."""
        self._stats = stats
        self._clock = clock
        self._samples: deque[tuple[int, array[float]]] = deque(maxlen=SPAN // SECONDS)

    def sample(self) -> None:
        """Keep the statistics as they are now, once for each slot of time."""
        stats, slot = self._stats(), int(self._clock() // SECONDS)
        if stats is None or (self._samples and self._samples[-1][0] == slot):
            return
        self._samples.append((slot, array("d", _series(stats).values())))

    def samples(self) -> Samples:
        values = [values for _, values in self._samples]
        columns = {name: [each[place] for each in values] for place, name in enumerate(SERIES)}
        return Samples([slot for slot, _ in self._samples], columns)

    async def keep(self) -> None:
        """Sample at the beginning of each slot. Runs until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SECONDS - self._clock() % SECONDS)


def buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """The bounds of a histogram, each with the number of values up to it."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return [*zip(bounds, accumulate(histogram.counts), strict=True)]


def _series(stats: EngineStats) -> dict[str, float]:
    counters, totals = stats.counters, stats.totals
    found: dict[str, float] = {
        "running_requests": stats.num_running,
        "queued_requests": stats.num_queued,
        "token_usage_ratio": stats.token_usage,
        "prompt_tokens_total": counters.num_prompt_tokens,
        "cached_prompt_tokens_total": counters.num_cached_tokens,
        "generated_tokens_total": totals.num_output_tokens,
    }
    histograms = {
        "step": totals.step_s,
        "time_to_first_token": totals.ttft_s,
        "inter_token": totals.itl_s,
        "request": totals.e2e_s,
    }
    for name, histogram in histograms.items():
        for bound, count in buckets(histogram):
            found[f'{name}_seconds_bucket{{le="{bound}"}}'] = count
    return {f"minisgl_{name}": value for name, value in found.items()}


SERIES = tuple(_series(EngineStats(0, 0, 1, 1, 0, SchedulerCounters(), Totals())))
