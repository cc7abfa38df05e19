"""Events a second that the benchmarks' client reads: `python scripts/bench/bench_client.py`.

A server in another process writes events of the usual size to 256 connections, one at a time and as
fast as it can. `one core` is the rate by the client's CPU time; when several events
arrive before the client looks, it takes them at once, as it would under such a load.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

from minisgl.bench.online.client import post
from minisgl.client.address import Address
from minisgl.server.process import new_event_loop

NUM_CLIENTS = 256
NUM_EVENTS = 400  # for each
REPEATS = 5
LIMIT = 50_000
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1,'
    b'"model":"fake","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],'
    b'"usage":null}\n\n'
)
LAST = b"data: [DONE]\n\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class Source(asyncio.Protocol):
    """Collects connections, and answers all of them when there are enough."""

    def __init__(self, waiting: list[asyncio.Transport]) -> None:
        self._waiting = waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._waiting.append(transport)
        if len(self._waiting) == NUM_CLIENTS:
            self._answering = asyncio.ensure_future(answer([*self._waiting]))
            self._waiting.clear()


async def answer(clients: list[asyncio.Transport]) -> None:
    await asyncio.sleep(0.2)  # for their requests
    for body in (HEAD, *[chunk(EVENT)] * NUM_EVENTS, chunk(LAST) + chunk(b"")):
        for client in clients:
            client.write(body)
        await asyncio.sleep(0)


def serve(connection: Connection) -> None:
    async def run() -> None:
        waiting: list[asyncio.Transport] = []
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Source(waiting), "127.0.0.1", 0, backlog=1024)
        connection.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


async def measure(port: int) -> None:
    address = Address("http", "127.0.0.1", port, "/")
    best_cpu_s, best_rate = float("inf"), 0.0
    for _ in range(REPEATS):
        cpu_s = time.process_time()
        answers = await asyncio.gather(*[post(address, b"{}") for _ in range(NUM_CLIENTS)])
        cpu_s = time.process_time() - cpu_s
        assert all(len(answer.events) == NUM_EVENTS + 1 and answer.done for answer in answers)
        num_events = NUM_CLIENTS * NUM_EVENTS
        elapsed = max(a.times[-1] for a in answers) - min(a.times[0] for a in answers)
        best_cpu_s = min(best_cpu_s, cpu_s / num_events)
        best_rate = max(best_rate, num_events / elapsed)
    print(f"{NUM_CLIENTS} streams of {NUM_EVENTS} events, best of {REPEATS}")
    print(f"  received     {best_rate:10,.0f} events/s")
    print(f"  an event     {best_cpu_s * 1e6:10.1f} µs of CPU")
    print(f"  one core     {1 / best_cpu_s:10,.0f} events/s (limit: at least {LIMIT:,})")


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(measure(ours.recv()))
    server.kill()


if __name__ == "__main__":
    main()
