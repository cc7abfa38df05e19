"""Shows which kernels the time of a decode step on a GPU goes to:

    python scripts/bench/profile_decode.py FOLDER --batch 1

Requests of --input prompt tokens decode together while torch.profiler watches --steps of their
steps. Launches may overlap: the time of a kernel is what it adds to the end of the work before it,
and *gaps* is what is left of the step, in which no kernel ran. FOLDER needs no more than a
config.json (see scripts/tools/dummy_config.py). With --adapters the requests have so many random
ones in turn, of --lora-rank, as bench_adapters.py makes them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from bench_adapters import random_adapters
from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script
from torch.profiler import ProfilerActivity, profile

from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import bench_engine
from minisgl.bench.workload.requests import ScheduledRequest, random_tokens
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError
from minisgl.interpreter import favour_steps
from minisgl.request import Extra


class Launch(NamedTuple):
    name: str
    start_us: float
    end_us: float


def added_us(launches: Sequence[Launch]) -> dict[str, list[float]]:
    """By the name of a kernel, what each of its launches adds.

    Under overlapping launches a kernel waits inside for the one before it: what counts is how far
    it brings the end of the work.
    """
    found: dict[str, list[float]] = defaultdict(list)
    reached = float("-inf")
    for name, start, end in sorted(launches, key=lambda launch: launch.start_us):
        found[name].append(max(0.0, end - max(start, reached)))
        reached = max(reached, end)
    return found


async def record(engine: AsyncEngine, arguments: argparse.Namespace) -> tuple[list[Launch], int]:
    """The launches of some steps, and the number of these."""
    rng, names = random.Random(0), [*engine.adapters]
    # Enough tokens to reach steady decode, to be watched, and to be still there at the end.
    num_tokens = 3 * arguments.steps + 64
    streams = []
    for index in range(arguments.batch):
        prompt = random_tokens(rng, arguments.input, engine.model.vocab_size)
        job = ScheduledRequest(prompt=prompt, max_tokens=num_tokens, seed=index)
        extras: list[Extra] = [engine.adapter(names[index % len(names)])] if names else []
        streams.append(engine.submit(prompt, job.params(arguments.temperature), extras=extras))
    await asyncio.gather(*map(anext, streams))

    async def until(count: int) -> None:
        while streams[-1].request.num_output_tokens < count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    await until(32)
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        before = engine.stats().counters.num_steps
        await until(32 + arguments.steps)
        num_steps = engine.stats().counters.num_steps - before
        torch.cuda.synchronize()
    for stream in streams:
        stream.abort()
    launches = [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in watched.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not launches:
        raise ConfigError("--device", engine.config.device, "the profiler saw no kernel")
    return launches, num_steps


def table_of(launches: Sequence[Launch], num_steps: int) -> Table:
    added = added_us(launches)
    sums = {name: sum(times) / num_steps for name, times in added.items()}
    span_us = max(each.end_us for each in launches) - min(each.start_us for each in launches)
    step_us = span_us / num_steps
    table = Table("kernel", "launches a step", "µs a step", "share")
    for name, us in sorted(sums.items(), key=lambda entry: -entry[1]):
        count = f"{len(added[name]) / num_steps:.1f}"
        table.add_row(name[:70], count, f"{us:.1f}", f"{us / step_us:.1%}")
    gaps_us = step_us - sum(sums.values())
    table.add_row("gaps", "", f"{gaps_us:.1f}", f"{gaps_us / step_us:.1%}")
    table.add_row("step", "", f"{step_us:.1f}", "")
    return table


async def run(arguments: argparse.Namespace) -> None:
    console, made = make_console(), (arguments.model, arguments.adapters, arguments.lora_rank)
    with random_adapters(*made) as options:
        async with bench_engine(console, engine_config(arguments, **options)) as engine:
            favour_steps()
            await record(engine, arguments)  # a first time, for what is compiled or loaded late
            console.print(table_of(*await record(engine, arguments)))


def main() -> int:
    parser = make_parser(__doc__, cache_type="naive")
    number = above_zero(int)
    parser.add_argument("--batch", type=number, default=1, help="requests that decode together")
    parser.add_argument("--input", type=number, default=512, help="prompt tokens of each")
    parser.add_argument("--steps", type=number, default=50, help="steps to watch")
    parser.add_argument("--adapters", type=int, default=0, help="that the requests have in turn")
    parser.add_argument("--lora-rank", type=number, default=16, help="of each")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    return run_script(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
