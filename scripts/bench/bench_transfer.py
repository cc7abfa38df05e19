"""Measures transfers of KV pages between two processes of this machine: by socket, by NIXL, and
straight from one device to the other.

    python scripts/bench/bench_transfer.py [--page-mb 2.6] [--pages 400] [--rounds 5]

The code is that of engines with roles: one rank sends host pages to another. By "chosen", ranks
measure both ways as they go, as engines do where NIXL is installed; without it, only sockets are
measured. In engines on GPUs host memory is pinned; here it is not. By "device", pages travel from
the last GPU to the first, which may be the same, or within host memory where there is none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from minisgl.bench.script import above_zero
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kvcache.store import Transfer, Way
from minisgl.runner import nixl_pages
from minisgl.runner.device_pages import DevicePages
from minisgl.runner.lanes import Lanes
from minisgl.runner.nixl_pages import NixlPages, is_installed
from minisgl.runner.page_exchange import PageExchange
from minisgl.runner.page_wire import Address

NAME = b"name of the transfer"
LIMIT_S = 120
NUM_PLANES = 80  # of a page on a device, as of a model with 40 layers


class Rank:
    """Host pages of one rank, which sends or receives all of them."""

    def __init__(self, address: str, carrier: str, num_pages: int, page_bytes: int) -> None:
        self.memory = np.zeros((num_pages, page_bytes), np.uint8)
        regions = [(self.memory.ctypes.data, self.memory.nbytes)]
        nixl = None
        if carrier == "NIXL":
            nixl_pages.NUM_TRIES = 1 << 60  # it never comes to the other way
        if carrier != "socket":
            nixl = NixlPages(lambda: regions, True, lambda: None)
            wait_for(nixl)
        views = [page.data for page in self.memory]
        self.exchange = PageExchange(
            Address.parse(address), b"", 0, lambda pages: views, lambda: None, nixl
        )
        self._ends: queue.SimpleQueue[int] = queue.SimpleQueue()

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def holds(self, value: int) -> bool:
        return bool((self.memory == value).all())

    def transfer(self, way: Way, peer: str = "") -> None:
        pages = tuple(range(len(self.memory)))
        self._queue(Transfer(1, way, (), pages, NAME, (peer,)))

    def _queue(self, transfer: Transfer) -> None:
        self._wanted = transfer.num_pages
        self.exchange.queue(transfer, [], lambda _, num_pages: self._ends.put(num_pages))

    def wait(self) -> None:
        if self._ends.get(timeout=LIMIT_S) != self._wanted:
            raise SystemExit("a transfer failed")


class DeviceRank(Rank):
    """The same with pages of a device, but for the scratch page."""

    def __init__(self, address: str, gpu: int, num_pages: int, page_bytes: int) -> None:
        """gpu: counted as a list is."""
        gpus = range(torch.cuda.device_count())
        device = torch.device("cuda", gpus[gpu]) if gpus else torch.device("cpu")
        lanes = Lanes(device)
        lanes.enter_thread()
        shape = (num_pages + 1, max(1, page_bytes // NUM_PLANES // 16) * 16)
        self.planes = [
            torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(NUM_PLANES)
        ]
        lanes.synchronize()
        pages = DevicePages(Planes.of(self.planes), lanes)
        self.exchange = PageExchange(
            Address.parse(address), b"", 0, lambda _: [], lanes.enter_thread, None, pages
        )
        self._lanes = lanes
        self._ends = queue.SimpleQueue()

    @property
    def num_bytes(self) -> int:
        return sum(plane[1:].nbytes for plane in self.planes)

    def fill(self, value: int) -> None:
        for plane in self.planes:
            plane.fill_(value)
        self._lanes.synchronize()

    def holds(self, value: int) -> bool:
        return all(bool((plane[1:] == value).all()) for plane in self.planes)

    def transfer(self, way: Way, peer: str = "") -> None:
        pages = tuple(range(1, len(self.planes[0])))
        self._queue(Transfer(1, way, (), (), NAME, (peer,), pages))


def wait_for(nixl: NixlPages) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not nixl.is_ready:
        if time.monotonic() > deadline:
            raise SystemExit("NIXL does not start")
        time.sleep(0.01)


def send(pipe: Connection, address: str, carrier: str, num_pages: int, page_bytes: int) -> None:
    """The other process: sends all pages as often as it is told to."""
    rank: Rank
    if carrier == "device":
        rank = DeviceRank(address, -1, num_pages, page_bytes)
    else:
        rank = Rank(address, carrier, num_pages, page_bytes)
    rank.fill(7)
    pipe.send(str(rank.exchange.address))
    while pipe.recv():
        rank.transfer(Way.SEND)
        rank.wait()
    rank.exchange.close()


def measure(address: str, carrier: str, arguments: argparse.Namespace) -> list[float]:
    """GB/s of each round; the first connects, and is not among them."""
    page_bytes = int(arguments.page_mb * 1e6)
    sizes = (carrier, arguments.pages, page_bytes)
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=send, args=(end, address, *sizes), daemon=True)
    process.start()
    own = "127.0.0.1:0" if address.startswith("127") else f"{address}-receiver"
    rank = DeviceRank(own, 0, *sizes[1:]) if carrier == "device" else Rank(own, *sizes)
    peer = pipe.recv()
    found = []
    for _ in range(arguments.rounds + 1):
        pipe.send(True)
        began = time.perf_counter()
        rank.transfer(Way.RECEIVE, peer)
        rank.wait()
        found.append(rank.num_bytes / (time.perf_counter() - began) / 1e9)
    assert rank.holds(7), "other bytes have come"
    pipe.send(False)
    process.join(LIMIT_S)
    rank.exchange.close()
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--page-mb", type=above_zero(float), default=2.6, help="bytes of a page, in 10^6"
    )
    parser.add_argument("--pages", type=above_zero(int), default=400, help="pages of a transfer")
    parser.add_argument("--rounds", type=above_zero(int), default=5, help="transfers of each kind")
    arguments = parser.parse_args()
    print(f"{arguments.pages} pages of {arguments.page_mb:g} MB, GB/s")
    print(f"{'':24}{'median':>8}{'lowest':>8}{'highest':>8}")
    with tempfile.TemporaryDirectory(prefix="minisgl-", dir="/tmp") as folder:
        for carrier in ("socket", *(("NIXL", "chosen") if is_installed() else ()), "device"):
            ways = (("Unix", str(Path(folder) / carrier)), ("TCP", "127.0.0.1:0"))
            for name, address in ways[: 1 if carrier == "device" else 2]:
                rates = measure(address, carrier, arguments)
                row = (statistics.median(rates), min(rates), max(rates))
                print(f"{f'{carrier}, {name}':24}" + "".join(f"{rate:8.2f}" for rate in row))


if __name__ == "__main__":
    main()
