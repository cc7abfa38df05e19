"""The lines of the log that tell how the engine is doing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from minisgl.engine.stats import EngineStats

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened from one snapshot to a later one."""

    before: EngineStats
    after: EngineStats
    seconds: float
    with_graphs: bool = True  # whether there are CUDA graphs to speak of

    @property
    def num_steps(self) -> int:
        return self.after.totals.step_s.count - self.before.totals.step_s.count

    @property
    def num_retractions(self) -> int:
        return self.after.counters.num_retractions - self.before.counters.num_retractions

    @property
    def had_work(self) -> bool:
        return bool(self.num_steps or self.after.num_running or self.after.num_queued)

    def describe(self) -> str:
        """A share of nothing is shown as a dash."""
        before, after = self.before, self.after
        num_tokens = after.num_output_tokens - before.num_output_tokens
        num_graph_steps = after.totals.num_graph_steps - before.totals.num_graph_steps
        graphs = f"graph steps: {_share(num_graph_steps, self.num_steps)}, "
        num_cached = after.counters.num_cached_tokens - before.counters.num_cached_tokens
        num_prompt = after.counters.num_prompt_tokens - before.counters.num_prompt_tokens
        return (
            f"running: {after.num_running}, queued: {after.num_queued}, "
            f"token usage: {after.token_usage:.2f}, "
            f"cache hit rate: {_share(num_cached, num_prompt)}, "
            f"{graphs if self.with_graphs else ''}"
            f"generation: {num_tokens / self.seconds:.1f} tok/s"
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


async def report(
    stats: Callable[[], EngineStats],
    interval_s: float = SECONDS_BETWEEN_LINES,
    *,
    with_graphs: bool = True,
) -> None:
    """Log a line every `interval_s` seconds while there is or was work. Runs until cancelled.

    A full KV cache gets a line of its own, at most one in each interval.
    """
    before, began = stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        after, now = stats(), time.monotonic()
        interval = Interval(before, after, now - began, with_graphs)
        if interval.had_work:
            logger.info("%s", interval.describe())
        if interval.num_retractions:
            logger.warning(
                "The KV cache was full: %d times a running request went back to the queue. It goes "
                "on later; fewer --max-running-requests or more --num-pages make that rarer.",
                interval.num_retractions,
            )
        before, began = after, now
