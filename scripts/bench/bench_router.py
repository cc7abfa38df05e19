"""Measures the router alone: `python scripts/bench/bench_router.py`.

Replicas are replaced by scripts, in a process of their own, that write events of the usual size at
a given rate; the clients are in this process, and the router has a third. The host should have
three idle cores.

tokens: --streams streams at once, with --rate events a second together; the CPU time of the
router's process for each. First events: requests arrive --arrivals a second, through the router and
without it; how much later the first event of an answer comes at each percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from script_runner import above_zero

from minisgl.bench.config import Sizes, Span
from minisgl.bench.figures import Distribution
from minisgl.bench.online.run import OnlineRun, run_online
from minisgl.bench.online.target import Endpoint
from minisgl.bench.workload.requests import ScheduledRequest, make_workload
from minisgl.bench.workload.schedule import at_rate
from minisgl.router.app import create_router_app
from minisgl.router.config import CACHE
from minisgl.router.fleet import Fleet, ReplicaState
from minisgl.router.relay import RelayConnection
from minisgl.server.config import ServerConfig
from minisgl.server.process import Server, bind, http_settings, new_event_loop

HOST = "127.0.0.1"
MAX_CPU_US = 10.0  # for a token
MAX_DELAY_MS = 1.0  # of the first event, at p99
PROMPT_WORDS = 60
EVENTS_OF_SHORT = 20  # of a request whose first event is timed
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1,"model":"scripted","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = b"data: [DONE]\n\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class Script(asyncio.Protocol):
    """A server that answers every request with a stream of as many events as it asks tokens for."""

    events_per_s = 0.0

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        _, end, body = self._data.partition(b"\r\n\r\n")
        if end and body.endswith(b"}"):
            self._data = b""
            self._answering = asyncio.ensure_future(self._answer(json.loads(body)["max_tokens"]))

    async def _answer(self, num_events: int) -> None:
        write, loop = self._transport.write, asyncio.get_running_loop()
        write(HEAD + chunk(EVENT))
        due = loop.time() + random.random() / self.events_per_s
        for _ in range(num_events - 1):
            await asyncio.sleep(due - loop.time())
            write(chunk(EVENT))
            due += 1 / self.events_per_s
        write(chunk(LAST) + chunk(b""))


def run_scripts(paths: list[str], events_per_s: float, connection: Connection) -> None:
    """Answer at every path and at a port, which is sent."""

    async def run() -> None:
        Script.events_per_s = events_per_s
        loop = asyncio.get_running_loop()
        servers = [await loop.create_unix_server(Script, path, backlog=1024) for path in paths]
        servers.append(await loop.create_server(Script, HOST, 0, backlog=1024))
        connection.send(servers[-1].sockets[0].getsockname()[1])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


def run_router(paths: list[str], connection: Connection) -> None:
    """Route, and answer each message with the CPU seconds so far."""

    async def run() -> None:
        fleet = Fleet(paths, CACHE)
        fleet.update([ReplicaState(is_ready=True, start=1)] * len(paths))
        config = ServerConfig(port=0)
        with bind(config) as listener:
            settings = http_settings(create_router_app(fleet, config), connection=RelayConnection)
            serving = asyncio.ensure_future(Server(settings).serve(sockets=[listener]))
            connection.send(listener.getsockname()[1])
            while not serving.done():
                await asyncio.to_thread(connection.recv)
                used = resource.getrusage(resource.RUSAGE_SELF)
                connection.send(used.ru_utime + used.ru_stime)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


async def measure(arguments: argparse.Namespace, folder: Path) -> bool:
    context = multiprocessing.get_context("spawn")
    paths = [str(folder / f"{index}.sock") for index in range(arguments.replicas)]
    (scripts, scripts_end), (router, router_end) = context.Pipe(), context.Pipe()
    each = arguments.rate / arguments.streams
    processes = [
        context.Process(target=run_scripts, args=(paths, each, scripts_end), daemon=True),
        context.Process(target=run_router, args=(paths, router_end), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        direct, routed = [
            Endpoint(url=f"http://{HOST}:{await asyncio.to_thread(end.recv)}/v1", endpoint="chat")
            for end in (scripts, router)
        ]
        await whole_run(routed, requests(1, 1))
        costs_s = []
        for _ in range(arguments.repeat):
            began_s = await cpu_seconds(router)
            load = requests(arguments.streams, max(1, round(each * arguments.seconds)))
            run = await whole_run(routed, load)
            costs_s.append((await cpu_seconds(router) - began_s) / run.num_events)
            print(f"{run.num_events / run.elapsed_s:,.0f} tokens/s, {arguments.streams} streams")
        load, rate = requests(arguments.requests, EVENTS_OF_SHORT), arguments.arrivals / 2
        loads = [at_rate(load, rate, "poisson", seed) for seed in range(2)]
        runs = await asyncio.gather(*map(whole_run, (direct, routed), loads))
    finally:
        for process in processes:
            process.kill()
    by_replica, by_router = (
        Distribution.of([one.record.ttft_s for one in run.requests]) for run in runs
    )
    cpu_us, later_ms = min(costs_s) * 1e6, (by_router.p99 - by_replica.p99) * 1e3
    print(f"first event later at p50: {(by_router.p50 - by_replica.p50) * 1e3:.2f} ms")
    print(f"CPU of the router: {cpu_us:.1f} µs a token (at most {MAX_CPU_US:g})")
    print(f"first event later at p99: {later_ms:.2f} ms (at most {MAX_DELAY_MS:g})")
    return cpu_us <= MAX_CPU_US and later_ms <= MAX_DELAY_MS


def requests(count: int, num_events: int) -> list[ScheduledRequest]:
    sizes = Sizes(count, Span(PROMPT_WORDS, PROMPT_WORDS), Span(num_events, num_events))
    return make_workload(sizes, vocab_size=10_000, seed=0)


async def whole_run(place: Endpoint, schedule: list[ScheduledRequest]) -> OnlineRun:
    run = await run_online(place, schedule)
    run.require_all()
    return run


async def cpu_seconds(router: Connection) -> float:
    router.send("cpu")
    return float(await asyncio.to_thread(router.recv))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    number = above_zero(int)
    parser.add_argument("--replicas", type=number, default=4)
    parser.add_argument("--streams", type=number, default=256)
    parser.add_argument("--rate", type=above_zero(float), default=40_000.0, help="tokens a second")
    parser.add_argument("--seconds", type=above_zero(float), default=5.0)
    parser.add_argument("--arrivals", type=above_zero(float), default=50.0, help="a second")
    parser.add_argument("--requests", type=number, default=300)
    parser.add_argument("--repeat", type=number, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
        good = asyncio.Runner(loop_factory=new_event_loop).run(measure(arguments, Path(folder)))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
