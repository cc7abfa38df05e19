"""`minisgl bench`: the standard offline workload, all requests at once."""

from __future__ import annotations

import gc
import platform
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

import minisgl
from minisgl.bench.config import BenchConfig, Sizes
from minisgl.bench.driver import run_offline
from minisgl.bench.limits import Peak, Work, measure_peak
from minisgl.bench.report import Figures, Limit, Report, print_figures
from minisgl.bench.workload import MAX_TOKEN_ID, make_workload
from minisgl.config import EngineConfig, ResolvedConfig
from minisgl.engine import AsyncEngine
from minisgl.llm import UNBOUNDED_QUEUE
from minisgl.runner.facts import device_name


async def bench_offline(engine_config: EngineConfig, config: BenchConfig) -> int:
    """Load the model, measure, and print what came out. Returns the exit code."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with console.status("Loading the model"):
        engine = await AsyncEngine.start(
            replace(engine_config, max_queued_requests=UNBOUNDED_QUEUE)
        )
    async with engine:
        sizes = config.sizes(engine.config.device)
        _introduce(console, engine, config, sizes)
        peak = _measure_peak(engine.config)
        gc.collect()  # as a server does before its first request
        gc.freeze()
        for repetition in range(1, config.repeat + 1):
            # The last one has the seed that was asked for, so that it is the same for any number of
            # them; those before it have others, so that it finds nothing in the prefix cache.
            seed = config.seed + config.repeat - repetition
            jobs = make_workload(
                sizes,
                vocab_size=engine.model.vocab_size,
                temperature=config.temperature,
                seed=seed,
            )
            run = await run_offline(engine, jobs)
            figures = Figures.of(run)
            console.print(
                f"repetition {repetition} of {config.repeat}: {figures.elapsed_s:.2f} s, "
                f"{figures.output_tokens_per_s:,.1f} output tok/s"
            )
        limit = None
        if peak is not None:
            work = Work.of(run, engine.model, engine.config.dtype)
            limit = Limit.of(figures, peak, work)
        report = Report(
            versions={
                "minisgl": minisgl.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            device=device_name(engine.config.device),
            model=engine.model_name,
            sizes=sizes,
            bench_options=asdict(config),
            engine_options=asdict(engine.config),
            capacity=asdict(engine.capacity),
            figures=figures,
            limit=limit,
            run=run,
        )
    print_figures(console, figures, limit)
    if config.json_file is not None:
        report.write(Path(config.json_file))
    return 0


def _measure_peak(config: ResolvedConfig) -> Peak | None:
    if config.device != "cuda":
        return None
    return measure_peak(torch.device(config.device), getattr(torch, config.dtype))


def _introduce(console: Console, engine: AsyncEngine, config: BenchConfig, sizes: Sizes) -> None:
    options = engine.config
    weights = "random weights" if options.load_format == "dummy" else "its own weights"
    console.print(
        f"minisgl {minisgl.__version__}: {engine.model_name} with {weights} in {options.dtype}, "
        f"on {device_name(options.device)}"
    )
    console.print(f"{sizes}, temperature {config.temperature:g}, seed {config.seed}, EOS ignored")
    if options.device == "cpu":
        console.print("on a CPU, sizes that are not given are smaller than the standard ones")
    if engine.model.vocab_size <= MAX_TOKEN_ID:
        console.print(
            f"the standard prompts have token ids up to {MAX_TOKEN_ID:,}; "
            f"here they wrap around at the vocabulary of {engine.model.vocab_size:,}"
        )
