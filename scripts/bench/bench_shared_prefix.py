"""Measures the gain of the prefix cache: `python scripts/bench/bench_shared_prefix.py FOLDER`.

256 requests at once that begin with the same 2,000 tokens, as after one long system prompt, and go
on with 100 of their own, for 64 tokens each. Measured with the radix cache and with none ("naive"),
each on its own engine with an empty cache; a warm-up with other, short prompts has
compiled the kernels. FOLDER needs no more than a config.json (see scripts/tools/dummy_config.py).
"""

from __future__ import annotations

import argparse
import gc
import random
import sys

import torch
from rich.console import Console
from rich.table import Table

from minisgl.bench.config import Sizes, Span
from minisgl.bench.offline_run import run_offline
from minisgl.bench.report.figures import Figures
from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import describe, freeze_memory, start_bench_engine
from minisgl.bench.script import above_zero, engine_config, make_parser, run_script
from minisgl.bench.workload.requests import (
    OfflineRequest,
    make_offline_request,
    make_workload,
    random_tokens,
)

CACHES = ("radix", "naive")
TEMPERATURE = 0.6
WARM_UP_PROMPT, WARM_UP_OUTPUT, WARM_UP_SEED = Span(50, 100), Span(8, 8), 1


def make_jobs(arguments: argparse.Namespace, vocab_size: int) -> list[OfflineRequest]:
    rng = random.Random(0)
    prefix = random_tokens(rng, arguments.prefix, vocab_size)
    return [
        make_offline_request(
            prefix + random_tokens(rng, arguments.unique, vocab_size),
            max_tokens=arguments.output,
            temperature=TEMPERATURE,
            seed=index,
        )
        for index in range(arguments.num)
    ]


async def measure_cache(
    console: Console, arguments: argparse.Namespace, cache_type: str
) -> Figures:
    config = engine_config(arguments, cache_type=cache_type)
    async with await start_bench_engine(console, config) as engine:
        for line in describe(engine):
            console.print(line)
        vocab_size = engine.model.vocab_size
        warm_up = make_workload(
            Sizes(arguments.num, WARM_UP_PROMPT, WARM_UP_OUTPUT),
            vocab_size=vocab_size,
            temperature=TEMPERATURE,
            seed=WARM_UP_SEED,
        )
        for _ in range(2):  # the second time it finds its prompts in the cache
            await run_offline(engine, warm_up)
        jobs = make_jobs(arguments, vocab_size)
        freeze_memory()
        return Figures.of(await run_offline(engine, jobs))


def forget_engine() -> None:
    """Free the memory of the last engine for the next one."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


async def measure(arguments: argparse.Namespace) -> None:
    console = make_console()
    console.print(
        f"{arguments.num} requests at once, {arguments.prefix} common and {arguments.unique} own "
        f"tokens in, {arguments.output} out, temperature {TEMPERATURE}, EOS ignored, cold cache"
    )
    figures = {}
    for cache_type in CACHES:
        figures[cache_type] = await measure_cache(console, arguments, cache_type)
        forget_engine()
    table = Table("cache")
    for heading in ("seconds", "output tok/s", "all tok/s", "cached", "TTFT p50 ms"):
        table.add_column(heading, justify="right")
    for cache_type, of_cache in figures.items():
        table.add_row(
            cache_type,
            f"{of_cache.elapsed_s:.3f}",
            f"{of_cache.output_tokens_per_s:,.1f}",
            f"{of_cache.total_tokens_per_s:,.1f}",
            f"{of_cache.cache_hit_rate:.1%}",
            f"{of_cache.ttft_s.p50 * 1e3:,.1f}",
        )
    console.print(table)
    radix, naive = (figures[cache_type].output_tokens_per_s for cache_type in CACHES)
    console.print(f"radix has {radix / naive:.2f} times the throughput of naive")


def main() -> int:
    parser = make_parser(__doc__, without=["cache_type"])
    number = above_zero(int)
    parser.add_argument("--num", type=number, default=256, help="requests [default: 256]")
    parser.add_argument(
        "--prefix", type=number, default=2000, help="common prompt tokens [default: 2000]"
    )
    parser.add_argument(
        "--unique", type=number, default=100, help="own prompt tokens [default: 100]"
    )
    parser.add_argument("--output", type=number, default=64, help="output tokens [default: 64]")
    return run_script(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
