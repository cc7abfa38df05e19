"""`minisgl bench` and its verbs: how fast it is here."""

from __future__ import annotations

from minisgl.bench.config import BenchConfig, LatencyConfig
from minisgl.config import EngineConfig

from .logs import set_up_logging
from .options import takes_options


@takes_options
def bench(engine: EngineConfig, bench: BenchConfig) -> int:
    """Measure the throughput of many requests at once, and their latencies.

    `minisgl bench latency` measures the time per output token at small batches instead.
    """
    set_up_logging(default="WARNING")
    from minisgl.bench import run

    return run(engine, bench)


@takes_options
def bench_latency(engine: EngineConfig, bench: LatencyConfig) -> int:
    """Measure the time per output token at several batch sizes."""
    set_up_logging(default="WARNING")
    from minisgl.bench import run_latency

    return run_latency(engine, bench)
