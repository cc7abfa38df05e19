"""Measures how much arriving prompts delay running answers.

    python scripts/bench/bench_mixed.py FOLDER

32 streams decode steadily. The time between two tokens of a stream (ITL) is measured without and
with requests that arrive meanwhile, 20 a second, with prompts of 100 to 500 tokens and 32 tokens
out. The streams run in rounds of limited length, so that their contexts are alike in both cases; a
round counts from the moment when all of them decode. The last line compares the p99 with arrivals
to the median without. FOLDER needs no more than a config.json (see scripts/tools/dummy_config.py).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.figures import percentile
from minisgl.bench.offline_run import gaps, token_times
from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import describe, freeze_memory, start_bench_engine
from minisgl.bench.workload.requests import ScheduledRequest, random_tokens
from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream

MAX_WARM_UP_S = 3.0


@dataclass(slots=True)
class Measurements:
    """The measurements of all rounds."""

    seconds: float = 0.0
    num_arrived: int = 0
    gaps_s: list[float] = field(default_factory=list)  # between tokens of the steady streams

    def itl_s(self, percent: int) -> float:
        return percentile(sorted(self.gaps_s), percent)


class Mixture:
    """Steady streams and arriving requests on one engine, with fresh prompts throughout."""

    def __init__(self, engine: AsyncEngine, arguments: argparse.Namespace) -> None:
        self._engine = engine
        self._arguments = arguments
        self._rng = random.Random(arguments.seed)

    async def measure(self, seconds: float, *, with_arrivals: bool) -> Measurements:
        """Rounds that count for `seconds` together, or for longer until a stream got two tokens."""
        phase = Measurements()
        while (left := seconds - phase.seconds) > 0 or not phase.gaps_s:
            await self._round(phase, left if left > 0 else seconds, with_arrivals=with_arrivals)
        return phase

    async def _round(self, phase: Measurements, seconds: float, *, with_arrivals: bool) -> None:
        """Until the first of the steady streams ends, `seconds` at most."""
        arguments = self._arguments
        streams = [
            self._submit(arguments.steady_input, arguments.steady_output)
            for _ in range(arguments.streams)
        ]
        arrived: list[OutputStream] = []
        tasks: list[asyncio.Task[list[float]]] = []  # of the streams, and then the feeder
        try:
            await asyncio.gather(*map(anext, streams))  # the first token of each
            tasks += [asyncio.create_task(token_times(stream)) for stream in streams]
            if with_arrivals:
                tasks.append(asyncio.create_task(self._feed(arrived)))
            started = time.perf_counter()
            done, _ = await asyncio.wait(
                tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            ended = time.perf_counter()
            for task in done:
                task.result()  # raises what went wrong
        finally:
            for stream in (*streams, *arrived):
                stream.abort()
            for task in tasks[len(streams) :]:
                task.cancel()
        for times in await asyncio.gather(*tasks[: len(streams)]):
            phase.gaps_s += gaps(times, started, ended)
        phase.seconds += ended - started
        phase.num_arrived += len(arrived)

    async def _feed(self, arrived: list[OutputStream]) -> NoReturn:
        """Submit one request after the other, each when it is due, until cancelled."""
        started = time.perf_counter()
        for due in self._schedule():
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            arrived.append(
                self._submit(self._rng.randint(*self._arguments.input), self._arguments.output)
            )
        raise AssertionError("the schedule has no end")

    def _schedule(self) -> Iterator[float]:
        """Seconds after the start, without end."""
        due, rate = 0.0, self._arguments.rate
        while True:
            due += self._rng.expovariate(rate) if self._arguments.poisson else 1 / rate
            yield due

    def _submit(self, prompt_length: int, output_length: int) -> OutputStream:
        prompt = random_tokens(self._rng, prompt_length, self._engine.model.vocab_size)
        job = ScheduledRequest(prompt=prompt, max_tokens=output_length)
        return self._engine.submit(job.prompt, job.params())


async def measure(arguments: argparse.Namespace) -> None:
    console = make_console()
    async with await start_bench_engine(console, engine_config(arguments)) as engine:
        for line in describe(engine):
            console.print(line)
        low, high = arguments.input
        console.print(
            f"{arguments.streams} steady streams, {arguments.steady_input} tokens in and up to "
            f"{arguments.steady_output} out; {arguments.rate:g} requests a second arrive "
            f"{'at random (Poisson)' if arguments.poisson else 'evenly'}, {low} to {high} tokens "
            f"in, {arguments.output} out; greedy, EOS ignored, seed {arguments.seed}"
        )
        mixture = Mixture(engine, arguments)
        freeze_memory()
        await mixture.measure(min(arguments.seconds, MAX_WARM_UP_S), with_arrivals=True)
        without = await mixture.measure(arguments.seconds, with_arrivals=False)
        mixed = await mixture.measure(arguments.seconds, with_arrivals=True)
    table = Table("arrivals")
    for heading in ("p50 ms", "p99 ms", "longest ms", "ITLs", "seconds", "arrived"):
        table.add_column(heading, justify="right")
    for name, phase in (("without", without), ("with", mixed)):
        table.add_row(
            name,
            *(f"{phase.itl_s(percent) * 1e3:,.2f}" for percent in (50, 99, 100)),
            f"{len(phase.gaps_s):,}",
            f"{phase.seconds:.1f}",
            f"{phase.num_arrived:,}",
        )
    console.print(table)
    ratio = mixed.itl_s(99) / without.itl_s(50)
    console.print(f"the p99 with arrivals is {ratio:.2f} times the median without")


def main() -> int:
    parser = make_parser(__doc__)
    number = above_zero(int)
    parser.add_argument("--streams", type=number, default=32, help="[default: 32]")
    parser.add_argument(
        "--steady-input", type=number, default=512, help="prompt tokens of each [default: 512]"
    )
    parser.add_argument(
        "--steady-output",
        type=number,
        default=1024,
        help="tokens of each until a new round [default: 1024]",
    )
    parser.add_argument(
        "--rate", type=above_zero(float), default=20.0, help="arrivals a second [default: 20]"
    )
    parser.add_argument("--poisson", action="store_true", help="arrivals at random, not evenly")
    parser.add_argument(
        "--input",
        type=number,
        nargs=2,
        default=[100, 500],
        metavar=("LOW", "HIGH"),
        help="prompt tokens of an arriving request [default: 100 500]",
    )
    parser.add_argument("--output", type=number, default=32, help="and its output [default: 32]")
    parser.add_argument(
        "--seconds", type=above_zero(float), default=10.0, help="of each of the two [default: 10]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals [default: 0]")
    arguments = parser.parse_args()
    if arguments.input[0] > arguments.input[1]:
        parser.error("argument --input: LOW is above HIGH")
    if arguments.steady_output < 2:
        parser.error("argument --steady-output: allowed: 2 or more")
    return run_script(measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
