"""The periodic log lines about the engine's state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

import pytest
from support.engine_loop import ScriptedRunner, deltas_of, engine_on, params

from minisgl.engine.stats import EngineStats, Totals
from minisgl.scheduler.state import SchedulerCounters
from minisgl.server.stats_log import Interval, log_stats

IDLE = EngineStats(
    num_running=0,
    num_queued=0,
    num_pages=200,
    num_free_pages=200,
    num_cached_pages=0,
    counters=SchedulerCounters(),
    totals=Totals(),
)


def busy(*, steps: int, tokens: int, retractions: int = 0) -> EngineStats:
    totals = Totals(num_output_tokens=tokens, num_graph_steps=steps // 2)
    totals.step_s.observe(0.01, steps)
    return replace(
        IDLE,
        num_running=3,
        num_queued=2,
        num_free_pages=50,
        num_cached_pages=100,
        counters=SchedulerCounters(steps, 400, 100, retractions),
        totals=totals,
    )


def test_a_line_has_requests_usage_hit_rate_and_throughput() -> None:
    interval = Interval(IDLE, busy(steps=10, tokens=250), 5.0)
    assert interval.describe() == (
        "running: 3, queued: 2, token usage: 0.25, cache hit rate: 0.25, graph steps: 0.50, "
        "generation: 50.0 tok/s"
    )


def test_without_graphs_they_are_not_mentioned() -> None:
    line = Interval(IDLE, busy(steps=10, tokens=250), 5.0, with_graphs=False).describe()
    assert line.endswith("cache hit rate: 0.25, generation: 50.0 tok/s")


def test_ratios_cover_the_interval_and_are_a_dash_if_undefined() -> None:
    before, after = busy(steps=10, tokens=250), busy(steps=10, tokens=250)
    line = Interval(before, after, 5.0).describe()
    assert "cache hit rate: -, graph steps: -, generation: 0.0 tok/s" in line


async def lines_of(snapshots: list[EngineStats], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log lines for these snapshots, which are one interval apart."""
    left = iter(snapshots)
    all_read = asyncio.Event()

    def stats() -> EngineStats:
        try:
            return next(left)
        except StopIteration:
            all_read.set()
            return snapshots[-1]

    with caplog.at_level(logging.INFO, "minisgl"):
        reporting = asyncio.ensure_future(log_stats(stats, interval_s=0.001))
        await all_read.wait()
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


async def test_lines_are_written_only_while_there_is_work(caplog: pytest.LogCaptureFixture) -> None:
    done = replace(busy(steps=12, tokens=260), num_running=0, num_queued=0)
    snapshots = [IDLE, IDLE, busy(steps=10, tokens=250), done, done, done]
    running, ended = await lines_of(snapshots, caplog)
    assert running.startswith("INFO running: 3, queued: 2, ")
    assert ended.startswith("INFO running: 0, queued: 0, ")


async def test_requests_in_a_late_step_keep_being_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck = busy(steps=10, tokens=250)
    lines = await lines_of([stuck, stuck, replace(stuck)], caplog)
    assert len(lines) >= 2
    assert all("generation: 0.0 tok/s" in line for line in lines)


async def test_retractions_have_at_most_one_line_per_interval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = replace(busy(steps=10, tokens=250, retractions=70), num_running=0, num_queued=0)
    _, warning = await lines_of([IDLE, many, many, many], caplog)
    assert warning.startswith("WARNING The KV cache was full: 70 times ")
    assert "--num-pages" in warning


async def test_a_small_cache_under_load_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with engine_on(
        ScriptedRunner(page_size=4), num_pages=20, schedule_conservativeness=0.1
    ) as engine:
        before = engine.stats()
        streams = [engine.submit([i, 1, 2], params(60, ignore_eos=True)) for i in range(6)]
        await asyncio.gather(*map(deltas_of, streams))
        after = engine.stats()
    line, warning = await lines_of([before, after], caplog)
    assert "running: 0, queued: 0, token usage: 0.00" in line
    assert f"full: {after.counters.num_retractions} times" in warning
