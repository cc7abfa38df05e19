"""`minisgl bench`: a workload on an engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from minisgl.bench.beside import beside
from minisgl.bench.config import BenchConfig, ReportConfig, Sizes
from minisgl.bench.energy import energy_counter, engine_gpus, metered
from minisgl.bench.environment import Environment
from minisgl.bench.figures import Figures, Limit
from minisgl.bench.offline_run import RunRecord, run_embeddings, run_offline
from minisgl.bench.online.client import RunProgress
from minisgl.bench.online.load_config import Point
from minisgl.bench.online.metrics_poller import Sample
from minisgl.bench.peak import engine_peak
from minisgl.bench.report.files import write_files
from minisgl.bench.report.output import make_console
from minisgl.bench.report.progress import live
from minisgl.bench.report.tables import PointResult, print_figures, print_spreads
from minisgl.bench.run_info import RunInfo, bench_engine
from minisgl.bench.workload.config import WorkloadConfig, check_lengths, engine_for
from minisgl.bench.workload.schedule import make_schedule
from minisgl.bench.workload.structured import describe_share
from minisgl.bench.workload.trace import TraceEntry, read_trace
from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError
from minisgl.interpreter import favour_steps

POLL_S = 1.0  # seconds; drawing takes time of the engine's event loop


async def bench_offline(
    engine_config: EngineConfig,
    config: BenchConfig,
    workload: WorkloadConfig,
    report: ReportConfig,
    max_concurrency: int | None = None,
) -> int:
    """Load the model, measure, and print the results. Returns the exit code.

    max_concurrency: requests at once; None: any number.
    """
    if workload.kind == "multi-turn":
        allowed = "each question waits for the answer before it; use `minisgl bench serve`"
        raise ConfigError("--workload", workload.workload, allowed)
    if workload.dataset is not None:
        allowed = "its texts are sent over HTTP; use `minisgl bench serve`"
        raise ConfigError("--dataset", workload.dataset, allowed)
    if workload.trace_scale != 1:
        allowed = "offline all requests come at once; use `minisgl bench serve`"
        raise ConfigError("--trace-scale", workload.trace_scale, allowed)
    check_lengths(config, workload)
    rows = read_trace(Path(workload.trace), config.num_requests) if workload.trace else []
    console = make_console()
    async with bench_engine(console, engine_for(workload, engine_config)) as engine:
        sizes = workload.fix(config.sizes(engine.config.device))
        sampling = f"temperature {config.temperature:g}, seed {config.seed}, EOS ignored"
        if workload.kind == "embed":
            sampling = f"seed {config.seed}"
        console.print(
            f"{workload.describe(sizes, at_once=True)}, {sampling}"
            f"{describe_share(config.structured)}"
            f"{f', at most {max_concurrency} at once' if max_concurrency else ''}"
        )
        if engine.config.device == "cpu" and not rows:
            console.print("on a CPU, sizes that are not given are smaller than the standard ones")
        console.print(f"on {Environment.found().describe()}")
        run, measured = await _measure(
            console, engine, config, workload, sizes, rows, max_concurrency
        )
        run_info = RunInfo.of(
            engine, asdict(config) | asdict(workload) | {"max_concurrency": max_concurrency}
        )
    print_spreads(console, measured.repetitions)
    print_figures(console, measured.figures, measured.limit)
    results = {
        "sizes": sizes,
        "figures": measured.figures,
        "limit": measured.limit,
        "run": run,
        "repetitions": measured.repetitions,
        "spreads": measured.spreads,
        "timeline": measured.timeline,
    }
    write_files(config.json_file, report, run_info, results, [({}, measured)])
    return 0


async def _measure(
    console: Console,
    engine: AsyncEngine,
    config: BenchConfig,
    workload: WorkloadConfig,
    sizes: Sizes,
    rows: Sequence[TraceEntry],
    max_concurrency: int | None,
) -> tuple[RunRecord, PointResult]:
    """Measure every repetition; the run and the result are of the last one."""
    peak = engine_peak(engine.config, engine.model)
    counter = energy_counter(engine_gpus(engine.config))
    favour_steps()
    repetitions: list[Figures] = []
    for repetition in range(1, config.repeat + 1):
        # The last one has the seed that was asked for, so that it is the same for any number of
        # them; those before it have others, so that it finds nothing in the prefix cache.
        seed = config.seed + config.repeat - repetition
        jobs = make_schedule(
            workload,
            sizes,
            rows=rows,
            vocab_size=engine.model.vocab_size,
            seed=seed,
            structured=config.structured,
        )
        title = f"{repetition} of {config.repeat}"
        async with poll_engine(console, title, engine, len(jobs)) as timeline:
            with metered(counter) as spent:
                if workload.kind == "embed":
                    run = await run_embeddings(engine, jobs, max_concurrency)
                else:
                    run = await run_offline(engine, jobs, config.temperature, max_concurrency)
        figures = Figures.of(run).with_energy(spent)
        repetitions.append(figures)
        console.print(f"repetition {title}: {figures.elapsed_s:.2f} s, {figures.headline}")
    limit = None
    if peak is not None and workload.kind != "embed":
        limit = Limit.of(run, figures.elapsed_s, engine.model, peak, engine.config, max_concurrency)
    return run, PointResult(
        point=Point(None, None),
        limit=limit,
        repetitions=repetitions,
        requests=run.requests,
        timeline=timeline,
    )


@asynccontextmanager
async def poll_engine(
    console: Console, title: str, engine: AsyncEngine, num_requests: int
) -> AsyncIterator[list[Sample]]:
    """Poll the engine once a second while the context is open, and show the progress."""
    before = engine.stats()
    began = time.perf_counter()
    samples: list[Sample] = []

    def snapshot() -> RunProgress:
        stats = engine.stats()
        num_ended, num_before = (sum(some.totals.num_finished.values()) for some in (stats, before))
        num_tokens = stats.num_output_tokens - before.num_output_tokens
        return RunProgress(num_ended - num_before, stats.num_running, num_tokens)

    async def look() -> None:
        while True:
            await asyncio.sleep(POLL_S)
            stats = engine.stats()
            now = time.perf_counter() - began
            samples.append(Sample(now, stats.num_running, stats.num_queued, stats.token_usage))

    async with beside(look()), live(console, title, num_requests, "tokens", snapshot, POLL_S):
        yield samples
