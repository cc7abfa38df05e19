"""Measures a restart with a disk cache: `python scripts/bench/bench_restart.py FOLDER`.

An engine computes prompts of 8,192 tokens, one after the other, and ends, which writes them to
disk. A second engine gets the same prompts and reads them from there; the operating system's copies
of the files are dropped before. Prints the time to the first token of both, where the tokens came
from, and how fast the disk was. FOLDER needs no more than a config.json, but a model whose tokens
are faster computed than read finds nothing: then the last line says so.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.figures import Distribution
from minisgl.bench.offline_run import token_times
from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import describe, start_bench_engine
from minisgl.bench.workload.requests import ScheduledRequest, random_tokens
from minisgl.kvcache.copies import HostTraffic, Traffic

HOST_GB = 16.0


@dataclass(frozen=True, slots=True)
class Measured:
    start_s: float
    ttfts_s: list[float]
    num_prompt_tokens: int
    num_disk_tokens: int
    traffic: HostTraffic
    end_s: float


async def measure(console: Console, arguments: argparse.Namespace, folder: str) -> Measured:
    options = {"host_cache": arguments.host_cache or HOST_GB, "disk_cache": folder}
    began = time.perf_counter()
    async with await start_bench_engine(console, engine_config(arguments, **options)) as engine:
        start_s = time.perf_counter() - began
        for line in describe(engine):
            console.print(line)
        rng = random.Random(0)
        vocab_size = engine.model.vocab_size
        warm_up = ScheduledRequest(prompt=random_tokens(rng, 64, vocab_size), max_tokens=8)
        await token_times(engine.submit(warm_up.prompt, warm_up.params()))
        ttfts: list[float] = []
        for _ in range(arguments.num):
            prompt = random_tokens(rng, arguments.prefix, vocab_size)
            params = ScheduledRequest(prompt=prompt, max_tokens=2).params()
            began = time.perf_counter()
            times = await token_times(engine.submit(prompt, params))
            ttfts.append(times[0] - began)
        stats = engine.stats()
        assert stats.host is not None
        began = time.perf_counter()
        await engine.close()
        return Measured(
            start_s,
            ttfts,
            stats.counters.num_prompt_tokens,
            stats.counters.num_disk_tokens,
            stats.host.traffic,
            time.perf_counter() - began,
        )


def drop_from_memory(folder: str) -> int:
    """Let the operating system forget the files; returns their bytes."""
    num_bytes = 0
    for path in Path(folder).iterdir():
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            num_bytes += os.fstat(file.fileno()).st_size
    return num_bytes


def rate(traffic: Traffic) -> str:
    return f"{traffic.num_bytes / traffic.seconds / 1e9:.1f}" if traffic.seconds else "-"


async def measure_both(arguments: argparse.Namespace) -> None:
    console = make_console()
    if arguments.disk_folder is not None:
        arguments.disk_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="minisgl-", dir=arguments.disk_folder) as folder:
        first = await measure(console, arguments, folder)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        num_bytes = drop_from_memory(folder)
        second = await measure(console, arguments, folder)
    table = Table("engine")
    for heading in ("TTFT first ms", "TTFT p50 ms", "from disk", "read GB/s", "start s", "end s"):
        table.add_column(heading, justify="right")
    for name, measured in (("first", first), ("second", second)):
        table.add_row(
            name,
            f"{measured.ttfts_s[0] * 1e3:,.1f}",
            f"{Distribution.of(measured.ttfts_s).p50 * 1e3:,.1f}",
            f"{measured.num_disk_tokens / measured.num_prompt_tokens:.1%}",
            rate(measured.traffic.reads),
            f"{measured.start_s:.1f}",
            f"{measured.end_s:.1f}",
        )
    console.print(table)
    console.print(f"{num_bytes / 1e9:.2f} GB on disk")
    if not second.num_disk_tokens:
        console.print("nothing was read from disk: computing the tokens is faster here")


def main() -> int:
    parser = make_parser(__doc__, without=["disk_cache"])
    number = above_zero(int)
    parser.add_argument("--num", type=number, default=8, help="prompts [default: 8]")
    parser.add_argument("--prefix", type=number, default=8192, help="tokens [default: 8192]")
    parser.add_argument(
        "--disk-folder",
        type=Path,
        help="where to make a folder for the files [default: the system's]",
    )
    return run_script(measure_both(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
