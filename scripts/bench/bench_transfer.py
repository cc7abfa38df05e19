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
from typing import Any

import torch
from script_runner import above_zero

from minisgl.device.lanes import Lanes
from minisgl.distributed.addresses import Address
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kvcache.moves import Move, Place
from minisgl.tiers.carriers.carrier import Carrier
from minisgl.tiers.carriers.device_pages import DevicePages
from minisgl.tiers.carriers.nixl_pages import NixlPages, is_installed
from minisgl.tiers.carriers.socket_pages import SocketPages
from minisgl.tiers.peers.page_exchange import PageExchange

NAME = b"name of the transfer"
LIMIT_S = 120
NUM_PLANES = 80  # of a page on a device: a model with 40 layers has as many


class Rank:
    """Pages of one rank, which sends or receives all of them."""

    def __init__(self, carrier: str, address: str, num_pages: int, page_bytes: int) -> None:
        self.place, self._first, self._num_pages = Place.HOST, 0, num_pages
        self.memory = [torch.zeros((num_pages, page_bytes), dtype=torch.uint8)]
        carriers: list[Carrier[memoryview]] = []
        if carrier != "socket":
            regions = [(self.memory[0].data_ptr(), self.memory[0].nbytes)]
            nixl = NixlPages(lambda: regions, True, lambda: None)
            wait_for(nixl)
            carriers.append(nixl)
        if carrier != "NIXL":
            carriers.append(SocketPages())
        views = [page.data for page in self.memory[0].numpy()]
        self._meet(address, page_bytes, lambda _: views, lambda: None, carriers)

    def _meet(self, address: str, page_bytes: int, *more: Any) -> None:
        self.exchange = PageExchange(Address.parse(address), b"", 0, page_bytes, *more)
        self._ends: queue.SimpleQueue[int] = queue.SimpleQueue()

    def synchronize(self) -> None:
        """Until the device has done what it was told."""

    def fill(self, value: int) -> None:
        for plane in self.memory:
            plane.fill_(value)
        self.synchronize()

    def holds(self, value: int) -> bool:
        return all(bool((plane[self._first :] == value).all()) for plane in self.memory)

    @property
    def num_bytes(self) -> int:
        return sum(plane[self._first :].nbytes for plane in self.memory)

    def send(self) -> None:
        self._start(self.place, Place.ENGINE)

    def receive(self, peer: str) -> None:
        self._start(Place.ENGINE, self.place, peer)

    def _start(self, source: Place, target: Place, *peers: str) -> None:
        pages = tuple(range(self._first, self._first + self._num_pages))
        move = Move(1, source, target, pages, name=NAME, peers=peers)
        self.exchange.start(move, [], lambda _, num_pages: self._ends.put(num_pages))

    def wait(self) -> None:
        if self._ends.get(timeout=LIMIT_S) != self._num_pages:
            raise SystemExit("a transfer failed")


class DeviceRank(Rank):
    """Pages of a device, in place of host memory. The scratch page does not travel."""

    def __init__(self, gpu: int, address: str, num_pages: int, page_bytes: int) -> None:
        """gpu: counted as a list is."""
        self.place, self._first, self._num_pages = Place.DEVICE, 1, num_pages
        gpus = range(torch.cuda.device_count())
        device = torch.device("cuda", gpus[gpu]) if gpus else torch.device("cpu")
        self._lanes = Lanes(device)
        self._lanes.enter_thread()
        shape = (num_pages + 1, max(1, page_bytes // NUM_PLANES // 16) * 16)
        self.memory = [
            torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(NUM_PLANES)
        ]
        self.synchronize()
        planes = Planes.of(self.memory)
        carriers = [DevicePages(planes, self._lanes)]
        self._meet(address, planes.page_bytes, lambda _: [], self._lanes.enter_thread, [], carriers)

    def synchronize(self) -> None:
        self._lanes.synchronize()


def rank_of(carrier: str, gpu: int, address: str, num_pages: int, page_bytes: int) -> Rank:
    if carrier == "device":
        return DeviceRank(gpu, address, num_pages, page_bytes)
    return Rank(carrier, address, num_pages, page_bytes)


def wait_for(nixl: NixlPages) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not nixl.is_ready:
        if time.monotonic() > deadline:
            raise SystemExit("NIXL does not start")
        time.sleep(0.01)


def send(pipe: Connection, address: str, carrier: str, num_pages: int, page_bytes: int) -> None:
    """The other process: sends all pages as often as it is told to."""
    rank = rank_of(carrier, -1, address, num_pages, page_bytes)
    rank.fill(7)
    pipe.send(str(rank.exchange.address))
    while pipe.recv():
        rank.send()
        rank.wait()
    rank.exchange.close()


def measure(address: str, carrier: str, arguments: argparse.Namespace) -> list[float]:
    """GB/s of each round; the first connects, and is not among them."""
    sizes = (arguments.pages, int(arguments.page_mb * 1e6))
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=send, args=(end, address, carrier, *sizes), daemon=True)
    process.start()
    own = "127.0.0.1:0" if address.startswith("127") else f"{address}-receiver"
    rank = rank_of(carrier, 0, own, *sizes)
    peer = pipe.recv()
    found = []
    for _ in range(arguments.rounds + 1):
        pipe.send(True)
        began = time.perf_counter()
        rank.receive(peer)
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
