"""Measures the cost of HTTP: `python scripts/bench/bench_serve.py [FOLDER]`.

Sends the standard workload to a server in a process of its own, every request at once and streamed,
and runs the same requests offline on the very same engine, alternating. The prefix cache is off,
so that no run finds prefixes of another. On a GPU, FOLDER holds a config.json and a tokenizer (see
scripts/tools/dummy_config.py and dummy_tokenizer.py beside it), and --load-format is dummy. With
--step-ms a clock replaces the model, which shows what the host can keep up with. For other loads
there is `minisgl bench serve`.

One column for each repetition. ITL: between one event with text and the next. one token: a lower
bound of the share of events with a single token. CPU: of the process, all threads, for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paced_engine import start_paced_engine
from rich.table import Table
from script_runner import above_zero, engine_config, make_parser, run_script

from minisgl.bench.config import STANDARD, STANDARD_ON_CPU, Sizes, Span
from minisgl.bench.figures import Distribution
from minisgl.bench.offline_run import run_offline
from minisgl.bench.online.run import OnlineRun, run_online
from minisgl.bench.online.target import Endpoint
from minisgl.bench.report.output import make_console
from minisgl.bench.run_info import describe, freeze_memory
from minisgl.bench.workload.requests import ScheduledRequest, make_workload
from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import MinisglError
from minisgl.server.config import ServerConfig
from minisgl.server.process import ServerProcess, bind, new_event_loop, start_engine

HOST = "127.0.0.1"
TEMPERATURE = 0.6
STOP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Load:
    """The given sizes; those not given depend on the device."""

    num_requests: int
    input: tuple[int, int] | None
    output: tuple[int, int] | None
    seed: int
    step_s: float | None  # of the clock that takes the place of a model

    def sizes(self, device: str) -> Sizes:
        slow = device == "cpu" and self.step_s is None
        standard = STANDARD_ON_CPU if slow else STANDARD
        return Sizes(
            self.num_requests,
            Span(*self.input) if self.input else standard.prompt,
            Span(*self.output) if self.output else standard.output,
        )

    def requests(self, sizes: Sizes, vocab_size: int) -> list[ScheduledRequest]:
        return make_workload(sizes, vocab_size=vocab_size, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Started:
    """Message of the server's process when its engine has started."""

    description: list[str]
    device: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Rate:
    tokens_per_s: float
    cpu_s_per_token: float


# -- the server's process --------------------------------------------------------------------------


def serve(config: EngineConfig, port: int, load: Load, connection: Connection) -> None:
    """Serve until SIGTERM, and answer what comes through `connection`."""
    logging.basicConfig(level=os.environ.get("LOG_LEVEL", "WARNING"))
    answering: list[asyncio.Task[None]] = []  # so that somebody holds it

    async def start(config: EngineConfig) -> Any:
        engine: Any
        if load.step_s is None:
            engine = await start_engine(config)
        else:
            engine = start_paced_engine(config, load.step_s)
        loaded = Started([*describe(engine)], engine.config.device, engine.model.vocab_size)
        connection.send(loaded)
        answering.append(asyncio.create_task(answer(engine, load, loaded, connection)))
        return engine

    try:
        sys.exit(ServerProcess(config, ServerConfig(host=HOST, port=port), start).run())
    except MinisglError as error:
        connection.send(error)


async def answer(engine: AsyncEngine, load: Load, loaded: Started, connection: Connection) -> None:
    """To "cpu" the CPU time of this process in seconds, to "offline" the Rate of such a run."""
    jobs = load.requests(load.sizes(loaded.device), loaded.vocab_size)
    while (asked := await asyncio.to_thread(receive, connection)) is not None:
        began = time.process_time()
        if asked == "cpu":
            connection.send(began)
            continue
        run = await run_offline(engine, jobs, TEMPERATURE)
        num_tokens = sum(request.num_output_tokens for request in run.requests)
        cpu_s = time.process_time() - began
        connection.send(Rate(num_tokens / run.elapsed_s, cpu_s / num_tokens))


# -- this process: the clients ---------------------------------------------------------------------


def receive(connection: Connection) -> Any:
    """The next message; None at the end of the connection."""
    try:
        return connection.recv()
    except EOFError:
        return None


async def measure(arguments: argparse.Namespace) -> None:
    console = make_console()
    step_s = arguments.step_ms / 1e3 if arguments.step_ms else None
    load = Load(arguments.num, arguments.input, arguments.output, arguments.seed, step_s)
    config = engine_config(arguments)
    with bind(ServerConfig(host=HOST, port=0)) as probe:
        port: int = probe.getsockname()[1]
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(config, port, load, theirs)
    )
    server.start()
    theirs.close()

    async def told() -> Any:
        said = await asyncio.to_thread(receive, ours)
        if said is None:
            raise MinisglError("The server has ended.")
        if isinstance(said, MinisglError):
            raise said
        return said

    async def ask(what: str) -> Any:
        ours.send(what)
        return await told()

    try:
        loaded: Started = await told()
        sizes = load.sizes(loaded.device)
        schedule = load.requests(sizes, loaded.vocab_size)
        target = Endpoint(url=f"http://{HOST}:{port}/v1", temperature=TEMPERATURE)
        for line in loaded.description:
            console.print(line)
        if arguments.step_ms:
            console.print(f"a clock takes the place of the model: {arguments.step_ms:g} ms a step")
        console.print(
            f"{sizes}, all at once, temperature {TEMPERATURE:g}, seed {load.seed}, EOS ignored"
        )
        freeze_memory()
        columns = []
        for _ in range(arguments.repeat):
            offline: Rate = await ask("offline")
            server_cpu_s, own_cpu_s = await ask("cpu"), time.process_time()
            run = await run_online(target, schedule)
            run.require_all()
            own_cpu_s = time.process_time() - own_cpu_s
            server_cpu_s = await ask("cpu") - server_cpu_s
            columns.append(figures(offline, run, server_cpu_s, own_cpu_s))
        table = Table(show_header=False)
        for name in columns[0]:
            table.add_row(name, *(column[name] for column in columns))
        console.print(table)
    finally:
        ours.close()
        server.terminate()
        await asyncio.to_thread(server.join, STOP_SECONDS)
        server.kill()


def figures(
    offline: Rate, run: OnlineRun, server_cpu_s: float, client_cpu_s: float
) -> dict[str, str]:
    num_tokens = run.num_output_tokens
    served = num_tokens / run.elapsed_s
    ttft = Distribution.of([request.record.ttft_s for request in run.requests])
    itl = Distribution.of([gap for request in run.requests for gap in request.itls_s] or [0.0])
    return {
        "offline tok/s": f"{offline.tokens_per_s:,.0f}",
        "served tok/s": f"{served:,.0f}",
        "served / offline": f"{served / offline.tokens_per_s:.1%}",
        "TTFT p50 ms": f"{ttft.p50 * 1e3:.2f}",
        "TTFT p99 ms": f"{ttft.p99 * 1e3:.2f}",
        "ITL p50 ms": f"{itl.p50 * 1e3:.2f}",
        "ITL p99 ms": f"{itl.p99 * 1e3:.2f}",
        "one token": f"{run.single_share:.1%}",
        "offline CPU µs": f"{offline.cpu_s_per_token * 1e6:.1f}",
        "served CPU µs": f"{server_cpu_s / num_tokens * 1e6:.1f}",
        "client CPU µs": f"{client_cpu_s / num_tokens * 1e6:.1f}",
    }


def main() -> int:
    parser = make_parser(__doc__, cache_type="naive", load_format="auto")
    number = above_zero(int)
    parser.add_argument("--num", type=number, default=256, help="clients at once [default: 256]")
    parser.add_argument("--input", type=number, nargs=2, metavar=("LOW", "HIGH"))
    parser.add_argument("--output", type=number, nargs=2, metavar=("LOW", "HIGH"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=number, default=2, help="repetitions [default: 2]")
    parser.add_argument(
        "--step-ms", type=above_zero(float), help="a clock of this step time instead of a model"
    )
    return run_script(measure(parser.parse_args()), loop_factory=new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
