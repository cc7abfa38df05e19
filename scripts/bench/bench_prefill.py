"""Measures the share of the hardware's arithmetic that prefill uses.

    python scripts/bench/bench_prefill.py FOLDER

Sixteen prompts of 2,048 tokens at once, for one token each, so that nothing but prefill runs; the
prefix cache is off. GEMMs and causal attention are counted: no padding, no masked scores,
and logits of a prompt's last token only. The figures are of the second repetition, which has
prompts of its own. FOLDER needs no more than a config.json (see scripts/tools/dummy_config.py).
"""

from __future__ import annotations

import argparse
import sys

import torch
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.config import Sizes, Span
from minisgl.bench.offline_run import run_offline
from minisgl.bench.peak import MATRIX_SIZE, measure_operations_per_s
from minisgl.bench.report.output import make_console
from minisgl.bench.roofline import prefill_operations
from minisgl.bench.run_info import describe, freeze_memory, start_bench_engine
from minisgl.bench.workload.requests import make_workload
from minisgl.config import ResolvedConfig

REPETITIONS = 2
MATRIX_SIZE_ON_CPU = 1024


def operations_per_s(config: ResolvedConfig) -> float:
    """Operations per second of a GEMM on the devices of a running engine, also on CPUs."""
    device = torch.device(config.device)
    size = MATRIX_SIZE_ON_CPU if config.device == "cpu" else MATRIX_SIZE
    reached = measure_operations_per_s(device, getattr(torch, config.dtype), size)
    if config.device == "cuda":
        torch.cuda.empty_cache()
    return config.num_ranks * reached


async def measure(arguments: argparse.Namespace) -> None:
    console = make_console()
    async with await start_bench_engine(console, engine_config(arguments)) as engine:
        sizes = Sizes(arguments.num, Span(arguments.length, arguments.length), Span(1, 1))
        for line in describe(engine):
            console.print(line)
        console.print(f"{sizes}, greedy, all at once, repetition {REPETITIONS} with fresh prompts")
        peak = arguments.peak
        if peak is None:
            peak = operations_per_s(engine.config) / 1e12
        freeze_memory()
        for seed in range(REPETITIONS):
            jobs = make_workload(sizes, vocab_size=engine.model.vocab_size, seed=seed)
            run = await run_offline(engine, jobs)
        operations = prefill_operations(run.requests, engine.model)
        num_tokens = sum(
            request.num_prompt_tokens - request.num_cached_tokens for request in run.requests
        )
    reached = operations / run.elapsed_s / 1e12
    console.print(f"seconds        {run.elapsed_s:12.4f} in {run.num_steps} steps")
    console.print(f"prompt tok/s   {num_tokens / run.elapsed_s:12,.0f}")
    console.print(f"TFLOP          {operations / 1e12:12,.3f}")
    console.print(f"TFLOP/s        {reached:12,.3f}")
    origin = "measured here" if arguments.peak is None else "as given"
    console.print(f"share of peak  {reached / peak:12.1%} of {peak:,.3f} TFLOP/s, {origin}")


def main() -> int:
    # A cache that forgets: every repetition computes all of its prompts.
    parser = make_parser(__doc__, cache_type="naive")
    parser.add_argument("--num", type=above_zero(int), default=16, help="prompts [default: 16]")
    parser.add_argument(
        "--length", type=above_zero(int), default=2048, help="tokens of each [default: 2048]"
    )
    parser.add_argument(
        "--peak", type=above_zero(float), help="TFLOP/s that count as all; measured if not given"
    )
    return run_script(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
