"""`minisgl bench latency`: the time per output token at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from rich.console import Console

from minisgl.bench.config import LatencyConfig, ReportConfig, Sizes
from minisgl.bench.energy import Counter, energy_counter, engine_gpus, metered
from minisgl.bench.figures import Figures, spreads
from minisgl.bench.offline_run import RunRecord, run_offline, run_streaming
from minisgl.bench.online.load_config import Point
from minisgl.bench.peak import Peak, engine_peak
from minisgl.bench.report.files import write_files
from minisgl.bench.report.output import make_console
from minisgl.bench.report.tables import PointResult, has_drafts, print_spreads, run_tables
from minisgl.bench.roofline import DecodeStep
from minisgl.bench.run_info import RunInfo, bench_engine
from minisgl.bench.workload.requests import make_workload
from minisgl.bench.workload.structured import describe_share
from minisgl.config import Capacity, EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError
from minisgl.interpreter import favour_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """The measurement of one batch size."""

    sizes: Sizes
    figures: Figures
    step: DecodeStep
    limit_s: float | None  # the least time for `step`; None on a CPU
    run: RunRecord
    repetitions: list[Figures] = field(default_factory=list)

    @property
    def result(self) -> PointResult:
        return PointResult(
            point=Point(None, self.sizes.num_requests),
            limit=None,
            repetitions=self.repetitions,
            requests=self.run.requests,
        )

    @property
    def tpot_s(self) -> float:
        """Median TPOT over the requests, in seconds."""
        assert self.figures.tpot_s is not None, "every output has two tokens or more"
        return self.figures.tpot_s.p50


async def bench_latency(
    engine_config: EngineConfig, config: LatencyConfig, report: ReportConfig
) -> int:
    """Load the model, measure, and print the results. Returns the exit code."""
    console = make_console()
    async with bench_engine(console, engine_config) as engine:
        sizes = [config.sizes(size, engine.config.device) for size in config.batch_sizes]
        for batch in sizes:
            check_room(batch, engine.capacity)
        console.print(
            f"{sizes[0].prompt} tokens in, {sizes[0].output} out, greedy, EOS ignored, seed "
            f"{config.seed}, a batch submitted at once, repetition {config.repeat} of "
            f"{config.repeat} with fresh prompts{describe_share(config.structured)}"
            f"{', which are computed beforehand' if config.cached_prompts else ''}"
        )
        if engine.config.device == "cpu":
            console.print("on a CPU, lengths that are not given are smaller than the standard ones")
        peak = engine_peak(engine.config, engine.model)
        counter = energy_counter(engine_gpus(engine.config))
        favour_steps()
        records = []
        for index, batch in enumerate(sizes):
            with console.status(f"Batch {batch.num_requests}"):
                # No two runs have a seed in common: one would find its prompts in the prefix cache.
                first_seed = config.seed + index * config.repeat
                seeds = range(first_seed, first_seed + config.repeat)
                records.append(await _measure(engine, config, batch, seeds, peak, counter))
        run_info = RunInfo.of(engine, asdict(config))
    print_latencies(console, records, peak)
    rows = [({"batch_size": record.sizes.num_requests}, record.result) for record in records]
    write_files(config.json_file, report, run_info, {"peak": peak, "batches": records}, rows)
    return 0


def check_room(batch: Sizes, capacity: Capacity) -> None:
    """Raise ConfigError if the requests of a batch cannot all run at once."""
    size, length = batch.num_requests, batch.prompt.high + batch.output.high
    if size > capacity.num_slots:
        allowed = f"more than --max-running-requests; allowed: {capacity.num_slots} or less"
        raise ConfigError("--batch-size", size, allowed)
    room = (capacity.num_pages - 1) // -(-length // capacity.page_size) * capacity.num_attending
    if size > room:
        allowed = f"the KV cache holds {room} requests of {length} tokens; allowed: {room} or less"
        raise ConfigError("--batch-size", size, allowed)


async def _measure(
    engine: AsyncEngine,
    config: LatencyConfig,
    batch: Sizes,
    seeds: range,
    peak: Peak | None,
    counter: Counter,
) -> BatchRecord:
    """Measure a repetition for each of `seeds`; the record is of the last one."""
    repetitions: list[Figures] = []
    for seed in seeds:
        jobs = make_workload(
            batch, vocab_size=engine.model.vocab_size, seed=seed, structured=config.structured
        )
        if config.cached_prompts:
            await run_offline(engine, [replace(job, max_tokens=1) for job in jobs])
        with metered(counter) as spent:
            run = await run_streaming(engine, jobs)
        repetitions.append(Figures.of(run).with_energy(spent))
    dtype = engine.config.dtype
    step = DecodeStep.of(run, engine.model, dtype=dtype, kv_dtype=engine.config.kv_dtype)
    return BatchRecord(
        sizes=batch,
        figures=repetitions[-1],
        step=step,
        limit_s=step.seconds(peak) if peak else None,
        run=run,
        repetitions=repetitions,
    )


def print_latencies(console: Console, records: Sequence[BatchRecord], peak: Peak | None) -> None:
    rows = []
    for record in records:
        figures = record.figures
        row = {
            "batch": f"{record.sizes.num_requests}",
            "TPOT ms": f"{record.tpot_s * 1e3:,.3f}",
            "TTFT ms": f"{figures.ttft_s.p50 * 1e3:,.1f}",
            "output tok/s": f"{figures.output_tokens_per_s:,.1f}",
        }
        if record.limit_s is not None:
            row["limit ms"] = f"{record.limit_s * 1e3:,.3f}"
            row["of the limit"] = f"{record.limit_s / record.tpot_s:.1%}"
        rows.append(row)
    all_figures = [record.figures for record in records]
    for table in run_tables(rows, all_figures, console.width):
        console.print(table)
    console.print(
        "TPOT: (last token - first token) / (tokens - 1); TTFT: first token - submission; medians "
        "over the requests of a batch. output tok/s: of the whole run, prefill included."
    )
    if any(figures.energy for figures in all_figures):
        console.print("watts: the mean power of the GPUs over the whole run.")
    for record in records:
        if spreads(record.repetitions):
            console.print(f"batch {record.sizes.num_requests}: ", end="")
            print_spreads(console, record.repetitions)
    if has_drafts(all_figures):
        console.print(
            "tokens/step: of a request in a step that samples one; drafts that are accepted add to "
            "it. The limit is that of one token a step."
        )
    if peak is not None:
        console.print(_explain(records, peak))


def _explain(records: Sequence[BatchRecord], peak: Peak) -> str:
    steps = [record.step for record in records]
    cache = ", ".join(f"{step.kv_bytes / 1e9:.2f}" for step in steps)
    return (
        f"limit: the time in which a decode step can read {steps[0].weight_bytes / 1e9:.2f} GB of "
        f"weights and {cache} GB of KV cache, or compute where that takes longer, at {peak}."
    )
