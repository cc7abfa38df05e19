"""Checks the CPU bounds on the bundled demo model: `python scripts/bench/bench_cpu.py`.

1. While 32 streams run, nothing blocks the event loop for more than 50 ms.
2. 32 requests together reach at least six times the tokens per second of one.

Run it on a quiet machine; each figure is the best of five, greedy and sampled.
"""

from __future__ import annotations

import asyncio
import time

from minisgl.bench.config import Sizes, Span
from minisgl.bench.offline_run import run_offline
from minisgl.bench.workload.requests import make_workload
from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine

REPEATS = 5
NUM_STREAMS = 32
PROMPT, OUTPUT = Span(16, 64), Span(128, 128)
TICK_S = 0.001
MAX_BLOCKED_S = 0.050
MIN_SPEEDUP = 6.0


async def throughput(
    engine: AsyncEngine, num_requests: int, temperature: float, seed: int
) -> float:
    """Output tokens per second of this many requests, all submitted at once."""
    jobs = make_workload(
        Sizes(num_requests, PROMPT, OUTPUT),
        vocab_size=engine.model.vocab_size,
        seed=seed,
    )
    run = await run_offline(engine, jobs, temperature)
    return num_requests * OUTPUT.high / run.elapsed_s


async def longest_block() -> float:
    """Until cancelled, how long the loop took at most to get back to a task that was due."""
    longest = 0.0
    try:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            longest = max(longest, time.perf_counter() - due)
    except asyncio.CancelledError:
        return longest


async def measure(engine: AsyncEngine, temperature: float) -> None:
    alone: list[float] = []
    together: list[float] = []
    blocked: list[float] = []
    for repeat in range(REPEATS):
        alone.append(await throughput(engine, 1, temperature, seed=2 * repeat))
        ticker = asyncio.create_task(longest_block())
        await asyncio.sleep(0)
        together.append(await throughput(engine, NUM_STREAMS, temperature, seed=2 * repeat + 1))
        ticker.cancel()
        blocked.append(await ticker)
    speedup = max(together) / max(alone)
    print(f"temperature {temperature:g}, best of {REPEATS}")
    print(f"  one request alone          {max(alone):8.0f} tok/s")
    print(f"  {NUM_STREAMS} requests together       {max(together):8.0f} tok/s")
    print(f"  speed-up                   {speedup:8.1f}  (limit: at least {MIN_SPEEDUP:g})")
    print(
        f"  longest block of the loop  {min(blocked) * 1e3:8.1f} ms  "
        f"(limit: {MAX_BLOCKED_S * 1e3:g} ms)"
    )


async def main() -> None:
    async with await AsyncEngine.start(EngineConfig(device="cpu")) as engine:
        for temperature in (0.0, 0.7):
            await measure(engine, temperature)


if __name__ == "__main__":
    asyncio.run(main())
