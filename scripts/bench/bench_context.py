"""Measures a decode step of requests with long contexts.

    python scripts/bench/bench_context.py FOLDER [--kv-cache-dtype fp8]

64 requests of 8,192 tokens decode together. Their prompts are computed beforehand, for one token
each, and found in the prefix cache then, so that the step is measured without their prefill. FOLDER
needs no more than a config.json (see scripts/tools/dummy_config.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.config import Sizes, Span
from minisgl.bench.energy import energy_counter, engine_gpus, metered
from minisgl.bench.figures import Figures
from minisgl.bench.latency import BatchRecord, check_room, print_latencies
from minisgl.bench.offline_run import run_offline, run_streaming
from minisgl.bench.peak import engine_peak
from minisgl.bench.report.output import make_console
from minisgl.bench.roofline import DecodeStep
from minisgl.bench.run_info import describe, freeze_memory, start_bench_engine
from minisgl.bench.workload.requests import make_workload


async def measure(arguments: argparse.Namespace) -> None:
    console = make_console()
    length = Span(arguments.context, arguments.context)
    first, then = (Sizes(arguments.batch, length, Span(n, n)) for n in (1, arguments.output))
    async with await start_bench_engine(console, engine_config(arguments)) as engine:
        config, model = engine.config, engine.model
        check_room(then, engine.capacity)
        for line in describe(engine):
            console.print(line)
        console.print(f"{then}, greedy, the prompts in the prefix cache")
        peak, counter = engine_peak(config, model), energy_counter(engine_gpus(config))
        freeze_memory()
        # The same seed draws the same prompts for both.
        prompts, jobs = (
            make_workload(sizes, vocab_size=model.vocab_size, seed=0) for sizes in (first, then)
        )
        await run_offline(engine, prompts)
        with metered(counter) as spent:
            run = await run_streaming(engine, jobs)
    step = DecodeStep.of(run, model, dtype=config.dtype, kv_dtype=config.kv_dtype)
    record = BatchRecord(
        sizes=then,
        figures=Figures.of(run).with_energy(spent),
        step=step,
        limit_s=step.seconds(peak) if peak else None,
        run=run,
    )
    print_latencies(console, [record], peak)
    if arguments.json is not None:
        shown = asdict(replace(record, run=replace(run, requests=[])))
        arguments.json.write_text(json.dumps({"batches": [shown]}, indent=1) + "\n")


def main() -> int:
    parser = make_parser(__doc__)
    number = above_zero(int)
    parser.add_argument("--batch", type=number, default=64, help="requests [default: 64]")
    parser.add_argument(
        "--context", type=number, default=8192, help="tokens of a prompt [default: 8192]"
    )
    parser.add_argument(
        "--output", type=number, default=128, help="tokens generated, 2 or more [default: 128]"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if arguments.output < 2:
        parser.error(f"argument --output: {arguments.output}: allowed: 2 or more")
    return run_script(measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
