"""`minisgl bench`: the standard offline workload, all requests at once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from minisgl.bench.config import BenchConfig
from minisgl.bench.driver import run_offline
from minisgl.bench.limits import Work, engine_peak
from minisgl.bench.report import Figures, Limit, print_figures, write_report
from minisgl.bench.setting import Setting, describe, make_console, settle_memory, start_engine
from minisgl.bench.workload import make_workload
from minisgl.config import EngineConfig


async def bench_offline(engine_config: EngineConfig, config: BenchConfig) -> int:
    """Load the model, measure, and print what came out. Returns the exit code."""
    console = make_console()
    engine = await start_engine(console, engine_config)
    async with engine:
        sizes = config.sizes(engine.config.device)
        for line in describe(engine):
            console.print(line)
        console.print(
            f"{sizes}, temperature {config.temperature:g}, seed {config.seed}, EOS ignored"
        )
        if engine.config.device == "cpu":
            console.print("on a CPU, sizes that are not given are smaller than the standard ones")
        peak = engine_peak(engine.config)
        settle_memory()
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
            work = Work.of(
                run,
                engine.model,
                engine.config.dtype,
                max_running=engine.config.max_running_requests,
            )
            limit = Limit.of(figures, peak, work)
        setting = Setting.of(engine, asdict(config))
    print_figures(console, figures, limit)
    if config.json_file is not None:
        path = Path(config.json_file)
        write_report(path, setting, sizes=sizes, figures=figures, limit=limit, run=run)
    return 0
