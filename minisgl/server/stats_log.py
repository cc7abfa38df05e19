"""The log lines that report the progress of the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from minisgl.engine.stats import EngineStats
from minisgl.kvcache.copies import HostTraffic, Traffic

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True, slots=True)
class Interval:
    """The difference between two snapshots of the statistics."""

    before: EngineStats
    after: EngineStats
    seconds: float
    with_graphs: bool = True  # whether CUDA graphs are in use

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
        """The log line; `-` for a ratio whose denominator is zero."""
        before, after = self.before, self.after
        num_tokens = after.num_output_tokens - before.num_output_tokens
        num_graph_steps = after.totals.num_graph_steps - before.totals.num_graph_steps
        graphs = f"graph steps: {_ratio(num_graph_steps, self.num_steps)}, "
        num_cached = after.counters.num_cached_tokens - before.counters.num_cached_tokens
        num_prompt = after.counters.num_prompt_tokens - before.counters.num_prompt_tokens
        return (
            f"running: {after.num_running}, queued: {after.num_queued}, "
            f"token usage: {after.token_usage:.2f}, "
            f"cache hit rate: {_ratio(num_cached, num_prompt)}, "
            f"{self._describe_host(num_prompt)}"
            f"{graphs if self.with_graphs else ''}"
            f"{self._describe_drafts()}"
            f"generation: {num_tokens / self.seconds:.1f} tok/s"
        )

    def _describe_drafts(self) -> str:
        drafts, before = self.after.drafts, self.before.drafts
        if drafts is None or before is None:
            return ""
        num_accepted = drafts.num_accepted - before.num_accepted
        num_drafted = drafts.num_drafted - before.num_drafted
        num_rows = drafts.num_rows - before.num_rows
        return (
            f"drafts accepted: {_ratio(num_accepted, num_drafted)}, "
            f"tokens per step: {_ratio(num_rows + num_accepted, num_rows)}, "
        )

    def _describe_host(self, num_prompt: int) -> str:
        host, before = self.after.host, self.before.host
        if host is None or before is None:
            return ""
        num_loaded = self.after.counters.num_host_tokens - self.before.counters.num_host_tokens
        copied = host.traffic.since(before.traffic)
        return (
            f"from host: {_ratio(num_loaded, num_prompt)}, host usage: {host.usage:.2f}, "
            f"loaded: {_rate(copied.loads)}, offloaded: {_rate(copied.offloads)}, "
            f"{self._describe_disk(num_prompt, copied) if host.has_disk else ''}"
        )

    def _describe_disk(self, num_prompt: int, copied: HostTraffic) -> str:
        num_read = self.after.counters.num_disk_tokens - self.before.counters.num_disk_tokens
        return (
            f"from disk: {_ratio(num_read, num_prompt)}, "
            f"read: {_rate(copied.reads)}, written: {_rate(copied.writes)}, "
        )


def _rate(copies: Traffic) -> str:
    """Gigabytes, and gigabytes per second of copying."""
    if not copies.seconds:
        return "-"
    gigabytes = copies.num_bytes / 1e9
    return f"{gigabytes:.1f} GB at {gigabytes / copies.seconds:.1f} GB/s"


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


async def log_stats(
    stats: Callable[[], EngineStats],
    interval_s: float = SECONDS_BETWEEN_LINES,
    *,
    with_graphs: bool = True,
) -> None:
    """Log a line every `interval_s` seconds while there is or was work. Runs until cancelled.

    A full KV cache is a warning of its own, at most once per interval.
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
                "The KV cache was full: %d times a running request went back to the queue. It "
                "resumes later; a lower --max-running-requests or a higher --num-pages makes that "
                "rarer.",
                interval.num_retractions,
            )
        before, began = after, now
