"""Shows which kernels the time of a decode step on a GPU goes to:

python scripts/bench/profile_decode.py FOLDER --batch 1


Requests of --input prompt tokens decode together while torch.profiler watches --steps of their
steps. The table adds up the kernels of each kind. Launches may overlap, so *busy* is the time in
which any kernel ran, and *gaps* is what is left of the step: launches and, where the host falls
behind, waiting for it. FOLDER needs no more than a config.json (see scripts/tools/dummy_config.py).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script
from torch.profiler import ProfilerActivity, profile

from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import describe, freeze_memory, start_bench_engine
from minisgl.bench.workload.requests import ScheduledRequest, random_tokens
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError

# What a kernel's name says about its kind; the first that fits.
KINDS = {
    "attention": (
        "_decode_kernel",
        "_merge",
        "prefill",
        "attention",
        "xqa",
        "flash",
        "BatchDecode",
    ),
    "between ranks": ("_sum_row", "_sum_in_two", "_maximum_of_row", "_gather_row", "nccl"),
    "sampling": ("_draw", "_settle", "_edit", "_record", "sampl"),
    "norm": ("norm",),
    "heads": ("_turn_and_store",),
    "activation": ("_gated_mul",),
    "slots": ("_read_slot", "_feed", "_send", "_embed"),
    "matrix products": (
        "gemm",
        "gemv",
        "nvjet",
        "cutlass",
        "splitk",
        "_stream",
        "_burst",
        "_linear",
    ),
}
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The times of one step, in microseconds."""

    by_kind: dict[str, float]
    by_name: dict[str, float]  # of kernels
    launches: dict[str, float]
    busy: float
    step: float


def kind_of(name: str) -> str:
    lower = name.lower()
    for kind, parts in KINDS.items():
        if any(part.lower() in lower for part in parts):
            return kind
    return OTHERS


def break_down(kernels: Sequence[tuple[str, float, float]], num_steps: float) -> Breakdown:
    """kernels: name, start and end in microseconds, of `num_steps` steps."""
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    launches: dict[str, float] = defaultdict(float)
    busy, reached = 0.0, float("-inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        # Under overlapping launches a kernel waits inside for the one before it: what counts is
        # how far it brings the end of the work.
        gained = max(0.0, end - max(start, reached))
        by_kind[kind_of(name)] += gained / num_steps
        by_name[name] += gained / num_steps
        launches[kind_of(name)] += 1 / num_steps
        busy, reached = busy + gained, max(reached, end)
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    return Breakdown(
        dict(by_kind), dict(by_name), dict(launches), busy / num_steps, span / num_steps
    )


async def record(
    engine: AsyncEngine, arguments: argparse.Namespace
) -> tuple[Breakdown, list[tuple[str, float, float]]]:
    rng = random.Random(0)
    # Enough tokens to reach steady decode, to be watched, and to be still there at the end.
    num_tokens = 3 * arguments.steps + 64
    streams = []
    for index in range(arguments.batch):
        prompt = random_tokens(rng, arguments.input, engine.model.vocab_size)
        job = ScheduledRequest(prompt=prompt, max_tokens=num_tokens, seed=index)
        streams.append(engine.submit(prompt, job.params(arguments.temperature)))
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
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in watched.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not kernels:
        raise ConfigError("--device", engine.config.device, "the profiler saw no kernel")
    return break_down(kernels, num_steps), kernels


async def run(arguments: argparse.Namespace) -> None:
    console = make_console()
    async with await start_bench_engine(console, engine_config(arguments)) as engine:
        for line in describe(engine):
            console.print(line)
        freeze_memory()
        await record(engine, arguments)  # a first time, for what is compiled or loaded late
        result, kernels = await record(engine, arguments)
    table = Table("kind", "launches a step", "µs a step", "share")
    for kind, us in sorted(result.by_kind.items(), key=lambda entry: -entry[1]):
        table.add_row(kind, f"{result.launches[kind]:.0f}", f"{us:.1f}", f"{us / result.step:.1%}")
    gaps = result.step - result.busy
    table.add_row("gaps", "", f"{gaps:.1f}", f"{gaps / result.step:.1%}")
    table.add_row("step", "", f"{result.step:.1f}", "")
    console.print(table)
    if arguments.names:
        times: dict[str, list[float]] = defaultdict(list)
        for name, start, end in kernels:
            times[name].append(end - start)
        for name, us in sorted(result.by_name.items(), key=lambda entry: -entry[1])[:40]:
            took = times[name]
            mean = sum(took) / len(took)
            console.print(
                f"{us:8.1f} µs a step: {len(took):6} x {mean:8.2f} µs  {kind_of(name):16} "
                f"{name[:90]}"
            )


def main() -> int:
    parser = make_parser(__doc__, cache_type="naive")
    parser.add_argument(
        "--batch", type=above_zero(int), default=1, help="requests that decode together"
    )
    parser.add_argument("--input", type=above_zero(int), default=512, help="prompt tokens of each")
    parser.add_argument("--steps", type=above_zero(int), default=50, help="steps to watch")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--names", action="store_true", help="list the kernels by name too")
    return run_script(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
