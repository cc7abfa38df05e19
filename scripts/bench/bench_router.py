"""Measures the router alone: `python scripts/bench/bench_router.py`.

Replicas are replaced by scripts, in a process of their own, that write events of the usual size at
a given rate, all clients are in another one, and the router has a third. The host should have
three idle cores.

tokens: --streams streams at once, with --rate events a second together; the CPU time of the
router's process for each. First bytes: requests arrive --arrivals a second, through the router and
without it; how much later the first byte of an answer comes at each percentile.
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
import time
from multiprocessing.connection import Connection
from pathlib import Path

from rich.table import Table
from script_runner import above_zero

from minisgl.bench.figures import Distribution
from minisgl.bench.report.output import make_console
from minisgl.router.app import create_router_app
from minisgl.router.config import CACHE
from minisgl.router.fleet import Fleet, ReplicaState
from minisgl.router.relay import RelayConnection
from minisgl.server.config import ServerConfig
from minisgl.server.process import Server, bind, http_settings, new_event_loop

MAX_CPU_US = 10.0  # for a token
MAX_DELAY_MS = 1.0  # of the first byte, at p99
CHAT = "/v1/chat/completions"
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\n%stransfer-encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1,"model":"scripted","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = b"data: [DONE]\n\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


CHUNK = chunk(EVENT)
END = chunk(LAST) + chunk(b"")


class Script(asyncio.Protocol):
    """A server that answers every request with a stream; its body says how many events a second."""

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        _, end, body = self._data.partition(b"\r\n\r\n")
        if not end or not body.endswith(b"}"):
            return
        self._data = b""
        asked = json.loads(body)
        asyncio.ensure_future(self._answer(asked["num_events"], asked["events_per_s"]))  # noqa: RUF006

    async def _answer(self, num_events: int, events_per_s: float) -> None:
        write, loop = self._transport.write, asyncio.get_running_loop()
        write(HEAD % b"")
        due = loop.time() + random.random() / events_per_s
        for _ in range(num_events):
            await asyncio.sleep(due - loop.time())
            write(CHUNK)
            due += 1 / events_per_s
        write(END)


def run_scripts(paths: list[str], connection: Connection) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_unix_server(Script, path, backlog=1024) for path in paths]
        connection.send("ready")
        await asyncio.gather(*(server.serve_forever() for server in servers))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


def run_router(paths: list[str], connection: Connection) -> None:
    """Route until the other end is closed; answers each message with the CPU seconds so far."""

    async def run() -> None:
        fleet = Fleet(paths, CACHE)
        fleet.update([ReplicaState(is_ready=True, start=1)] * len(paths))
        config = ServerConfig(port=0)
        with bind(config) as listener:
            settings = http_settings(create_router_app(fleet, config), connection=RelayConnection)
            server = Server(settings)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            connection.send(listener.getsockname()[1])
            while await asyncio.to_thread(_asked, connection):
                used = resource.getrusage(resource.RUSAGE_SELF)
                connection.send(used.ru_utime + used.ru_stime)
            server.should_exit = True
            await serving

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


def _asked(connection: Connection) -> bool:
    try:
        connection.recv()
    except EOFError:
        return False
    return True


class Reader(asyncio.Protocol):
    """A client that counts what it reads, and notes when the first byte of an event came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.first_s = 0.0
        self.num_bytes = 0
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.first_s:
            self.first_s = time.perf_counter() - self.sent_s
        self.num_bytes += len(data)
        self._tail = (self._tail + data)[-5:]
        if self._tail == b"0\r\n\r\n":
            self._transport.close()
            self.finished.set_result(None)


def request_of(num_events: int, events_per_s: float, number: int) -> bytes:
    asked = {
        "messages": [{"role": "user", "content": f"{number} is the number of a question. " * 8}],
        "stream": True,
        "num_events": num_events,
        "events_per_s": events_per_s,
    }
    body = json.dumps(asked).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def read(place: int | str, request: bytes) -> Reader:
    loop = asyncio.get_running_loop()
    if isinstance(place, str):
        _, reader = await loop.create_unix_connection(lambda: Reader(request), place)
    else:
        _, reader = await loop.create_connection(lambda: Reader(request), "127.0.0.1", place)
    await reader.finished
    return reader


async def measure_tokens(port: int, router: Connection, arguments: argparse.Namespace) -> float:
    """CPU µs of the router for each token."""
    each = arguments.rate / arguments.streams
    num_events = max(1, round(each * arguments.seconds))

    async def cpu_s() -> float:
        router.send("cpu")
        return float(await asyncio.to_thread(router.recv))

    began_s, cpu_began_s = time.perf_counter(), await cpu_s()
    readers = await asyncio.gather(
        *(read(port, request_of(num_events, each, number)) for number in range(arguments.streams))
    )
    elapsed_s, used_s = time.perf_counter() - began_s, await cpu_s() - cpu_began_s
    assert all(reader.num_bytes > num_events * len(CHUNK) for reader in readers)
    num_tokens = num_events * arguments.streams
    print(
        f"{num_tokens / elapsed_s:,.0f} tokens/s in {elapsed_s:.1f} s, {arguments.streams} streams"
    )
    return used_s / num_tokens * 1e6


async def measure_first_bytes(
    places: tuple[int | str, ...], arguments: argparse.Namespace
) -> list[Distribution]:
    """Seconds to the first byte at each of `places`, which take turns."""
    found: dict[int | str, list[float]] = {place: [] for place in places}
    rng = random.Random(0)

    async def one(place: int | str, number: int) -> None:
        reader = await read(place, request_of(20, 100, number))
        found[place].append(reader.first_s)

    tasks = []
    for number in range(arguments.requests):
        for place in places:
            tasks.append(asyncio.ensure_future(one(place, number)))
            await asyncio.sleep(rng.expovariate(arguments.arrivals))
    await asyncio.gather(*tasks)
    return [Distribution.of(times) for times in found.values()]


async def measure(arguments: argparse.Namespace, folder: Path) -> bool:
    context = multiprocessing.get_context("spawn")
    paths = [str(folder / f"{index}.sock") for index in range(arguments.replicas)]
    scripts, scripts_end = context.Pipe()
    router, router_end = context.Pipe()
    processes = [
        context.Process(target=run_scripts, args=(paths, scripts_end), daemon=True),
        context.Process(target=run_router, args=(paths, router_end), daemon=True),
    ]
    for process in processes:
        process.start()
    router_end.close()
    try:
        await asyncio.to_thread(scripts.recv)
        port: int = await asyncio.to_thread(router.recv)
        await read(port, request_of(1, 1000, 0))
        cpu_us = min(
            [await measure_tokens(port, router, arguments) for _ in range(arguments.repeat)]
        )
        direct, routed = await measure_first_bytes((paths[0], port), arguments)
    finally:
        router.close()
        for process in processes:
            process.kill()
    table = Table("first byte, ms", "p50", "p99")
    delays = [(routed.p50 - direct.p50) * 1e3, (routed.p99 - direct.p99) * 1e3]
    for name, values in (("replica", direct), ("through the router", routed)):
        table.add_row(name, f"{values.p50 * 1e3:.2f}", f"{values.p99 * 1e3:.2f}")
    table.add_row("later", *(f"{delay:.2f}" for delay in delays))
    console = make_console()
    console.print(table)
    console.print(f"CPU of the router: {cpu_us:.1f} µs a token (at most {MAX_CPU_US:g})")
    console.print(f"first byte later at p99: {delays[1]:.2f} ms (at most {MAX_DELAY_MS:g})")
    return cpu_us <= MAX_CPU_US and delays[1] <= MAX_DELAY_MS


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
