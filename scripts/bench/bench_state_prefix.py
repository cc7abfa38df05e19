"""Measures the prefix cache of a model with states.

    python scripts/bench/bench_state_prefix.py FOLDER

64 requests, one after the other, begin with the same tokens and go on with tokens of their own: of
one workload 1,500 and 700, of the other 1,600 and 600, each on an engine with an empty cache.
Prints how many find at least 1,400 tokens, and the time to the first token of those and of the
others. A model with states goes on from snapshots alone, and where an engine takes them at fixed
places, a shift of the shared part loses them (vLLM's issue 45238: 0 and 52 of 64). FOLDER needs no
more than a config.json (see scripts/tools/dummy_config.py; Qwen3.5-tiny is for a CPU).

    python scripts/bench/bench_state_prefix.py FOLDER --shared 8000 --own 16 --num 8

compares the time to go on behind 8,000 tokens with that to compute them.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.offline_run import token_times
from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import describe, start_bench_engine
from minisgl.bench.workload.requests import ScheduledRequest, random_tokens
from minisgl.config import EngineConfig

LEAST_HIT = 1400
OUTPUT = 2


@dataclass(frozen=True, slots=True)
class Answered:
    num_cached: int
    ttft_s: float


async def measure(
    console: Console, config: EngineConfig, shared: int, own: int, num: int
) -> list[Answered]:
    """The requests of one workload, in their order."""
    async with await start_bench_engine(console, config) as engine:
        for line in describe(engine):
            console.print(line)
        rng, vocab_size = random.Random(0), engine.model.vocab_size
        warm_up = random_tokens(rng, shared + own, vocab_size)
        beginning = random_tokens(rng, shared, vocab_size)
        prompts = [beginning + random_tokens(rng, own, vocab_size) for _ in range(num)]
        answered: list[Answered] = []
        for prompt in (warm_up, *prompts):
            params = ScheduledRequest(prompt=prompt, max_tokens=OUTPUT).params()
            began = time.perf_counter()
            stream = engine.submit(prompt, params)
            times = await token_times(stream)
            answered.append(Answered(stream.request.num_cached_tokens, times[0] - began))
    return answered[1:]


def print_workloads(console: Console, found: dict[tuple[int, int], Sequence[Answered]]) -> None:
    table = Table()
    for heading in ("shared", "own", "hits", "tokens found", "TTFT hit ms", "TTFT miss ms"):
        table.add_column(heading, justify="right")
    for (shared, own), answered in found.items():
        least = min(shared - 100, LEAST_HIT)
        hits = [each for each in answered if each.num_cached >= least]
        misses = [each.ttft_s for each in answered if each.num_cached < least]
        table.add_row(
            f"{shared:,}",
            f"{own:,}",
            f"{len(hits)} of {len(answered)}",
            f"{median([each.num_cached for each in hits] or [0]):,.0f}",
            f"{1e3 * median([each.ttft_s for each in hits] or [0]):,.1f}",
            f"{1e3 * median(misses or [0]):,.1f}",
        )
    console.print(table)


async def measure_all(arguments: argparse.Namespace) -> None:
    console, found = make_console(), dict[tuple[int, int], Sequence[Answered]]()
    workloads = [(1500, 700), (1600, 600)]
    if arguments.shared:
        workloads = [(arguments.shared, arguments.own)]
    for shared, own in workloads:
        config = engine_config(arguments)
        found[shared, own] = await measure(console, config, shared, own, arguments.num)
        gc.collect()  # the memory of the last engine
    print_workloads(console, found)


def main() -> int:
    parser, number = make_parser(__doc__), above_zero(int)
    parser.add_argument("--num", type=number, default=64, help="requests [default: 64]")
    parser.add_argument("--shared", type=number, help="tokens that all requests begin with")
    parser.add_argument("--own", type=number, default=100, help="beside --shared [default: 100]")
    return run_script(measure_all(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
