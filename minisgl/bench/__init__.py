"""Benchmarks of the engine."""

from __future__ import annotations

from minisgl.bench.config import BenchConfig
from minisgl.config import EngineConfig


def run(engine: EngineConfig, bench: BenchConfig) -> int:
    """Measure the standard offline workload; prints as it goes. Returns the exit code.

    Raises MinisglError where the engine does not start or refuses a request.
    """
    # The command line imports this package for --help, which must be quick.
    import asyncio

    from minisgl.bench.offline import bench_offline

    return asyncio.run(bench_offline(engine, bench))
