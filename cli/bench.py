"""`minisgl bench`: how fast it is here."""

from __future__ import annotations

from minisgl.bench.config import BenchConfig
from minisgl.config import EngineConfig

from .logs import set_up_logging
from .options import takes_options


@takes_options
def bench(engine: EngineConfig, bench: BenchConfig) -> int:
    """Measure the throughput of many requests at once, and their latencies."""
    set_up_logging(default="WARNING")
    from minisgl.bench import run

    return run(engine, bench)
