"""The commands `minisgl bench` and its verbs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from minisgl.bench.config import BenchConfig, LatencyConfig, OfflineConfig, ReportConfig
from minisgl.bench.online.load_config import LoadConfig
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.config import EngineConfig

from .logs import set_up_logging
from .options import takes_options


@takes_options
def bench(
    engine: EngineConfig,
    bench: BenchConfig,
    offline: OfflineConfig,
    workload: WorkloadConfig,
    report: ReportConfig,
) -> int:
    """Measure the throughput of many requests at once, and their latencies.

    `minisgl bench latency` measures the time per output token at small batches instead,
    `minisgl bench serve` a server over HTTP, and `minisgl bench compare` shows two results of
    --json side by side.

    \b
      minisgl bench --model Qwen/Qwen3-0.6B
      minisgl bench --model Qwen/Qwen3-0.6B --input-len 1024 --output-len 128 --num-requests 64
    """
    set_up_logging(default="WARNING")
    from minisgl.bench.offline import bench_offline

    return asyncio.run(bench_offline(engine, bench, workload, report, offline.max_concurrency))


@takes_options
def bench_latency(engine: EngineConfig, bench: LatencyConfig, report: ReportConfig) -> int:
    """Measure the time per output token at several batch sizes."""
    set_up_logging(default="WARNING")
    from minisgl.bench.latency import bench_latency

    return asyncio.run(bench_latency(engine, bench, report))


@takes_options
def bench_serve(
    engine: EngineConfig,
    bench: BenchConfig,
    workload: WorkloadConfig,
    load: LoadConfig,
    report: ReportConfig,
) -> int:
    """Measure a server over HTTP: one that is started for the run, or any at --url.

    \b
      minisgl bench serve --model Qwen/Qwen3-0.6B --request-rate 4
      minisgl bench serve --url http://127.0.0.1:8000/v1 --max-concurrency 1,8,64 --plot load.png
    """
    set_up_logging(default="WARNING")
    from minisgl.bench.serve import bench_serve
    from minisgl.server.process import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(bench_serve(engine, bench, workload, load, report))


def bench_compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="What --json wrote.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another.")],
) -> int:
    """Show two results of --json side by side, with ratios."""
    from minisgl.bench.report.compare import compare

    return compare(first, second)
