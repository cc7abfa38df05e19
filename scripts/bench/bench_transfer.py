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
NUM_PLANES = 80  # of a page on a device, as of a model with 40 layers


class Rank:
    """Host pages of one rank, which sends or receives all of them."""

    place = Place.HOST

    def __init__(self, address: str, carrier: str, num_pages: int, page_bytes: int) -> None:
        self.memory = np.zeros((num_pages, page_bytes), np.uint8)
        regions = [(self.memory.ctypes.data, self.memory.nbytes)]
        carriers: list[Carrier[memoryview]] = []
        if carrier != "socket":
            nixl = NixlPages(lambda: regions, True, lambda: None)
            wait_for(nixl)
            carriers.append(nixl)
        if carrier != "NIXL":
            carriers.append(SocketPages())
        views = [page.data for page in self.memory]
        self.exchange = PageExchange(
            Address.parse(address), b"", 0, page_bytes, lambda _: views, lambda: None, carriers
        )
        self._ends: queue.SimpleQueue[int] = queue.SimpleQueue()

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def holds(self, value: int) -> bool:
        return bool((self.memory == value).all())

    def send(self) -> None:
        self._start(Move(1, self.place, Place.ENGINE, self._pages(), name=NAME))

    def receive(self, peer: str) -> None:
        self._start(Move(1, Place.ENGINE, self.place, self._pages(), name=NAME, peers=(peer,)))

    def _pages(self) -> tuple[int, ...]:
        return tuple(range(len(self.memory)))

    def _start(self, move: Move) -> None:
        self._wanted = len(move.pages)
        self.exchange.start(move, [], lambda _, num_pages: self._ends.put(num_pages))

    def wait(self) -> None:
        if self._ends.get(timeout=LIMIT_S) != self._wanted:
            raise SystemExit("a transfer failed")


class DeviceRank(Rank):
    """The same with pages of a device, but for the scratch page."""

    place = Place.DEVICE

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
        planes = Planes.of(self.planes)
        self.exchange = PageExchange(
            Address.parse(address),
            b"",
            0,
            planes.page_bytes,
            lambda _: [],
            lanes.enter_thread,
            [],
            [DevicePages(planes, lanes)],
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

    def _pages(self) -> tuple[int, ...]:
        return tuple(range(1, len(self.planes[0])))


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
        rank.send()
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
