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
        self._samples.append((slot, array("d", _values(stats))))

    def samples(self) -> Samples:
        values = [values for _, values in self._samples]
        columns = {name: [each[place] for each in values] for place, name in enumerate(SERIES)}
        return Samples([slot for slot, _ in self._samples], columns)

    async def keep(self) -> None:
        """Sample at the beginning of each slot. Runs until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SECONDS - self._clock() % SECONDS)


def _histograms(totals: Totals) -> dict[str, Histogram]:
    return {
        "step": totals.step_s,
        "time_to_first_token": totals.ttft_s,
        "inter_token": totals.itl_s,
        "request": totals.e2e_s,
    }


def _series() -> tuple[str, ...]:
    figures = (
        *("running_requests", "queued_requests", "token_usage_ratio"),
        *("prompt_tokens_total", "cached_prompt_tokens_total", "generated_tokens_total"),
    )
    buckets = (
        f'minisgl_{name}_seconds_bucket{{le="{bound}"}}'
        for name, histogram in _histograms(Totals()).items()
        for bound in (*map(floatToGoString, histogram.bounds), "+Inf")
    )
    return (*(f"minisgl_{name}" for name in figures), *buckets)


SERIES = _series()


def _values(stats: EngineStats) -> list[float]:
    """A value for each of SERIES."""
    counters, totals = stats.counters, stats.totals
    return [
        *(stats.num_running, stats.num_queued, stats.token_usage),
        *(counters.num_prompt_tokens, counters.num_cached_tokens, totals.num_output_tokens),
        *(
            count
            for histogram in _histograms(totals).values()
            for count in accumulate(histogram.counts)
        ),
    ]
