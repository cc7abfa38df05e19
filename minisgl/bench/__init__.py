"""Benchmarks of the engine, and of servers."""

from __future__ import annotations

from pathlib import Path

from minisgl.bench.config import BenchConfig, LatencyConfig, ReportConfig
from minisgl.bench.online.config import LoadConfig
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.config import EngineConfig


# Imports are inside the functions because the command line imports this package for --help.
def run(
    engine: EngineConfig, bench: BenchConfig, workload: WorkloadConfig, report: ReportConfig
) -> int:
    """Measure a workload offline; prints as it goes. Returns the exit code.

    Raises MinisglError if the engine does not start or rejects a request.
    """
    import asyncio

    from minisgl.bench.offline import bench_offline

    return asyncio.run(bench_offline(engine, bench, workload, report))


def run_latency(engine: EngineConfig, bench: LatencyConfig, report: ReportConfig) -> int:
    """Measure the time per output token at several batch sizes; otherwise like `run`."""
    import asyncio

    from minisgl.bench.latency import bench_latency

    return asyncio.run(bench_latency(engine, bench, report))


def run_serve(
    engine: EngineConfig,
    bench: BenchConfig,
    workload: WorkloadConfig,
    load: LoadConfig,
    report: ReportConfig,
) -> int:
    """Measure a server over HTTP; otherwise like `run`."""
    import asyncio

    from minisgl.bench.serve import bench_serve
    from minisgl.server.process import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(bench_serve(engine, bench, workload, load, report))


def run_compare(first: Path, second: Path) -> int:
    """Print two results of --json side by side. Raises MinisglError for another file."""
    from minisgl.bench.report.compare import compare

    return compare(first, second)
