"""Measures what a host cache gains and costs.

    python scripts/bench/bench_host_cache.py FOLDER --host-cache 100

Conversations with prefixes of 8,192 tokens come back in turns, 64 tokens in and 64 out, to a KV
cache with room for a third of them, so that a prefix has always just been evicted when its turn
comes; without the host cache and with it. Measured also where all prefixes stay on the device, and
the time between tokens (ITL) of running streams: alone, beside turns whose prefixes are on the
device, beside loads, and beside loads that displace what has no copy. FOLDER needs no more than a
config.json (see scripts/tools/dummy_config.py).
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from bench_mixed import Phase, Request, Work, measure_round, requests_of_engine
from rich.console import Console
from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.figures import Figures
from minisgl.bench.offline_run import RunRecord, run_offline
from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import bench_engine, freeze_memory
from minisgl.bench.workload.requests import ScheduledRequest, random_tokens
from minisgl.engine import AsyncEngine
from minisgl.kvcache.copies import HostTraffic, Traffic

SHARE = 3  # the device has room for one in so many conversations
ROUNDS = 2  # measured, after one that warms up
SPARE = 0.25  # of the device's room, that the working set inside of it leaves
TURNS_A_SECOND = 20  # beside running streams
STREAM_INPUT = 64
MAX_ROUND_S = 20.0  # of running streams


@dataclass(frozen=True, slots=True)
class Measured:
    """What one engine has shown."""

    outside: Figures  # of rounds of all conversations
    best_inside: Figures  # of the fastest round of as many as the device has room for
    offloads: Traffic  # of the first round, in which prefixes are computed
    loads: Traffic
    streams: dict[str, Phase]  # with a host cache


def figures_of(rounds: Sequence[RunRecord]) -> Figures:
    requests = [request for run in rounds for request in run.requests]
    return Figures.of_requests(requests, sum(run.elapsed_s for run in rounds), None)


class Conversations:
    def __init__(self, engine: AsyncEngine, arguments: argparse.Namespace) -> None:
        self._engine, self._arguments = engine, arguments
        self._make = requests_of_engine(engine)
        self._rng = random.Random(0)
        self.prefixes = self.fresh(arguments.conversations)

    def fresh(self, count: int) -> list[list[int]]:
        """New prefixes."""
        return [self._tokens(self._arguments.prefix) for _ in range(count)]

    def _tokens(self, count: int) -> list[int]:
        return random_tokens(self._rng, count, self._engine.model.vocab_size)

    def _turn(self, prefix: list[int]) -> list[int]:
        return prefix + self._tokens(self._arguments.unique)

    async def rounds(self, prefixes: Sequence[list[int]], count: int) -> list[RunRecord]:
        """A turn of every conversation in each round, `--at-once` of them at a time."""
        found = []
        for _ in range(count):
            turns = [
                ScheduledRequest(prompt=self._turn(prefix), max_tokens=self._arguments.output)
                for prefix in prefixes
            ]
            at_once = self._arguments.at_once
            found.append(await run_offline(self._engine, turns, max_concurrency=at_once))
        return found

    def traffic(self) -> HostTraffic:
        host = self._engine.stats().host
        return HostTraffic() if host is None else host.traffic

    async def streams(self, inside: Sequence[list[int]]) -> dict[str, Phase]:
        """The ITL of running streams beside turns of several kinds."""
        outside = [prefix for prefix in self.prefixes if prefix not in inside]
        found = {"alone": await self._streams_beside([])}
        await self.rounds(inside, 1)
        found["beside hits"] = await self._streams_beside(inside)
        found["beside loads"] = await self._streams_beside([*outside, *inside])
        await self.rounds(self.fresh(len(self.prefixes[::SHARE])), 1)
        found["beside loads and offloads"] = await self._streams_beside([*outside, *inside])
        return found

    async def _streams_beside(self, prefixes: Sequence[list[int]]) -> Phase:
        """One round of `--at-once` streams, while turns of one token come at a fixed rate."""
        in_turns = cycle(prefixes)

        def streams() -> list[Request]:
            return [
                self._make(self._tokens(STREAM_INPUT), self._arguments.stream_tokens)
                for _ in range(self._arguments.at_once)
            ]

        def turn() -> Request:
            return self._make(self._turn(next(in_turns)), 1)

        phase = Phase()
        work = Work(streams, turn if prefixes else None, TURNS_A_SECOND)
        await measure_round(phase, work, MAX_ROUND_S)
        return phase


def pages_for(arguments: argparse.Namespace, page_size: int) -> int:
    """Pages for one in SHARE conversations."""
    tokens = arguments.prefix + arguments.unique + arguments.output
    return 1 + -(-tokens // page_size) * -(-arguments.conversations // SHARE)


async def measure_engine(
    console: Console, arguments: argparse.Namespace, host_cache: float
) -> Measured:
    page_size = arguments.page_size or 16
    config = engine_config(
        arguments,
        host_cache=host_cache,
        page_size=page_size,
        num_pages=arguments.num_pages or pages_for(arguments, page_size),
    )
    async with bench_engine(console, config) as engine:
        work = Conversations(engine, arguments)
        freeze_memory()
        # Without a host cache all rounds are alike. These conversations come last in the next one,
        # when they have been evicted.
        await work.rounds(work.prefixes if host_cache else work.prefixes[-arguments.at_once :], 1)
        filled = work.traffic()
        outside = await work.rounds(work.prefixes, ROUNDS if host_cache else 1)
        loaded = work.traffic().since(filled)
        inside = work.prefixes[: max(1, int(len(work.prefixes) / SHARE * (1 - SPARE)))]
        await work.rounds(inside, 1)
        kept = await work.rounds(inside, 3 * ROUNDS)
        few = inside[: max(1, len(inside) // 2)]
        return Measured(
            outside=figures_of(outside),
            best_inside=figures_of([min(kept, key=lambda run: run.elapsed_s)]),
            offloads=filled.offloads,
            loads=loaded.loads,
            streams=await work.streams(few) if host_cache else {},
        )


def report(console: Console, without: Measured, with_host: Measured) -> None:
    table = Table("host cache")
    for heading in ("tok/s", "cached", "from host", "TTFT p50 ms", "inside tok/s"):
        table.add_column(heading, justify="right")
    for name, measured in (("none", without), ("host", with_host)):
        table.add_row(
            name,
            f"{measured.outside.total_tokens_per_s:,.0f}",
            f"{measured.outside.cache_hit_rate:.1%}",
            f"{measured.outside.host_hit_rate:.1%}",
            f"{measured.outside.ttft_s.p50 * 1e3:,.1f}",
            f"{measured.best_inside.total_tokens_per_s:,.0f}",
        )
    console.print(table)
    rate, inside = (
        getattr(with_host, name).total_tokens_per_s / getattr(without, name).total_tokens_per_s
        for name in ("outside", "best_inside")
    )
    ttft = with_host.outside.ttft_s.p50 / without.outside.ttft_s.p50
    console.print(
        f"with the host cache {rate:.2f} times the throughput and {ttft:.2f} of the TTFT; with all "
        f"prefixes on the device {inside:.3f} times"
    )
    for name in ("offloads", "loads"):
        traffic: Traffic = getattr(with_host, name)
        rate = traffic.num_bytes / traffic.seconds / 1e9 if traffic.seconds else 0.0
        console.print(f"{name}: {rate:,.1f} GB/s")
    table = Table("ITL of streams, ms")
    for heading in ("p50", "p99", "p99 / alone", "p99 / beside hits"):
        table.add_column(heading, justify="right")
    alone, hits = (with_host.streams[name].itl_s(99) for name in ("alone", "beside hits"))
    for name, phase in with_host.streams.items():
        p50, p99 = phase.itl_s(50), phase.itl_s(99)
        cells = (f"{p50 * 1e3:,.2f}", f"{p99 * 1e3:,.2f}", f"{p99 / alone:.2f}")
        table.add_row(name, *cells, f"{p99 / hits:.2f}")
    console.print(table)


async def measure(arguments: argparse.Namespace) -> None:
    console, found = make_console(), []
    console.print(
        f"{arguments.conversations} conversations in turns, {arguments.at_once} at once, prefixes "
        f"of {arguments.prefix}, {arguments.unique} new tokens in, {arguments.output} out"
    )
    for host_cache in (0.0, arguments.host_cache):
        found.append(await measure_engine(console, arguments, host_cache))
        gc.unfreeze()
        gc.collect()  # the memory of this engine, for the next one
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    report(console, *found)


def main() -> int:
    parser, number = make_parser(__doc__), above_zero(int)
    parser.add_argument("--conversations", type=number, default=48)
    parser.add_argument("--prefix", type=number, default=8192, help="tokens of each conversation")
    parser.add_argument("--unique", type=number, default=64, help="prompt tokens of a turn")
    parser.add_argument("--output", type=number, default=64, help="and its output")
    parser.add_argument("--at-once", type=number, default=12, help="turns, and streams, at once")
    parser.add_argument("--stream-tokens", type=number, default=400, help="output of a stream")
    arguments = parser.parse_args()
    if not arguments.host_cache:
        parser.error("give --host-cache, in GB")
    return run_script(measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
