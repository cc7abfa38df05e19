"""Pages of a device that go straight to another rank, in this process or between two."""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from minisgl.device.copy_lanes import CopyLane, Mark, copy_lane
from minisgl.device.lanes import Lanes
from minisgl.distributed.addresses import Address
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kvcache.moves import Move, Place
from minisgl.tiers.carriers import device_pages
from minisgl.tiers.carriers.device_pages import DevicePages
from minisgl.tiers.carriers.socket_pages import SocketPages
from minisgl.tiers.peers.page_exchange import PageExchange

CPU = torch.device("cpu")
NUM_PAGES = 40
# The planes of a cache: dtype and shape of a page.
Case = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
CASES: dict[str, Case] = {
    "tiny": ((torch.bfloat16, (4, 2, 8)), (torch.uint8, (3,)), (torch.float32, (1,))),
    "words": ((torch.float8_e4m3fn, (16, 8)), (torch.float32, (6, 5)), (torch.int64, (1,))),
    "14B": ((torch.bfloat16, (16, 8, 128)),) * 80,  # of 40 layers
}


def random_planes(case: str, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    planes = []
    for dtype, shape in CASES[case]:
        size = torch.empty(shape, dtype=dtype).nbytes
        plane = torch.randint(0, 256, (NUM_PAGES, size), generator=generator, dtype=torch.uint8)
        planes.append(plane.view(dtype).view(NUM_PAGES, *shape))
    return planes


class DeviceRank:
    """A rank whose pages hold random bytes, and its ends of transfers."""

    def __init__(
        self,
        address: str,
        case: str = "tiny",
        seed: int = 0,
        device: torch.device = CPU,
        make_lane: Callable[[Lanes], CopyLane] = copy_lane,
        part_pages: int = 4,
    ) -> None:
        self.case, self.seed = case, seed
        self.planes = [plane.to(device) for plane in random_planes(case, seed)]
        self.ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        planes, lanes = Planes.of(self.planes), Lanes(device)
        lanes.synchronize()
        with patch.object(device_pages, "PART_BYTES", part_pages * planes.page_bytes):
            self.device = DevicePages(planes, lanes, make_lane)
        self.exchange = PageExchange(
            Address(path=address),
            b"",
            0,
            planes.page_bytes,
            lambda _: [],
            lanes.enter_thread,
            [SocketPages()],
            [self.device],
        )

    @property
    def address(self) -> str:
        return str(self.exchange.address)

    def send(self, id: int, pages: Sequence[int], name: bytes, after: Sequence[Mark] = ()) -> None:
        self.start(Move(id, Place.DEVICE, Place.ENGINE, tuple(pages), name=name), after)

    def receive(
        self, id: int, peer: str, pages: Sequence[int], name: bytes, after: Sequence[Mark] = ()
    ) -> None:
        self.start(
            Move(id, Place.ENGINE, Place.DEVICE, tuple(pages), name=name, peers=(peer,)), after
        )

    def start(self, move: Move, after: Sequence[Mark] = ()) -> None:
        self.exchange.start(move, after, lambda *end: self.ends.put(end))

    def end(self) -> tuple[int, int]:
        return self.ends.get()

    def expect(self, sender_seed: int, pages: Sequence[int], targets: Sequence[int]) -> None:
        """Assert that `targets` hold these pages of another rank, and nothing else has changed."""
        theirs, mine = (random_planes(self.case, seed) for seed in (sender_seed, self.seed))
        for plane, before, source in zip(self.planes, mine, theirs, strict=True):
            expected, found = as_bytes(before), as_bytes(plane.cpu())
            expected[list(targets)] = as_bytes(source)[list(pages)]
            assert torch.equal(found, expected)

    def reset(self) -> None:
        for plane, before in zip(self.planes, random_planes(self.case, self.seed), strict=True):
            as_bytes(plane).copy_(as_bytes(before))
        if self.planes[0].is_cuda:
            torch.cuda.synchronize(self.planes[0].device)

    def close(self) -> None:
        self.exchange.close()
        assert self.ends.empty(), "a move ended twice"


def as_bytes(plane: Tensor) -> Tensor:
    return plane.view(NUM_PAGES, -1).view(torch.uint8)


def some_pages(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(1, NUM_PAGES), count)


def check_transfers(sender: DeviceRank, receiver: DeviceRank, counts: Sequence[int]) -> None:
    """So many pages arrive, one move after the other, bit by bit in their places.

    sender: with seed 1.
    """
    for id, count in enumerate(counts, 1):
        pages, targets, name = some_pages(count, id), some_pages(count, -id), b"%d" % id
        sender.send(id, pages, name)
        receiver.receive(id, sender.address, targets, name)
        assert sender.end() == receiver.end() == (id, count)
        receiver.expect(1, pages, targets)
        receiver.reset()


def check_between_processes(
    folder: Path, case: str, part_pages: int, device: torch.device, gpus: tuple[str, str] = ("", "")
) -> None:
    """A process sends pages to another one until it is killed.

    part_pages: odd numbers of pages travel, in parts of this one. gpus: all that the sender sees,
    and the receiver.
    """
    context = multiprocessing.get_context("spawn")
    asking, asked = context.Pipe()
    sender = context.Process(
        target=_send_what_is_asked, args=(str(folder / "a"), case, part_pages, device, asked)
    )
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=gpus[0]):
        sender.start()
    try:
        arguments = (str(folder / "b"), case, part_pages, device, asking, sender.pid)
        receiver = context.Process(target=_check_receiving, args=arguments)
        with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=gpus[1]):
            receiver.start()
        receiver.join()
        receiver.kill()
        receiver.join()
        assert receiver.exitcode == 0, "see what it has printed"
    finally:
        sender.kill()
        sender.join()


def _send_what_is_asked(
    address: str, case: str, part_pages: int, device: torch.device, asked: Connection
) -> None:
    """The sender, with seed 1, as a process: tells its address, then the end of each move."""
    with closing(DeviceRank(address, case, 1, device, part_pages=part_pages)) as rank:
        asked.send(rank.address)
        for id, pages, name in iter(asked.recv, None):
            rank.send(id, pages, name)
            asked.send(rank.end())


def _check_receiving(
    address: str, case: str, part_pages: int, device: torch.device, sender: Connection, pid: int
) -> None:
    """Receive from `_send_what_is_asked`, and kill it in the middle of a move.

    What has not been confirmed does not count, and this process goes on with what it has mapped.
    """
    with closing(DeviceRank(address, case, 2, device, part_pages=part_pages)) as rank:
        assert sender.poll(120)
        peer = sender.recv()
        for id, count in enumerate((1, part_pages, 2 * part_pages + 1), 1):
            pages, targets = some_pages(count, id), some_pages(count, -id)
            sender.send((id, pages, b"%d" % id))
            rank.receive(id, peer, targets, b"%d" % id)
            assert rank.end() == (id, count)
            assert sender.recv() == (id, count)
            rank.expect(1, pages, targets)
            rank.reset()

        fetch, fetched = rank.device.fetch, list[tuple[socket.socket, str, bytes]]()

        def fetch_and_kill(
            peer: socket.socket, address: str, description: bytes, pages: Sequence[int]
        ) -> None:
            fetch(peer, address, description, pages)
            fetched.append((peer, address, description))
            if len(fetched) == 2:
                os.kill(pid, signal.SIGKILL)

        pages, targets = some_pages(3 * part_pages, 8), some_pages(3 * part_pages, 9)
        sender.send((4, pages, b"4"))
        with patch.object(rank.device, "fetch", fetch_and_kill):
            rank.receive(4, peer, targets, b"4")
            assert rank.end() == (4, part_pages)
        assert len(fetched) == 2
        done = 2 * part_pages
        rank.expect(1, pages[:done], targets[:done])
        fetch(*fetched[0], targets[:1])  # only this process has that memory now
        rank.reset()
        rank.send(5, [3, 1, 2], b"5")
        rank.receive(6, rank.address, [7, 8, 9], b"5")
        assert {rank.end(), rank.end()} == {(5, 3), (6, 3)}
        rank.expect(rank.seed, [3, 1, 2], [7, 8, 9])
