"""Measures what speculation gains, and that it does not lose.

    python scripts/bench/bench_speculation.py FOLDER [--draft-tokens 3] [--draft-acceptance 0.7]

The same model is loaded twice, without speculation and with it. Each measures the time per token
(TPOT) of a few batch sizes, and the throughput of many requests at once. The weights are random, so
drafts are accepted by chance, with the given probability each. FOLDER needs no more than a
config.json (see scripts/tools/dummy_config.py); --speculative is ngram if not given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.config import BenchConfig, LatencyConfig, Sizes
from minisgl.bench.figures import Figures
from minisgl.bench.latency import check_room
from minisgl.bench.offline_run import run_offline, run_streaming
from minisgl.bench.report.output import make_console
from minisgl.bench.report.tables import draft_cells, fitting_tables
from minisgl.bench.run_info import describe, freeze_memory, start_bench_engine
from minisgl.bench.workload.requests import make_workload
from minisgl.engine import AsyncEngine

OFF: dict[str, Any] = {"speculative": None, "draft_acceptance": None}


@dataclass(frozen=True, slots=True)
class Measured:
    """What one engine has shown."""

    batches: dict[int, Figures]  # by batch size
    offline: Figures | None  # None: it was not asked for


async def measure(arguments: argparse.Namespace) -> None:
    console = make_console()
    off, on = [await measured(console, arguments, **options) for options in (OFF, dict[str, Any]())]
    print_batches(console, off, on)
    if off.offline is not None and on.offline is not None:
        print_offline(console, off.offline, on.offline)
    if arguments.json is not None:
        shown = {"off": asdict(off), "on": asdict(on)}
        arguments.json.write_text(json.dumps(shown, indent=1) + "\n")


async def measured(console: Console, arguments: argparse.Namespace, **options: Any) -> Measured:
    """Load the model with these options, and measure it."""
    async with await start_bench_engine(console, engine_config(arguments, **options)) as engine:
        for line in describe(engine):
            console.print(line)
        freeze_memory()
        device = engine.config.device
        latency = LatencyConfig(batch_size=(arguments.batch_size,), output_len=arguments.output_len)
        batches = {}
        for size in latency.batch_sizes:
            sizes = latency.sizes(size, device)
            check_room(sizes, engine.capacity)
            # The first run warms up, and measures step times for the choice of drafts.
            for seed in (2 * size, 2 * size + 1):
                jobs = make_workload(sizes, vocab_size=engine.model.vocab_size, seed=seed)
                batches[size] = Figures.of(await run_streaming(engine, jobs))
        offline = None
        if arguments.requests:
            sizes = BenchConfig(num_requests=arguments.requests).sizes(device)
            offline = await run_all(engine, sizes)
        return Measured(batches, offline)


async def run_all(engine: AsyncEngine, sizes: Sizes) -> Figures:
    jobs = make_workload(sizes, vocab_size=engine.model.vocab_size, seed=0)
    return Figures.of(await run_offline(engine, jobs, BenchConfig().temperature))


def print_batches(console: Console, off: Measured, on: Measured) -> None:
    headings = ["batch", "TPOT ms off", "TPOT ms on", "on / off", "drafts accepted", "tokens/step"]
    rows = []
    for size, figures in off.batches.items():
        without, with_drafts = tpot_s(figures), tpot_s(on.batches[size])
        times = [f"{without * 1e3:,.3f}", f"{with_drafts * 1e3:,.3f}"]
        ratio = f"{with_drafts / without:.3f}"
        rows.append([str(size), *times, ratio, *draft_cells(on.batches[size])])
    print_table(console, headings, rows)
    console.print("TPOT: (last token - first token) / (tokens - 1), the median of a batch.")


def print_offline(console: Console, off: Figures, on: Figures) -> None:
    headings = ["requests", "tok/s off", "tok/s on", "on / off", "drafts accepted"]
    rates = [each.output_tokens_per_s for each in (off, on)]
    cells = [f"{off.num_requests}", *(f"{rate:,.1f}" for rate in rates)]
    row = [*cells, f"{rates[1] / rates[0]:.4f}", *draft_cells(on)]
    print_table(console, [*headings, "tokens/step"], [row])


def print_table(console: Console, headings: Sequence[str], rows: list[list[str]]) -> None:
    for table in fitting_tables(headings, rows, console.width):
        console.print(table)


def tpot_s(figures: Figures) -> float:
    assert figures.tpot_s is not None, "every output has two tokens or more"
    return figures.tpot_s.p50


def main() -> int:
    parser = make_parser(__doc__, speculative="ngram", draft_acceptance=0.7)
    parser.add_argument(
        "--batch-size", default="1,8,32,64", help="requests together [default: 1,8,32,64]"
    )
    parser.add_argument(
        "--output-len", type=above_zero(int), help="tokens generated [default: 256, on a CPU 32]"
    )
    parser.add_argument(
        "--requests", type=int, default=256, help="requests at once; 0: none [default: 256]"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    return run_script(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
