"""Host pages on their way between the ranks of two engines, and what may go wrong on the way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.host_copy_cases import cache_of, holds, numbering_of, write
from support.slow_lanes import SlowLane
from support.waiting import LIMIT_S

from minisgl.device.lanes import Lanes
from minisgl.distributed.addresses import Address
from minisgl.kvcache.copies import Copies, Load
from minisgl.kvcache.moves import Move, Place
from minisgl.tiers.carriers import connections, socket_pages
from minisgl.tiers.carriers.socket_pages import SocketPages
from minisgl.tiers.peers import page_exchange
from minisgl.tiers.peers.page_exchange import PageExchange
from minisgl.tiers.tiers import Tiers

PAGE_BYTES, NUM_PAGES = 50_000, 8
NAME = b"name of the transfer"
RANK = 1


class Rank:
    """Host pages of one rank, page N with bytes N, and its ends of transfers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.memory = [bytearray([page]) * PAGE_BYTES for page in range(NUM_PAGES)]
        self.ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.exchange = PageExchange(
            Address(path=str(folder / name)),
            b"a secret",
            RANK,
            PAGE_BYTES,
            lambda pages: self.views(pages),
            enter,
            [SocketPages()],
        )
        self.views: Callable[[Sequence[int]], list[memoryview]] = self.all_views

    def all_views(self, pages: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.memory[page]) for page in pages]

    def send(self, id: int, *pages: int, name: bytes = NAME) -> None:
        self.start(Move(id, Place.HOST, Place.ENGINE, pages, name=name))

    def receive(self, id: int, peer: Rank | str, *pages: int, name: bytes = NAME) -> None:
        address = str(peer.exchange.address) if isinstance(peer, Rank) else peer
        self.start(Move(id, Place.ENGINE, Place.HOST, pages, name=name, peers=("", address)))

    def start(self, move: Move) -> None:
        self.exchange.start(move, [], lambda *end: self.ends.put(end))

    def end(self) -> tuple[int, int]:
        return self.ends.get()


def enter() -> None:
    pass


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[Rank, Rank]]:
    """Of the engine that sends, and of the one that receives."""
    both = Rank(tmp_path, "sender"), Rank(tmp_path, "receiver")
    yield both
    for rank in both:
        rank.exchange.close()
        assert rank.ends.empty(), "a transfer ended twice"
    assert not [*tmp_path.iterdir()]


def test_pages_arrive_in_their_places_whoever_is_first(ranks: tuple[Rank, Rank]) -> None:
    sender, receiver = ranks
    sender.send(1, 5, 6, 7)
    receiver.receive(1, sender, 2, 0, 1)
    assert (sender.end(), receiver.end()) == ((1, 3), (1, 3))
    assert [set(page) for page in receiver.memory[:4]] == [{6}, {7}, {5}, {3}]
    receiver.receive(2, sender, 4, name=b"other")
    receiver.receive(3, sender, 5, name=b"third")
    sender.send(2, 1, name=b"third")
    sender.send(3, 0, name=b"other")
    assert {sender.end(), sender.end()} == {(2, 1), (3, 1)}
    assert {receiver.end(), receiver.end()} == {(2, 1), (3, 1)}
    assert (receiver.memory[4][0], receiver.memory[5][0]) == (0, 1)


def test_whoever_waits_in_vain_gives_up(
    ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_exchange, "SILENCE_S", 0.1)
    sender, receiver = ranks
    receiver.receive(1, sender, 0)  # which nobody sends
    assert receiver.end() == (1, 0)
    sender.send(1, 0)  # which nobody takes
    assert sender.end() == (1, 0)
    receiver.receive(2, sender, 0)  # too late
    assert receiver.end() == (2, 0)
    receiver.receive(3, "/nowhere/pages", 0)
    assert receiver.end() == (3, 0)


def test_a_page_that_came_in_part_does_not_count_and_the_ones_before_do(
    ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENCE_S", 0.2)
    monkeypatch.setattr(socket_pages, "PART_BYTES", PAGE_BYTES)
    sender, receiver = ranks
    sender.views = lambda pages: [*sender.all_views(pages[:2]), memoryview(bytes(10))]
    sender.send(1, 5, 6, 7)
    receiver.receive(1, sender, 0, 1, 2)
    assert sender.end() == receiver.end() == (1, 2)


def test_an_error_ends_the_transfer(
    ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ranks

    def fail(*_: object) -> list[memoryview]:
        raise RuntimeError("there is nothing left")

    sender.views = fail
    sender.send(1, 5)
    receiver.receive(1, sender, 0)
    assert (sender.end(), receiver.end()) == ((1, 0), (1, 0))
    receiver.views = fail
    receiver.receive(2, sender, 0)
    assert receiver.end() == (2, 0)
    monkeypatch.setattr(threading.Thread, "start", fail)
    sender.send(3, 5)
    receiver.receive(3, sender, 0)
    assert (sender.end(), receiver.end()) == ((3, 0), (3, 0))


def test_the_secret_is_not_in_what_is_printed_of_an_exchange(ranks: tuple[Rank, Rank]) -> None:
    assert "a secret" not in repr(ranks[0].exchange)


def test_nothing_ends_after_the_exchange_is_closed(tmp_path: Path) -> None:
    sender, receiver = Rank(tmp_path, "sender"), Rank(tmp_path, "receiver")
    sender.send(1, 0)
    opened, wanted = threading.Event(), threading.Event()

    def views(pages: Sequence[int]) -> list[memoryview]:
        wanted.set()
        assert opened.wait(LIMIT_S)
        return receiver.all_views(pages)

    receiver.views = views
    receiver.receive(1, sender, 3)
    assert wanted.wait()
    for rank in (sender, receiver):
        rank.exchange.close()
    opened.set()
    for thread in threading.enumerate():
        if thread.name == "minisgl-peer":
            thread.join()
    assert sender.ends.empty() and receiver.ends.empty()


def test_transfers_wait_for_the_copies_of_their_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [threading.Event(), threading.Event()]
    cpu = torch.device("cpu")
    memory = [cache_of(cpu), cache_of(cpu)]
    lanes = [type("Lane", (SlowLane,), {"gate": gate}) for gate in gates]
    caches = [
        Tiers(kv, 12, numbering_of(kv), Lanes(cpu), lane, number=RANK)
        for kv, lane in zip(memory, lanes, strict=True)
    ]
    for gate in gates:
        gate.set()
    addresses = [
        cache.listen(str(tmp_path / name), b"").ranks[0]
        for cache, name in zip(caches, "ab", strict=True)
    ]
    assert addresses == [f"{tmp_path}/a.{RANK}", f"{tmp_path}/b.{RANK}"]
    for gate in gates:
        gate.clear()
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    write(memory[0], 1, 5.0)
    caches[0].copies.queue(Copies(offloads=((1, 3),)))
    write(memory[1], 2, 1.0)
    caches[1].copies.queue(Copies(offloads=((2, 4),)))
    # Of a page that is received next.
    early = caches[1].copies.queue(Copies(loads=(Load(1, (4,), (7,)),)))()
    send = Move(1, Place.HOST, Place.ENGINE, (3,), name=NAME)
    take = Move(1, Place.ENGINE, Place.HOST, (4,), name=NAME, peers=("", addresses[0]))
    caches[0].move([send], lambda *end: ends.put(f"sent {end}"))
    caches[1].move([take], lambda *end: ends.put(f"received {end}"))
    for gate in gates:
        with pytest.raises(queue.Empty):
            ends.get(timeout=0.05)
        gate.set()
    assert {ends.get(), ends.get()} == {"sent (1, 1)", "received (1, 1)"}
    caches[1].copies.queue(Copies(loads=(Load(2, (4,), (8,)),)))()[2].wait()
    early[1].wait()
    assert holds(memory[1], 8, 5.0) and holds(memory[1], 7, 1.0)
    for cache in caches:
        cache.close()
