"""Benchmarks of the engine."""

from __future__ import annotations

from minisgl.bench.config import BenchConfig, LatencyConfig
from minisgl.config import EngineConfig


# The command line imports this package for --help, which must be quick: hence the imports inside.
def run(engine: EngineConfig, bench: BenchConfig) -> int:
    """Measure the standard offline workload; prints as it goes. Returns the exit code.

    Raises MinisglError where the engine does not start or refuses a request.
    """
    import asyncio

    from minisgl.bench.offline import bench_offline

    return asyncio.run(bench_offline(engine, bench))


def run_latency(engine: EngineConfig, bench: LatencyConfig) -> int:
    """Measure the time per output token at several batch sizes; otherwise like `run`."""
    import asyncio

    from minisgl.bench.latency import bench_latency

    return asyncio.run(bench_latency(engine, bench))
