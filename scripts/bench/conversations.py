"""Conversations that come back in turns: the workload of bench_shared_prefix.py --conversations.

Each has a long prefix of its own; a turn is its prefix, some new tokens and an answer. With a cache
for a third of them, a prefix has always just been evicted when its turn comes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from script_runner import engine_config

from minisgl.bench.figures import Distribution
from minisgl.bench.offline_run import gaps, token_times
from minisgl.bench.run_info import describe, freeze_memory, start_bench_engine
from minisgl.bench.workload.requests import ScheduledRequest, random_tokens
from minisgl.engine import AsyncEngine
from minisgl.kvcache.copies import HostTraffic
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler
from minisgl.tiers.host.host_copies import PIECE_BYTES

SHARE = 3  # the device has room for one in so many conversations
ROUNDS = 2  # measured, after one that warms up
SPARE = 0.25  # of the device's room, that the working set inside of it leaves
STREAM_TOKENS = 400
TURN_EVERY_S = 0.05  # beside running streams


@dataclass(frozen=True, slots=True)
class Turn:
    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_host_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """Some rounds of turns, each with its own time."""

    turns: list[Turn]
    seconds: list[float]  # of each round
    traffic: HostTraffic

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output."""
        num_tokens = sum(turn.num_prompt_tokens + turn.num_output_tokens for turn in self.turns)
        return num_tokens / sum(self.seconds)

    @property
    def best_tokens_per_s(self) -> float:
        """Of the fastest round."""
        num_tokens = sum(turn.num_prompt_tokens + turn.num_output_tokens for turn in self.turns)
        return num_tokens / len(self.seconds) / min(self.seconds)


@dataclass(frozen=True, slots=True)
class Itl:
    """Seconds between tokens of running streams."""

    alone: Distribution
    beside_hits: Distribution  # while turns come whose prefixes are on the device
    beside_loads: Distribution  # while turns come whose prefixes are in host memory
    # The same while the device is full of prefixes that have no copies.
    beside_both: Distribution
    traffic: HostTraffic  # meanwhile
    most_offloaded: int  # pages, by a plan


@dataclass(frozen=True, slots=True)
class Measured:
    # The first round, in which prefixes are computed, and most are offloaded; without a host cache
    # of a few conversations.
    filling: Rounds
    outside: Rounds  # all conversations
    inside: Rounds  # as many as the device has room for
    itl: Itl | None  # with a host cache


class Conversations:
    def __init__(self, engine: AsyncEngine, arguments: argparse.Namespace) -> None:
        self._engine = engine
        self._arguments = arguments
        self._rng = random.Random(0)
        self.prefixes = [self._tokens(arguments.prefix) for _ in range(arguments.conversations)]

    def _tokens(self, count: int) -> list[int]:
        return random_tokens(self._rng, count, self._engine.model.vocab_size)

    async def turn(self, prefix: list[int], num_output: int) -> Turn:
        prompt = prefix + self._tokens(self._arguments.unique)
        params = ScheduledRequest(prompt=prompt, max_tokens=num_output).params()
        began = time.perf_counter()
        stream = self._engine.submit(prompt, params)
        times = await token_times(stream)
        request = stream.request
        return Turn(
            ttft_s=times[0] - began,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_host_tokens=request.num_host_tokens,
            num_output_tokens=request.num_output_tokens,
        )

    async def rounds(self, prefixes: Sequence[list[int]], count: int) -> Rounds:
        """Every conversation once a round, in order, `--at-once` of them at a time."""
        before, seconds, turns = self._traffic(), list[float](), list[Turn]()
        places = asyncio.Semaphore(self._arguments.at_once)

        async def one(prefix: list[int]) -> None:
            async with places:
                turns.append(await self.turn(prefix, self._arguments.output))

        for _ in range(count):
            began = time.perf_counter()
            await asyncio.gather(*map(one, prefixes))
            seconds.append(time.perf_counter() - began)
        return Rounds(turns, seconds, self._traffic().since(before))

    def _traffic(self) -> HostTraffic:
        host = self._engine.stats().host
        return HostTraffic() if host is None else host.traffic

    async def itl(self, inside: Sequence[list[int]]) -> Itl:
        outside = [prefix for prefix in self.prefixes if prefix not in inside]
        alone = await self._itl_beside([])
        await self.rounds(inside, 1)
        beside_hits = await self._itl_beside(inside)
        beside_loads = await self._itl_beside([*outside, *inside])
        fresh = [self._tokens(self._arguments.prefix) for _ in self.prefixes[::SHARE]]
        await self.rounds(fresh, 1)
        before = self._traffic()
        with offloads_per_plan() as sizes:
            beside_both = await self._itl_beside([*outside, *inside])
        traffic = self._traffic().since(before)
        return Itl(alone, beside_hits, beside_loads, beside_both, traffic, max(sizes, default=0))

    async def _itl_beside(self, prefixes: Sequence[list[int]]) -> Distribution:
        """ITL of `--at-once` streams, while turns of one token come at a fixed rate."""
        jobs = [
            ScheduledRequest(prompt=self._tokens(64), max_tokens=self._arguments.stream_tokens)
            for _ in range(self._arguments.at_once)
        ]
        streams = [self._engine.submit(job.prompt, job.params()) for job in jobs]
        ended = asyncio.gather(*map(token_times, streams))
        turns: list[asyncio.Task[Turn]] = []
        while prefixes and not ended.done():
            prefix = prefixes[len(turns) % len(prefixes)]
            turns.append(asyncio.create_task(self.turn(prefix, 1)))
            await asyncio.wait([ended], timeout=TURN_EVERY_S)
        times = await ended
        await asyncio.gather(*turns)
        return Distribution.of(
            [gap for stream in times for gap in gaps(stream, stream[1], stream[-1])]
        )


@contextlib.contextmanager
def offloads_per_plan() -> Iterator[list[int]]:
    """Collect how many pages each plan with decode rows offloads."""
    sizes: list[int] = []
    plan = Scheduler.plan

    def planned(scheduler: Scheduler) -> StepPlan | None:
        found = plan(scheduler)
        if found is not None and found.decode_slots and found.copies is not None:
            sizes.append(len(found.copies.offloads))
        return found

    with mock.patch.object(Scheduler, "plan", planned):
        yield sizes


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
    async with await start_bench_engine(console, config) as engine:
        for line in describe(engine):
            console.print(line)
        work = Conversations(engine, arguments)
        freeze_memory()
        # Without a host cache all rounds are alike. These conversations come last in the next one,
        # when they have been evicted.
        first = work.prefixes if host_cache else work.prefixes[-arguments.at_once :]
        filling = await work.rounds(first, 1)
        outside = await work.rounds(work.prefixes, ROUNDS if host_cache else 1)
        console.print(f"{host_cache:g} GB of host memory: {outside.tokens_per_s:,.0f} tok/s")
        room = len(work.prefixes) / SHARE * (1 - SPARE)
        inside = work.prefixes[: max(1, int(room))]
        await work.rounds(inside, 1)
        kept = await work.rounds(inside, 3 * ROUNDS)
        console.print(f"with all prefixes on the device {kept.best_tokens_per_s:,.0f} tok/s")
        itl = await work.itl(inside[: max(1, len(inside) // 2)]) if host_cache else None
        return Measured(filling, outside, kept, itl)


def plain_bandwidth(device: torch.device) -> tuple[float, float]:
    """Bytes per second of plain copies of pinned memory, from the device and to it."""
    host = torch.empty(PIECE_BYTES * 8, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    found: list[float] = []
    for target, source in ((host, there), (there, host)):
        best = 0.0
        for _ in range(5):
            _synchronize(device)
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            _synchronize(device)
            best = max(best, host.nbytes / (time.perf_counter() - began))
        found.append(best)
    return found[0], found[1]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def print_conversations(
    console: Console,
    plain: tuple[float, float],
    without: Measured,
    with_host: Measured,
) -> None:
    both = {"none": without, "host": with_host}
    table = Table("host cache")
    for heading in ("tok/s", "cached", "from host", "TTFT p50 ms", "TTFT p99 ms", "inside tok/s"):
        table.add_column(heading, justify="right")
    for name, measured in both.items():
        turns = measured.outside.turns
        num_prompt = sum(turn.num_prompt_tokens for turn in turns)
        ttft = Distribution.of([turn.ttft_s for turn in turns])
        table.add_row(
            name,
            f"{measured.outside.tokens_per_s:,.0f}",
            f"{sum(turn.num_cached_tokens for turn in turns) / num_prompt:.1%}",
            f"{sum(turn.num_host_tokens for turn in turns) / num_prompt:.1%}",
            f"{ttft.p50 * 1e3:,.1f}",
            f"{ttft.p99 * 1e3:,.1f}",
            f"{measured.inside.best_tokens_per_s:,.0f}",
        )
    console.print(table)
    ttfts = [
        Distribution.of([turn.ttft_s for turn in measured.outside.turns]).p50
        for measured in both.values()
    ]
    console.print(
        f"with the host cache {with_host.outside.tokens_per_s / without.outside.tokens_per_s:.2f} "
        f"times the throughput and {ttfts[1] / ttfts[0]:.2f} of the TTFT; with all prefixes on the "
        "device "
        f"{with_host.inside.best_tokens_per_s / without.inside.best_tokens_per_s:.3f} times"
    )
    itl = with_host.itl
    assert itl is not None
    copies = Table("copies")
    for heading in ("MB", "GB/s", "plain GB/s", "share"):
        copies.add_column(heading, justify="right")
    down, up = plain
    for name, traffic, limit in (
        ("offloads of the first round", with_host.filling.traffic.offloads, down),
        ("loads", with_host.outside.traffic.loads, up),
        ("loads beside streams", itl.traffic.loads, up),
        ("offloads beside streams", itl.traffic.offloads, down),
    ):
        rate = traffic.num_bytes / traffic.seconds if traffic.seconds else 0.0
        copies.add_row(
            name,
            f"{traffic.num_bytes / 1e6:,.2f}",
            f"{rate / 1e9:,.1f}",
            f"{limit / 1e9:,.1f}",
            f"{rate / limit:.1%}",
        )
    console.print(copies)
    offloads = itl.traffic.offloads
    page_mb = offloads.num_bytes / max(1, offloads.num_pages) / 1e6
    console.print(
        f"beside streams a plan offloaded at most {itl.most_offloaded:,} pages, "
        f"{itl.most_offloaded * page_mb:,.2f} MB"
    )
    streams = Table("ITL of streams, ms")
    for heading in ("p50", "p99", "p99 / alone", "p99 / beside hits"):
        streams.add_column(heading, justify="right")
    for name, found in (
        ("alone", itl.alone),
        ("beside hits", itl.beside_hits),
        ("beside loads", itl.beside_loads),
        ("beside loads and offloads", itl.beside_both),
    ):
        streams.add_row(
            name,
            f"{found.p50 * 1e3:,.2f}",
            f"{found.p99 * 1e3:,.2f}",
            f"{found.p99 / itl.alone.p99:.2f}",
            f"{found.p99 / itl.beside_hits.p99:.2f}",
        )
    console.print(streams)
