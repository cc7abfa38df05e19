"""Measures how much arriving prompts delay running answers.

    python scripts/bench/bench_mixed.py FOLDER

32 streams decode steadily. The time between two tokens of a stream (ITL) is measured without and
with requests that arrive meanwhile, 20 a second, with prompts of 100 to 500 tokens and 32 tokens
out. The streams run in rounds of limited length, so that their contexts are alike in both cases; a
round counts from the moment when all of them decode. FOLDER needs no more than a config.json (see
scripts/tools/dummy_config.py).

With --prefixes, the prompts that arrive follow as many prefixes, taken in turns, each computed once
before. With --host-cache and few --num-pages their keys and values are loaded from host memory.

    python scripts/bench/bench_mixed.py --streams 64 --steady-output 16384 --rate 0.25 \\
        --input 32768 32768 --served="--model FOLDER --replicas 2 --roles prefill,decode"

measures a server over HTTP instead, or several, one for each --served.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np
from bench_settings import serving
from rich.console import Console
from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.offline_run import gaps
from minisgl.bench.online.target import Endpoint
from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import bench_engine
from minisgl.bench.workload.requests import ScheduledRequest, random_tokens
from minisgl.client.errors import refused
from minisgl.client.exchange import open_stream
from minisgl.client.models import headers_of
from minisgl.engine import AsyncEngine
from minisgl.errors import MinisglError
from minisgl.interpreter import favour_steps

WARM_UP_S = 3.0
TIMEOUT_S = 600.0  # of a request to a server
SERVED_VOCABULARY = 2000  # whose token ids every model has

# Sends one request and appends the time of each token. Cancelling it ends the request.
Request = Callable[[list[float]], Coroutine[Any, Any, None]]
MakeRequest = Callable[[list[int], int], Request]  # of a prompt and the number of output tokens


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of a round: makes its steady streams, and one of those that arrive."""

    streams: Callable[[], list[Request]]
    arrivals: Callable[[], Request] | None
    rate: float  # of arrivals, a second


@dataclass(slots=True)
class Phase:
    """What was measured in one round or several."""

    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between tokens of the steady streams
    ttfts_s: list[float] = field(default_factory=list)  # of the requests that arrived
    num_arrived: int = 0

    def itl_s(self, percent: float) -> float:
        return float(np.percentile(self.gaps_s, percent))


async def measure_phase(work: Work, seconds: float) -> Phase:
    """Rounds that count for `seconds` together, or for longer until a stream got two tokens."""
    phase = Phase()
    while (left := seconds - phase.seconds) > 0 or not phase.gaps_s:
        await measure_round(phase, work, left if left > 0 else seconds)
    return phase


async def measure_round(phase: Phase, work: Work, seconds: float) -> None:
    """From the moment when all streams decode until the first of them ends, `seconds` at most."""
    # Made before anything is timed, because long prompts take long to draw.
    streams, count = work.streams(), math.ceil(seconds * work.rate)
    waiting = [work.arrivals() for _ in range(count)] if work.arrivals else []
    steady: list[list[float]] = [[] for _ in streams]
    arrived: list[tuple[float, list[float], asyncio.Task[None]]] = []

    async def arrive() -> None:
        began = time.perf_counter()
        for index, request in enumerate(waiting):
            await asyncio.sleep(max(0.0, began + index / work.rate - time.perf_counter()))
            times: list[float] = []
            arrived.append((time.perf_counter(), times, asyncio.ensure_future(request(times))))

    running = [
        asyncio.ensure_future(stream(times)) for stream, times in zip(streams, steady, strict=True)
    ]
    arriving: asyncio.Task[None] | None = None
    try:
        while not all(steady):
            await asyncio.sleep(0.01)
            _raise_error_of(running)
        arriving = asyncio.ensure_future(arrive())
        began = time.perf_counter()
        await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        ended = time.perf_counter()
        _raise_error_of([*running, arriving, *(asking for _, _, asking in arrived)])
    finally:
        rest = [*running, *([arriving] if arriving else []), *(asking for _, _, asking in arrived)]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
    for times in steady:
        phase.gaps_s += gaps(times, began, ended)
    phase.seconds += ended - began
    phase.num_arrived += len(arrived)
    phase.ttfts_s += [times[0] - sent for sent, times, _ in arrived if times and times[0] <= ended]


def _raise_error_of(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def requests_of_engine(engine: AsyncEngine) -> MakeRequest:
    def make(prompt: list[int], num_output: int) -> Request:
        params = ScheduledRequest(prompt=prompt, max_tokens=num_output).params()

        async def request(times: list[float]) -> None:
            stream = engine.submit(prompt, params)
            try:
                async for delta in stream:
                    if delta.token_ids:
                        times.append(time.perf_counter())
            finally:
                stream.abort()

        return request

    return make


def requests_of_server(url: str) -> MakeRequest:
    target = Endpoint(url=f"{url}/v1")

    def make(prompt: list[int], num_output: int) -> Request:
        body = target.body(ScheduledRequest(prompt=prompt, max_tokens=num_output))

        async def request(times: list[float]) -> None:
            place, headers = target.url + target.path, headers_of("")
            async with open_stream("POST", place, headers, body, timeout_s=TIMEOUT_S) as stream:
                if stream.head.status != 200:
                    raise refused(place, stream.head.status, await stream.whole(), "")
                async for data in stream.data():
                    if b'"error"' in data:
                        raise MinisglError(data.decode())
                    times.append(time.perf_counter())

        return request

    return make


async def measure(
    console: Console, make: MakeRequest, vocab_size: int, arguments: argparse.Namespace
) -> None:
    rng = random.Random(arguments.seed)
    low, high = arguments.input
    prefixes = [
        random_tokens(rng, arguments.prefix_len, vocab_size) for _ in range(arguments.prefixes)
    ]
    in_turns = cycle(prefixes or [[]])

    def streams() -> list[Request]:
        num_input, count = arguments.steady_input, arguments.streams
        prompts = [random_tokens(rng, num_input, vocab_size) for _ in range(count)]
        return [make(prompt, arguments.steady_output) for prompt in prompts]

    def arriving() -> Request:
        own = random_tokens(rng, rng.randint(low, high), vocab_size)

        async def request(times: list[float]) -> None:
            # When it is sent: of those that a round has made, the last may not be.
            await make(next(in_turns) + own, arguments.output)(times)

        return request

    console.print(
        f"{arguments.streams} steady streams, {arguments.steady_input} tokens in and up to "
        f"{arguments.steady_output} out; {arguments.rate:g} requests a second arrive evenly, {low} "
        f"to {high} tokens in, {arguments.output} out; greedy, EOS ignored, seed {arguments.seed}"
    )
    mixed = Work(streams, arriving, arguments.rate)
    for prefix in prefixes:
        await make(prefix, 1)([])
    favour_steps()
    await measure_phase(mixed, min(arguments.seconds, max(WARM_UP_S, 1.5 / arguments.rate)))
    without = await measure_phase(replace(mixed, arrivals=None), arguments.seconds)
    without_ms = without.itl_s(99) * 1e3
    phases = {"without": without, "with": await measure_phase(mixed, arguments.seconds)}
    table = Table("arrivals")
    columns = ("p50 ms", "p99 ms", "p99 / without", "p99.9 ms", "longest ms", "tok/s")
    for heading in (*columns, "arrived", "their TTFT p50 ms"):
        table.add_column(heading, justify="right")
    for name, phase in phases.items():
        p50, p99, p999, longest = (phase.itl_s(percent) * 1e3 for percent in (50, 99, 99.9, 100))
        ttft_s = statistics.median(phase.ttfts_s) if phase.ttfts_s else None
        table.add_row(
            name,
            *(f"{value:,.2f}" for value in (p50, p99, p99 / without_ms, p999, longest)),
            *(f"{value:,.0f}" for value in (len(phase.gaps_s) / phase.seconds, phase.num_arrived)),
            "-" if ttft_s is None else f"{ttft_s * 1e3:,.1f}",
        )
    console.print(table)


async def measure_engine(arguments: argparse.Namespace) -> None:
    console = make_console()
    async with bench_engine(console, engine_config(arguments)) as engine:
        await measure(console, requests_of_engine(engine), engine.model.vocab_size, arguments)


async def measure_servers(arguments: argparse.Namespace) -> None:
    console = make_console()
    for options in arguments.served:
        console.print(f"served with {options}")
        with serving(shlex.split(options)) as url:
            await measure(console, requests_of_server(url), SERVED_VOCABULARY, arguments)


def main() -> int:
    parser = make_parser(__doc__)
    number, positive = above_zero(int), above_zero(float)
    parser.add_argument("--streams", type=number, default=32)
    parser.add_argument("--steady-input", type=number, default=512, help="their prompt tokens")
    parser.add_argument("--steady-output", type=number, default=1024, help="until a new round")
    parser.add_argument("--rate", type=positive, default=20.0, help="arrivals a second")
    parser.add_argument(
        "--input", type=number, nargs=2, default=[100, 500], metavar=("LOW", "HIGH"),
        help="prompt tokens of an arriving request",
    )  # fmt: skip
    parser.add_argument("--output", type=number, default=32, help="and its output")
    parser.add_argument("--prefixes", type=int, default=0, help="that arriving prompts follow")
    parser.add_argument("--prefix-len", type=number, default=8192, help="tokens of each prefix")
    parser.add_argument("--seconds", type=positive, default=10.0, help="of each of the two phases")
    parser.add_argument("--seed", type=int, default=0, help="of prompts")
    parser.add_argument(
        "--served", action="append", metavar="OPTIONS", help="measure `minisgl serve` with these"
    )
    arguments = parser.parse_args()
    if arguments.input[0] > arguments.input[1]:
        parser.error("argument --input: LOW is above HIGH")
    if arguments.steady_output < 2:
        parser.error("argument --steady-output: allowed: 2 or more")
    return run_script(measure_servers(arguments) if arguments.served else measure_engine(arguments))


if __name__ == "__main__":
    sys.exit(main())
