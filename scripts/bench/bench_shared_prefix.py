"""Measures the gain of the prefix cache: `python scripts/bench/bench_shared_prefix.py FOLDER`.

256 requests at once that begin with the same 2,000 tokens, as after one long system prompt, and go
on with 100 of their own, for 64 tokens each. Measured with the radix cache and with none ("naive"),
each on its own engine with an empty cache; a warm-up with other, short prompts has
compiled the kernels. FOLDER needs no more than a config.json (see scripts/tools/dummy_config.py).

    python scripts/bench/bench_shared_prefix.py FOLDER --conversations 48 --host-cache 100

measures the gain of a host cache instead: conversations with prefixes of 8,192 tokens come back in
turns, 64 tokens in and 64 out, to a KV cache with room for a third of them; without the host cache
and with it. It also compares the copies with plain ones of pinned memory, shows what they cost
running streams (alone, beside turns whose prefixes are on the device, beside loads, and beside
loads that displace what has no copy), and what the host cache costs where all prefixes stay on the
device.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys

import torch
from conversations import STREAM_TOKENS, measure_engine, plain_bandwidth, print_conversations
from rich.console import Console
from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.config import Sizes, Span
from minisgl.bench.figures import Figures
from minisgl.bench.offline_run import run_offline
from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import describe, freeze_memory, start_bench_engine
from minisgl.bench.workload.requests import ScheduledRequest, make_workload, random_tokens

CACHES = ("radix", "naive")
TEMPERATURE = 0.6
WARM_UP_PROMPT, WARM_UP_OUTPUT, WARM_UP_SEED = Span(50, 100), Span(8, 8), 1


def make_jobs(arguments: argparse.Namespace, vocab_size: int) -> list[ScheduledRequest]:
    rng = random.Random(0)
    prefix = random_tokens(rng, arguments.prefix, vocab_size)
    return [
        ScheduledRequest(
            prompt=prefix + random_tokens(rng, arguments.unique, vocab_size),
            max_tokens=arguments.output,
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
            seed=WARM_UP_SEED,
        )
        for _ in range(2):  # the second time it finds its prompts in the cache
            await run_offline(engine, warm_up, TEMPERATURE)
        jobs = make_jobs(arguments, vocab_size)
        freeze_memory()
        return Figures.of(await run_offline(engine, jobs, TEMPERATURE))


def forget_engine() -> None:
    """Free the memory of the last engine for the next one."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


async def measure_conversations(arguments: argparse.Namespace) -> None:
    console = make_console()
    console.print(
        f"{arguments.conversations} conversations in turns, {arguments.at_once} at once, prefixes "
        f"of {arguments.prefix}, {arguments.unique} new tokens in, {arguments.output} out"
    )
    without = await measure_engine(console, arguments, 0.0)
    forget_engine()
    with_host = await measure_engine(console, arguments, arguments.host_cache)
    forget_engine()
    on_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    plain = plain_bandwidth(torch.device("cuda" if on_gpu else "cpu"))
    print_conversations(console, plain, without, with_host)


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
        "--prefix",
        type=number,
        help="common prompt tokens, or those of a conversation [default: 2000, 8192]",
    )
    parser.add_argument(
        "--unique", type=number, help="own prompt tokens, or those of a turn [default: 100, 64]"
    )
    parser.add_argument("--output", type=number, default=64, help="output tokens [default: 64]")
    parser.add_argument(
        "--conversations", type=number, help="measure a host cache with so many conversations"
    )
    parser.add_argument(
        "--at-once", type=number, default=12, help="turns, and streams, at once [default: 12]"
    )
    parser.add_argument(
        "--stream-tokens",
        type=number,
        default=STREAM_TOKENS,
        help=f"output tokens of a stream whose ITL counts [default: {STREAM_TOKENS}]",
    )
    arguments = parser.parse_args()
    talks = arguments.conversations is not None
    if talks and not arguments.host_cache:
        parser.error("--conversations needs --host-cache")
    arguments.prefix = arguments.prefix or (8192 if talks else 2000)
    arguments.unique = arguments.unique or (64 if talks else 100)
    return run_script(measure_conversations(arguments) if talks else measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
