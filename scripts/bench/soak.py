"""Runs a server under all kinds of clients, and then checks that no resource has leaked.

    python scripts/bench/soak.py [--minutes 10]

The server runs in this process, with few pages and a short queue; its clients run in another one
(scripts/bench/soak_clients.py), for as long as --minutes says. At the end: every page is free or
cached and the audit passes, every accepted request has ended once, the same questions got the
same answers, rejections had the expected errors, memory did not grow (in runs of two
minutes and more), and the server stops when it is told to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script_runner import above_zero

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream
from minisgl.request import Request
from minisgl.server.config import ServerConfig
from minisgl.server.process import ServerProcess, bind

HOST = "127.0.0.1"
CLIENTS = Path(__file__).with_name("soak_clients.py")
ENGINE = EngineConfig(
    device="cpu",
    num_pages=120,
    page_size=16,
    max_running_requests=16,
    max_queued_requests=16,
    max_prefill_length=64,
    schedule_conservativeness=0.05,
)
MAX_GROWTH_BYTES = 24 << 20
# Until then caches and pools fill, and memory that grows says nothing.
MIN_MINUTES_TO_JUDGE_MEMORY = 2.0


class Watched(AsyncEngine):
    """Knows what it has accepted and how it ended."""

    def watch(self) -> None:
        self.endings: Counter[str] = Counter()
        self.open: list[Request] = []
        self.num_accepted = 0

    def submit(self, *args: Any, **options: Any) -> OutputStream:
        stream = super().submit(*args, **options)
        self.num_accepted += 1
        self.open.append(stream.request)
        if len(self.open) > 500:
            self.count_endings()
        return stream

    def count_endings(self) -> None:
        ended = [request for request in self.open if request.finished]
        self.endings.update(request.finish_reason.value for request in ended)  # type: ignore
        self.open = [request for request in self.open if not request.finished]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    def __init__(self, minutes: float) -> None:
        self._minutes = minutes
        self.faults: list[str] = ["the server stopped before its clients"]

    def run(self) -> int:
        with bind(ServerConfig(host=HOST, port=0)) as probe:
            port: int = probe.getsockname()[1]
        return ServerProcess(ENGINE, ServerConfig(host=HOST, port=port), self._starter(port)).run()

    def _starter(self, port: int) -> Any:
        async def start(config: EngineConfig) -> Watched:
            engine = await Watched.start(config)
            assert isinstance(engine, Watched)
            engine.watch()
            self._soaking = asyncio.create_task(self._soak(engine, port))
            return engine

        return start

    async def _soak(self, engine: Watched, port: int) -> None:
        try:
            self.faults = await self._clients(engine, port)
        except Exception as error:
            logging.exception("the soak test itself has failed")
            self.faults = [f"{type(error).__name__}: {error}"]
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    async def _clients(self, engine: Watched, port: int) -> list[str]:
        command = (sys.executable, CLIENTS, str(port), str(self._minutes))
        clients = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        talking = asyncio.ensure_future(clients.communicate())
        sizes: list[int] = []
        while not talking.done():
            await asyncio.wait([talking], timeout=self._minutes)  # so 60 samples
            sizes.append(resident_bytes())
        tally = json.loads((await talking)[0])
        return [*tally["faults"], *await self._check(engine, tally["counts"], sizes)]

    async def _check(
        self, engine: Watched, counts: dict[str, int], sizes: Sequence[int]
    ) -> list[str]:
        faults: list[str] = []
        deadline = time.monotonic() + 10  # for the server to notice the last who left
        while (stats := engine.stats()).num_running + stats.num_queued:
            if time.monotonic() > deadline:
                faults.append(f"still running or queued: {stats}")
                break
            await asyncio.sleep(0.01)
        try:
            engine.audit()
        except AssertionError as error:
            faults.append(f"the audit failed: {error!r}")
        if stats.num_free_pages + stats.num_cached_pages != stats.num_pages:
            faults.append(f"pages are neither free nor cached: {stats}")
        engine.count_endings()
        if engine.open or engine.endings.total() != engine.num_accepted:
            faults.append(f"{engine.num_accepted} accepted, ended: {dict(engine.endings)}")
        if engine.endings["error"] or engine.failure:
            faults.append(f"requests failed: {dict(engine.endings)}, {engine.failure}")
        # The first part is when caches and pools fill.
        settled = sizes[len(sizes) // 3 :]
        half = len(settled) // 2
        growth = statistics.median(settled[half:]) - statistics.median(settled[: half or 1])
        if growth > MAX_GROWTH_BYTES and self._minutes >= MIN_MINUTES_TO_JUDGE_MEMORY:
            faults.append(f"memory grew by {growth / 1e6:.1f} MB: {[s >> 20 for s in sizes]} MiB")
        for what, count in sorted(counts.items()):
            print(f"{what:24} {count:8,}")
        for reason, count in sorted(engine.endings.items()):
            print(f"{'ended by ' + reason:24} {count:8,}")
        print(f"{'retractions':24} {stats.counters.num_retractions:8,}")
        print(f"{'steps':24} {stats.counters.num_steps:8,}")
        print(f"memory {statistics.median(settled) / 1e6:.1f} MB, growth {growth / 1e6:.1f} MB")
        return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=above_zero(float), default=10.0, help="default: 10")
    minutes = parser.parse_args().minutes
    logging.basicConfig(level="WARNING")
    soak = Soak(minutes)
    exit_code = soak.run()
    for fault, count in Counter(soak.faults).most_common(20):
        print(f"FAULT {fault[:500]}" + (f" ({count} times)" if count > 1 else ""))
    if exit_code:
        print(f"FAULT the server ended with exit code {exit_code}")
    print("failed" if soak.faults or exit_code else "passed")
    return 1 if soak.faults else exit_code


if __name__ == "__main__":
    sys.exit(main())
