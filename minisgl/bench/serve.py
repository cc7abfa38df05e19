"""`minisgl bench serve`: a workload over HTTP, on its own server or any of the OpenAI API."""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import minisgl
from minisgl.bench.beside import beside
from minisgl.bench.config import STANDARD, BenchConfig, ReportConfig, Sizes
from minisgl.bench.energy import Spent, energy_counter, metered
from minisgl.bench.environment import Environment
from minisgl.bench.figures import Distribution, Figures, Limit
from minisgl.bench.offline_run import RunRecord
from minisgl.bench.online.client import RunProgress
from minisgl.bench.online.context_check import check_room, describe_misfits, with_remedy
from minisgl.bench.online.load_config import LoadConfig, Point, check_load
from minisgl.bench.online.metrics_poller import PollResult, poll_metrics
from minisgl.bench.online.outlook import Outlook, warn
from minisgl.bench.online.run import OnlineRun, OnlineRunError, run_online
from minisgl.bench.online.server import StartedServer, own_server
from minisgl.bench.online.target import Endpoint, served_model
from minisgl.bench.online.token_counts import with_answer_lengths
from minisgl.bench.report.files import write_files
from minisgl.bench.report.output import make_console
from minisgl.bench.report.progress import live
from minisgl.bench.report.tables import PointResult, print_figures, print_spreads, sweep_tables
from minisgl.bench.run_info import RunInfo
from minisgl.bench.workload.config import WorkloadConfig, check_lengths, engine_for
from minisgl.bench.workload.dataset import Conversation, read_dataset, sample
from minisgl.bench.workload.requests import BYTES_PER_TOKEN, MAX_TOKEN_ID, ScheduledRequest
from minisgl.bench.workload.schedule import at_rate, make_schedule
from minisgl.bench.workload.structured import describe_share
from minisgl.bench.workload.trace import TraceEntry, read_trace
from minisgl.client.address import api_base
from minisgl.client.exchange import DOCUMENT_S
from minisgl.config import EngineConfig, refuse_engine_options
from minisgl.errors import ConfigError
from minisgl.interpreter import favour_steps
from minisgl.printable import counted
from minisgl.server.http.connection import raise_file_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUnderTest:
    """The server that is measured, and its known properties."""

    target: Endpoint
    run_info: RunInfo
    sizes: Sizes
    vocab_size: int  # token ids of prompts stay below it
    context: int | None = None  # tokens of prompt and answer together; None: unknown
    started: StartedServer | None  # None: a server at --url


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of the run."""

    engine: EngineConfig
    bench: BenchConfig
    workload: WorkloadConfig
    load: LoadConfig
    report: ReportConfig
    rows: Sequence[TraceEntry]  # of the trace, if there is one
    conversations: Sequence[Conversation]  # of the data set, if there is one

    def as_json(self) -> dict[str, Any]:
        """The options for the report, without the engine's, which are in the run info."""
        options = asdict(self.bench) | asdict(self.workload) | asdict(self.load)
        return options | {"api_key": self.load.api_key and "(not shown)"}


async def bench_serve(
    engine_config: EngineConfig,
    config: BenchConfig,
    workload: WorkloadConfig,
    load: LoadConfig,
    report: ReportConfig,
) -> int:
    """Measure, and print the results. Returns the exit code.

    Raises MinisglError, OnlineRunError where no request of a run succeeds.
    """
    check_lengths(config, workload)
    check_load(workload, load)
    rows = read_trace(Path(workload.trace), config.num_requests) if workload.trace else []
    conversations = read_dataset(Path(workload.dataset)) if workload.dataset else []
    if load.endpoint == "completions" and any(len(one.turns) > 1 for one in conversations):
        allowed = "the data set has conversations of several turns; allowed: chat"
        raise ConfigError("--endpoint", load.endpoint, allowed)
    raise_file_limit()
    console = make_console()
    options = ServeOptions(engine_config, config, workload, load, report, rows, conversations)
    async with _server_under_test(console, options) as server:
        _describe_load(console, server, options)
        _check_room(console, server, options)
        favour_steps()
        run_info = replace(server.run_info, bench_options=options.as_json())
        found: list[PointResult] = []
        try:
            for index, point in enumerate(load.points):
                found.append(await _measure_point(console, server, options, point, index))
        finally:  # what was measured is kept, whatever became of the rest
            if found:
                _report(console, found, run_info, options)
            if found and (missing := load.points[len(found) :]):
                points = "; ".join(map(str, missing))
                console.print(f"the sweep was interrupted; not measured: {points}")
    return 0


def _report(
    console: Console,
    found: Sequence[PointResult],
    run_info: RunInfo,
    options: ServeOptions,
) -> None:
    told = (
        "TTFT to the first event with text, E2E to the last; TPOT: the time between the two / "
        "(tokens - 1); ITL: between two such events."
    )
    if options.workload.kind == "embed":
        told = "TTFT and E2E to the end of the answer."
    console.print(f"Times are the client's, from sending a request: {told}")
    if len(found) == 1:
        print_figures(console, found[0].figures, found[0].limit)
    else:
        for table in sweep_tables(found, console.width):
            console.print(table)
    write_files(
        options.bench.json_file,
        options.report,
        run_info,
        {"points": [one.as_json() for one in found]},
        [(one.point._asdict(), one) for one in found],
    )


# -- before it runs --------------------------------------------------------------------------------


@asynccontextmanager
async def _server_under_test(
    console: Console, options: ServeOptions
) -> AsyncIterator[ServerUnderTest]:
    """Start a server, or connect to the one at --url. Raises MinisglError."""
    config, workload, load = options.bench, options.workload, options.load
    endpoint = load.endpoint
    if endpoint == "auto":
        kinds = {"multi-turn": "chat", "dataset": "chat", "embed": "embeddings"}
        endpoint = kinds.get(workload.kind, "completions")
    target = Endpoint(
        url="",
        endpoint=endpoint,
        temperature=config.temperature,
        ignore_eos=not load.stop_at_eos,
    )
    if not load.url:
        async with own_server(engine_for(workload, options.engine)) as (url, started):
            for line in started.description:
                console.print(line)
            yield ServerUnderTest(
                target=replace(target, url=url),
                run_info=started.run_info,
                sizes=workload.fix(config.sizes(started.config.device)),
                vocab_size=started.model.vocab_size,
                context=started.run_info.capacity["max_seq_len"],
                started=started,
            )
        return
    refuse_engine_options(options.engine)
    target = replace(
        target,
        url=api_base(load.url),
        api_key=load.find_key(),
        document_s=min(DOCUMENT_S, load.request_timeout),
    )
    model = await served_model(target, options.engine.model)
    target = replace(target, model=model.id)
    console.print(f"{target.url}: {target.model or 'a model without a name'}")
    yield ServerUnderTest(
        target=target,
        run_info=RunInfo(
            environment=Environment.found(),  # the client's
            versions={"minisgl": minisgl.__version__, "python": platform.python_version()},
            device=f"server at {target.url}",
            model=target.model or "",
            bench_options={},
        ),
        sizes=workload.fix(config.sizes("cuda")),
        vocab_size=load.vocab_size or model.vocab_size or MAX_TOKEN_ID + 1,
        context=model.max_model_len,
        started=None,
    )


def _describe_load(console: Console, server: ServerUnderTest, options: ServeOptions) -> None:
    config, rows = options.bench, options.rows
    where = "the client is on" if server.started is None else "on"
    console.print(f"{where} {server.run_info.environment.describe()}")
    eos = "answers may end by themselves" if options.load.stop_at_eos else "EOS ignored"
    sampling = f"temperature {config.temperature:g}, seed {config.seed}, {eos}"
    if options.workload.kind == "embed":
        sampling = f"seed {config.seed}"
    made_up = server.target.endpoint == "chat" and options.workload.kind != "dataset"
    words = ", of words" if made_up else ""
    console.print(
        f"{options.workload.describe(server.sizes)}, {sampling}, over {server.target.path}{words}"
        f"{describe_share(config.structured)}"
    )
    if rows:
        console.print(
            f"{counted(len(rows), 'request')} in {rows[-1].timestamp - rows[0].timestamp:,.1f} s "
            "of the trace; a question whose predecessor is still being answered waits for it"
        )
    elif (
        server.started is not None
        and server.started.config.device == "cpu"
        and server.sizes != STANDARD
    ):
        console.print("on a CPU, sizes that are not given are smaller than the standard ones")


def _check_room(console: Console, server: ServerUnderTest, options: ServeOptions) -> None:
    """Raise RoomError if the requests do not fit into the server's context."""
    workload = options.workload
    if server.context is None or workload.kind == "dataset":  # whose lengths the server counts
        return
    if workload.kind != "trace":
        check_room(workload, server.sizes, server.context, stop_at_eos=options.load.stop_at_eos)
    elif misfits := describe_misfits(options.rows, server.context):
        console.print(misfits)


# -- a measurement ---------------------------------------------------------------------------------


async def _measure_point(
    console: Console, server: ServerUnderTest, options: ServeOptions, point: Point, index: int
) -> PointResult:
    """Measure every repetition. Raises OnlineRunError if all requests of one fail."""
    config, workload, load = options.bench, options.workload, options.load
    console.print(f"{point}:" if workload.kind != "trace" else "replayed:")
    repetitions: list[Figures] = []
    for repetition in range(1, config.repeat + 1):
        # No two runs have a seed in common: one would find its prompts in the prefix cache. A
        # point's last repetition comes first, so that one point alone has the seed given.
        seed = config.seed + index * config.repeat + config.repeat - repetition
        schedule = make_schedule(
            workload,
            server.sizes,
            rows=options.rows,
            conversations=await _sampled(console, server, options, seed, tell=not repetitions),
            vocab_size=server.vocab_size,
            seed=seed,
            structured=config.structured,
        )
        if point.request_rate is not None:
            schedule = at_rate(schedule, point.request_rate, load.arrivals, seed)
        title = f"{repetition} of {config.repeat}"
        run, polled, spent = await _run(
            console, server, point, schedule, options, title, tell=not repetitions
        )
        figures = run.figures(polled.counts, load.limits_s).with_energy(spent)
        repetitions.append(figures)
        rate = f", {figures.requests_per_s:,.2f} requests/s" if figures.num_output_tokens else ""
        console.print(f"repetition {title}: {figures.elapsed_s:.2f} s, {figures.headline}{rate}")
    print_spreads(console, repetitions)
    _print_doubts(console, server, options, run)
    return PointResult(
        point=point,
        limit=share_of_limit(server, point, run, figures),
        repetitions=repetitions,
        requests=[request.record for request in run.requests],
        itls_s=run.itls_s,
        failures=dict(run.failures),
        timeline=polled.samples,
    )


async def _sampled(
    console: Console, server: ServerUnderTest, options: ServeOptions, seed: int, *, tell: bool
) -> list[Conversation]:
    """The conversations of a repetition, of a data set. tell: if their lengths are estimates."""
    config = options.bench
    picked = sample(options.conversations, server.sizes.num_requests, seed)
    given = (options.workload.output_len, config.min_output_length, config.max_output_length)
    if any(given):  # the lengths of the file are not asked for
        return picked
    picked, counted = await with_answer_lengths(server.target, picked)
    if tell and not counted:
        console.print(
            f"the server has no /tokenize: answers are as long as in the file with "
            f"{BYTES_PER_TOKEN} bytes a token"
        )
    return picked


async def _run(
    console: Console,
    server: ServerUnderTest,
    point: Point,
    schedule: Sequence[ScheduledRequest],
    options: ServeOptions,
    title: str,
    *,
    tell: bool,
) -> tuple[OnlineRun, PollResult, Spent]:
    """One repetition. tell: that all of them will take long, if so."""
    progress = RunProgress()
    outlook = Outlook(schedule, progress, options.workload, options.bench.repeat)
    counter = energy_counter(server.started.gpus if server.started else ())

    async with (
        poll_metrics(server.target) as polled,
        live(console, title, len(schedule), "events", lambda: progress),
        beside(warn(outlook, console.print)) if tell else nullcontext(),
    ):
        with metered(counter) as spent:
            run = await run_online(
                server.target,
                schedule,
                max_concurrency=point.max_concurrency,
                timeout_s=options.load.request_timeout,
                progress=progress,
            )
    if not run.requests:
        reason = next(iter(run.failures), "there was nothing to ask")
        raise OnlineRunError(with_remedy(reason, options.workload, server.target.endpoint))
    return run, polled, spent


def share_of_limit(
    server: ServerUnderTest, point: Point, run: OnlineRun, figures: Figures
) -> Limit | None:
    """The hardware's limit, for a server started by the benchmark on a GPU."""
    started = server.started
    if not figures.num_output_tokens:  # where only prompts are computed, it is not known
        return None
    if started is None or started.peak is None or figures.num_steps is None:
        return None
    record = RunRecord(
        [request.record for request in run.requests],
        num_steps=figures.num_steps,
        num_retractions=figures.num_retractions or 0,
    )
    model, peak, config = started.model, started.peak, started.config
    return Limit.of(record, figures.elapsed_s, model, peak, config, point.max_concurrency)


# -- warnings ----------------------------------------------------------------------------------


def _print_doubts(
    console: Console, server: ServerUnderTest, options: ServeOptions, run: OnlineRun
) -> None:
    """Print what qualifies the figures: failures, missing usage, delays."""
    for reason, count in run.failures.most_common(5):
        told = with_remedy(reason, options.workload, server.target.endpoint)
        console.print(f"{count:,} failed: {told}")
    if any(not request.counted for request in run.requests):
        console.print(
            "the server sends no usage: an event with text counts as a token, and a prompt as long "
            "as it was made"
        )
    late = Distribution.of([request.late_s for request in run.requests])
    single = f"; at least {run.single_share:.0%} of the events have one token alone"
    console.print(
        f"requests were sent p50 {late.p50 * 1e3:.1f} and p99 {late.p99 * 1e3:.1f} ms after they "
        f"were due{single if run.num_output_tokens else ''}"
    )
