"""Measures how busy the stages of a pipeline are.

    python scripts/bench/bench_pipeline.py FOLDER --pp 2

Runs the standard workload, all requests at once, and shows the throughput and the share of the time
that each rank waits for others or for plans: over the whole run, which begins and ends with stages
that have nothing to do, and over the half of the steps in its middle. On a GPU the times are those
of events on the compute stream. FOLDER needs no more than a config.json (see
scripts/tools/dummy_config.py). The figures are of the second repetition.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.config import STANDARD, STANDARD_ON_CPU, Sizes
from minisgl.bench.offline_run import RunRecord, run_offline
from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import describe, freeze_memory, start_bench_engine
from minisgl.bench.workload.requests import make_workload
from minisgl.runner.stage_times import STAGE_TIMES

REPETITIONS = 2

Times = Sequence[tuple[int, float, float]]  # step, begin and end in milliseconds


async def measure(arguments: argparse.Namespace) -> tuple[RunRecord, range]:
    """Run the workload; returns the last repetition and its steps."""
    console = make_console()
    async with await start_bench_engine(console, engine_config(arguments)) as engine:
        standard = STANDARD_ON_CPU if engine.config.device == "cpu" else STANDARD
        sizes = Sizes(arguments.num, standard.prompt, standard.output)
        for line in describe(engine):
            console.print(line)
        console.print(f"{sizes}, all at once, repetition {REPETITIONS}")
        freeze_memory()
        for seed in range(REPETITIONS):
            first = engine.stats().counters.num_steps + 1
            jobs = make_workload(sizes, vocab_size=engine.model.vocab_size, seed=seed)
            run = await run_offline(engine, jobs, temperature=0.6)
        return run, range(first, engine.stats().counters.num_steps + 1)


def report(run: RunRecord, steps: range, folder: Path) -> None:
    num_tokens = sum(request.num_output_tokens for request in run.requests)
    rate = num_tokens / run.elapsed_s
    console = make_console()
    console.print(f"{rate:,.0f} output tokens a second, {run.num_steps} steps")
    table = Table("stage", "rank of stage", "idle", "idle in the middle", "ms a step")
    quarter = len(steps) // 4
    for file in sorted(folder.glob("*.json")):
        stage, rank = file.stem.split("-")
        times: Times = json.loads(file.read_text())
        whole = [row for row in times if row[0] in steps]
        middle = [row for row in whole if row[0] in steps[quarter : len(steps) - quarter]]
        busy = sum(end - begin for _, begin, end in middle) / len(middle)
        table.add_row(stage, rank, f"{idle(whole):.1%}", f"{idle(middle):.1%}", f"{busy:.2f}")
    console.print(table)


def idle(times: Times) -> float:
    """The share of the time from the first begin to the last end in which no step ran."""
    busy = sum(end - begin for _, begin, end in times)
    return 1 - busy / (times[-1][2] - times[0][1])


def main() -> int:
    parser = make_parser(__doc__, pp=2, cache_type="naive")
    parser.add_argument("--num", type=above_zero(int), default=256, help="requests [default: 256]")
    arguments = parser.parse_args()
    if arguments.pp == 1:
        parser.error("--pp 1: one stage waits for nobody; allowed: 2 or more")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[STAGE_TIMES] = folder

        async def work() -> None:
            report(*await measure(arguments), Path(folder))

        return run_script(work())


if __name__ == "__main__":
    sys.exit(main())
