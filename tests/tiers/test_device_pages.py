"""Pages that go straight from device to device, and what may go wrong on the way."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.device_page_cases import (
    CPU,
    DeviceRank,
    check_between_processes,
    check_transfers,
    random_planes,
    some_pages,
)
from support.host_copy_cases import cache_of, holds, numbering_of, write
from support.slow_lanes import SlowLane
from support.waiting import LIMIT_S

from minisgl.device.copy_lanes import copy_lane
from minisgl.device.lanes import Lanes
from minisgl.distributed.peer_memory import PeerMemoryError
from minisgl.kvcache.copies import Copies, Load
from minisgl.kvcache.moves import Move, Place
from minisgl.tiers.carriers import device_pages, shared_buffers
from minisgl.tiers.carriers.carrier import CarrierError, Readable
from minisgl.tiers.carriers.connections import connection, receive, send
from minisgl.tiers.carriers.device_pages import MAX_MAPPED, NUM_SLOTS, DevicePages, Window
from minisgl.tiers.carriers.shared_buffers import FileSharing
from minisgl.tiers.peers import page_exchange
from minisgl.tiers.peers.page_parts import Held, Part, Ready, Take, send_pages
from minisgl.tiers.tiers import Tiers

NAME = b"name of the transfer"
PART_PAGES = 4
UNUSED: Any = None


class Gate:
    """A point that is reached when the test says so."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.is_awaited = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def wait(self) -> None:
        self.is_awaited.set()
        assert self._opened.wait(LIMIT_S)


@pytest.fixture(params=[copy_lane, SlowLane], ids=["lane", "slow lane"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[DeviceRank, ...]]:
    """A sender with seed 1, and a receiver with seed 2."""
    both = [
        DeviceRank(str(tmp_path / name), seed=seed, make_lane=request.param)
        for name, seed in (("sender", 1), ("receiver", 2))
    ]
    yield tuple(both)
    for rank in both:
        rank.close()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("case", ["tiny", "words"])
@pytest.mark.parametrize("lane", [copy_lane, SlowLane])
def test_pages_arrive_bit_by_bit_in_their_places(
    case: str, lane: Callable[[Lanes], SlowLane], tmp_path: Path
) -> None:
    sender = DeviceRank(str(tmp_path / "a"), case, 1, make_lane=lane)
    receiver = DeviceRank(str(tmp_path / "b"), case, 2, make_lane=lane, part_pages=3)
    with closing(sender), closing(receiver):
        check_transfers(sender, receiver, (1, 3, 4, 17))


def test_more_transfers_than_slots_take_turns_and_mix_nothing_up(
    ranks: tuple[DeviceRank, DeviceRank],
) -> None:
    sender, receiver = ranks
    pages, targets = some_pages(35, 1), some_pages(35, 2)
    num_transfers = 2 * NUM_SLOTS + 1
    for id in range(num_transfers):
        receiver.receive(id, sender.address, targets[id::num_transfers], b"%d" % id)
    for id in range(num_transfers):
        sender.send(id, pages[id::num_transfers], b"%d" % id)
    expected = {(id, 35 // num_transfers) for id in range(num_transfers)}
    for rank in ranks:
        assert {rank.end() for _ in range(num_transfers)} == expected
    receiver.expect(1, pages, targets)


def test_both_sides_wait_for_what_uses_their_pages(ranks: tuple[DeviceRank, DeviceRank]) -> None:
    sender, receiver = ranks
    written, read = Gate(), Gate()
    sender.planes[1][5] = 0  # of which the right bytes are computed later
    sender.send(1, [5], NAME, [written])
    receiver.receive(1, sender.address, [6], NAME, [read])
    assert read.is_awaited.wait()
    receiver.expect(2, [], [])
    read.open()
    assert written.is_awaited.wait()
    sender.planes[1][5] = random_planes("tiny", 1)[1][5]
    written.open()
    assert sender.end() == receiver.end() == (1, 1)
    receiver.expect(1, [5], [6])


def test_another_process_sends_pages_until_it_is_killed(tmp_path: Path) -> None:
    check_between_processes(tmp_path, "tiny", PART_PAGES, CPU)


def test_what_the_sender_has_not_confirmed_does_not_count(
    ranks: tuple[DeviceRank, DeviceRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up while the receiver copies slowly, and another transfer gets the slot."""
    sender, receiver = ranks
    fetch, sizes, ends = receiver.device.fetch, list[int](), list[tuple[int, int]]()
    peers = list[socket.socket]()

    def note_peer(peer: socket.socket, *rest: Any) -> Iterator[int]:
        peers.append(peer)
        return send_pages(peer, *rest)

    def fetch_late(*arguments: Any) -> None:
        sizes.append(len(arguments[-1]))
        if len(sizes) == 2:
            peers[0].shutdown(socket.SHUT_RD)  # it waits for the receiver no longer
            ends.append(sender.end())
            for slot in range(NUM_SLOTS):
                sender.device.put(slot, [0] * PART_PAGES)
        fetch(*arguments)

    monkeypatch.setattr(page_exchange, "send_pages", note_peer)
    monkeypatch.setattr(receiver.device, "fetch", fetch_late)
    pages, targets = some_pages(10, 1), some_pages(10, 2)
    sender.send(1, pages, NAME)
    receiver.receive(1, sender.address, targets, NAME)
    assert receiver.end() == (1, PART_PAGES)
    assert ends == [(1, PART_PAGES)] and len(sizes) == 2


def test_a_receiver_that_vanishes_or_asks_for_nonsense_frees_its_slot(
    ranks: tuple[DeviceRank, DeviceRank],
) -> None:
    sender, receiver = ranks
    for id, sizes in enumerate(([], [2], [2, -1], [2, 5], [2, 40], [2, 3]), 1):
        sender.send(id, range(1, 10), NAME)
        with connection(sender.address, b"") as peer:
            send(peer, Take(NAME))
            assert receive(peer, Ready).carriers == {"device": PART_PAGES}
            first = 0
            for size in sizes:
                send(peer, Part(first, size, "device"))
                if 0 < size <= PART_PAGES:
                    receive(peer, Held)
                else:
                    assert peer.recv(1) == b""
                first += size
        assert sender.end() == (id, 2 if len(sizes) > 1 else 0)
    for id in range(7, 7 + NUM_SLOTS):
        sender.send(id, [3], NAME)
        receiver.receive(id, sender.address, [4], NAME)
        assert sender.end() == receiver.end() == (id, 1)
    receiver.expect(1, [3], [4])


def test_ranks_that_mean_different_pages_transfer_none(
    ranks: tuple[DeviceRank, DeviceRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ranks
    for rank in ranks:
        monkeypatch.setattr(rank.exchange, "_views", lambda _: [memoryview(bytearray(10))])
    sender.start(Move(1, Place.HOST, Place.ENGINE, (3,), name=NAME))
    receiver.receive(1, sender.address, [4], NAME)
    assert sender.end() == receiver.end() == (1, 0)
    sender.send(2, [3], NAME)
    receiver.start(Move(2, Place.ENGINE, Place.HOST, (4,), name=NAME, peers=(sender.address,)))
    assert sender.end() == receiver.end() == (2, 0)
    receiver.expect(2, [], [])


def test_memory_that_cannot_be_mapped_brings_no_pages_and_one_line(
    ranks: tuple[DeviceRank, DeviceRank],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    sender, receiver = ranks
    put = sender.device.put
    window = msgspec.msgpack.decode(put(0, []).description, type=Window)
    tag, pid, _, name = msgspec.msgpack.decode(window.handle)
    other, folder, shrinks = (
        FileSharing().share(1 << 20),
        os.open(tmp_path, os.O_RDONLY),
        os.memfd_create(name),
    )
    os.ftruncate(shrinks, 1 << 20)
    try:
        handles = [
            b"",
            msgspec.msgpack.encode(("cuda", b"", pid, 0, b"")),
            msgspec.msgpack.encode((tag, pid, other.file, name)),  # as in another namespace
            msgspec.msgpack.encode((tag, pid, folder, name)),
            msgspec.msgpack.encode((tag, pid, shrinks, name)),  # which may become shorter
            msgspec.msgpack.encode((tag, 1 << 30, 0, name)),
        ]
        windows = [msgspec.structs.replace(window, handle=handle) for handle in handles]
        windows.append(msgspec.structs.replace(window, offset=1 << 30))
        for id, wrong in enumerate(windows):
            caplog.clear()
            readable = Readable(msgspec.msgpack.encode(wrong))
            monkeypatch.setattr(sender.device, "put", lambda *_, wrong=readable: wrong)
            sender.send(id, [3], NAME)
            receiver.receive(id, sender.address, [4], NAME)
            assert sender.end() == receiver.end() == (id, 0)
            (line,) = caplog.records
            assert line.levelno == logging.WARNING
            assert "cannot go straight from device to device" in line.message
    finally:
        other.close()
        os.close(folder)
        os.close(shrinks)
    receiver.expect(2, [], [])


def test_when_all_slots_are_taken_a_transfer_gives_up(
    ranks: tuple[DeviceRank, DeviceRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_pages, "SILENCE_S", 0.1)
    sender, receiver = ranks
    with sender.device.lend(), sender.device.lend():
        sender.send(1, [3], NAME)
        receiver.receive(1, sender.address, [4], NAME)
        assert sender.end() == receiver.end() == (1, 0)


def test_a_rank_that_is_started_again_is_mapped_anew(tmp_path: Path) -> None:
    closed: list[object] = []

    class Counting(shared_buffers.FileBuffer):
        def close(self) -> None:
            closed.append(self)
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_buffers, "FileBuffer", Counting)
        receiver = DeviceRank(str(tmp_path / "receiver"), seed=2)
        for seed in (1, 3, 4):
            with closing(DeviceRank(str(tmp_path / "sender"), seed=seed)) as sender:
                for _ in range(2):
                    sender.send(1, [5], NAME)
                    receiver.receive(1, sender.address, [6], NAME)
                    assert sender.end() == receiver.end() == (1, 1)
                receiver.expect(seed, [5], [6])
        assert len(closed) == 2
        with closing(DeviceRank(str(tmp_path / "sender"), seed=1)) as sender:
            description = sender.device.put(0, []).description
            for address in range(MAX_MAPPED):  # of which each counts as another rank
                receiver.device.fetch(UNUSED, str(address), description, [6])
            assert len(closed) == 3
        receiver.close()
        assert len(closed) == 3 + MAX_MAPPED


def test_closing_waits_for_the_copy_under_way_and_lets_none_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, closed = threading.Event(), threading.Event()
    gate.set()
    lane = type("Lane", (SlowLane,), {"gate": gate})
    sender = DeviceRank(str(tmp_path / "a"), seed=1, make_lane=lane)
    receiver = DeviceRank(str(tmp_path / "b"), seed=2)
    description = sender.device.put(0, []).description
    receiver.device.fetch(UNUSED, sender.address, description, [4])  # it stays mapped
    fetch = receiver.device.fetch

    def fetch_late(*arguments: Any) -> None:
        assert closed.wait()
        fetch(*arguments)

    def close() -> None:
        sender.close()
        closed.set()

    monkeypatch.setattr(receiver.device, "fetch", fetch_late)
    gate.clear()
    sender.send(1, [3], NAME)
    receiver.receive(1, sender.address, [4], NAME)
    while not sender.device._lock.locked():  # it copies
        time.sleep(0.001)
    thread = threading.Thread(target=close)
    thread.start()
    assert not closed.wait(0.05)
    gate.set()
    assert closed.wait()
    assert receiver.end() == (1, 0)  # what was read may have been anything
    with pytest.raises(CarrierError, match="closed"):
        sender.device.put(0, [1])
    sender.close()  # again
    receiver.close()
    thread.join()


def test_a_receiver_that_is_closed_writes_nothing_more(tmp_path: Path) -> None:
    sender = DeviceRank(str(tmp_path / "a"), seed=1)
    receiver = DeviceRank(str(tmp_path / "b"), seed=2)
    read = Gate()
    sender.send(1, [3], NAME, [read])
    receiver.receive(1, sender.address, [4], NAME)
    assert read.is_awaited.wait()
    receiver.close()
    read.open()
    assert sender.end() == (1, 0)
    receiver.expect(2, [], [])
    sender.close()
    assert receiver.ends.empty()


def test_a_host_cache_transfers_pages_of_the_device_after_all_that_was_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [cache_of(CPU), cache_of(CPU)]
    caches = [Tiers(kv, 12, numbering_of(kv), Lanes(CPU), SlowLane) for kv in memory]
    listening = [
        cache.listen(str(tmp_path / name), b"") for cache, name in zip(caches, "ab", strict=True)
    ]
    assert all(each.is_direct for each in listening)
    launched = Gate()
    monkeypatch.setattr(Lanes, "mark", lambda _: launched)
    ends: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
    send = Move(1, Place.DEVICE, Place.ENGINE, (1, 2), name=NAME)
    take = Move(2, Place.ENGINE, Place.DEVICE, (7, 5), name=NAME, peers=listening[0].ranks)
    caches[0].move([send], lambda *end: ends.put(("sent", *end)))
    caches[1].move([take], lambda *end: ends.put(("received", *end)))
    assert launched.is_awaited.wait() and ends.empty()
    write(memory[0], 1, 5.0)
    write(memory[0], 2, 9.0)
    launched.open()
    assert {ends.get(), ends.get()} == {("sent", 1, 2), ("received", 2, 2)}
    assert holds(memory[1], 7, 5.0) and holds(memory[1], 5, 9.0)
    for cache in caches:
        cache.close()
    assert not [*tmp_path.iterdir()]


def test_pages_are_sent_after_the_loads_that_fill_them_on_this_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have landed on rank 0 alone."""
    gate, was_put = threading.Event(), threading.Event()
    gate.set()
    memory = [cache_of(CPU), cache_of(CPU)]
    sender = Tiers(
        memory[0],
        12,
        numbering_of(memory[0]),
        Lanes(CPU),
        type("Lane", (SlowLane,), {"gate": gate}),
    )
    receiver = Tiers(memory[1], 12, numbering_of(memory[1]), Lanes(CPU))
    write(memory[0], 1, 5.0)
    sender.copies.queue(Copies(offloads=((1, 3),)))()
    gate.clear()
    load = sender.copies.queue(Copies(loads=(Load(1, (3,), (2,)),)))
    monkeypatch.setattr(sender, "_make_lane", copy_lane)
    listening = sender.listen(str(tmp_path / "a"), b"")
    receiver.listen(str(tmp_path / "b"), b"")
    put = DevicePages.put

    def note_put(*part: Any) -> Readable:
        was_put.set()
        return put(*part)

    monkeypatch.setattr(DevicePages, "put", note_put)
    load()
    ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    send = Move(1, Place.DEVICE, Place.ENGINE, (2,), name=NAME)
    take = Move(2, Place.ENGINE, Place.DEVICE, (7,), name=NAME, peers=listening.ranks)
    for cache, move in ((sender, send), (receiver, take)):
        cache.move([move], lambda *end: ends.put(end))
    assert not was_put.wait(0.1)
    gate.set()
    assert {ends.get(), ends.get()} == {(1, 1), (2, 1)}
    assert holds(memory[1], 7, 5.0)
    for cache in (sender, receiver):
        cache.close()


@pytest.mark.parametrize(
    "error", [PeerMemoryError("no way"), OSError(24, "files"), torch.OutOfMemoryError("none left")]
)
def test_without_memory_to_share_only_host_pages_are_transferred(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(FileSharing, "share", fail)
    cache = Tiers(kv := cache_of(CPU), 12, numbering_of(kv), Lanes(CPU))
    assert not cache.listen(str(tmp_path / "a"), b"").is_direct
    (line,) = caplog.records
    assert "come through host memory" in line.message
    ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for source, target in ((Place.DEVICE, Place.ENGINE), (Place.ENGINE, Place.DEVICE)):
        cache.move(
            [Move(1, source, target, (3,), name=NAME, peers=("/nowhere/a",))],
            lambda *end: ends.put(end),
        )
        assert ends.get() == (1, 0)
    cache.close()


def test_engines_that_share_pages_by_tcp_allocate_nothing_for_the_straight_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FileSharing, "share", lambda *_: pytest.fail("it was allocated"))
    cache = Tiers(kv := cache_of(CPU), 12, numbering_of(kv), Lanes(CPU))
    assert not cache.listen("127.0.0.1:0", b"").is_direct
    cache.close()


def test_an_address_that_cannot_be_had_leaves_no_memory_behind(tmp_path: Path) -> None:
    before = open_files()
    cache = Tiers(kv := cache_of(CPU), 12, numbering_of(kv), Lanes(CPU))
    with pytest.raises(OSError):
        cache.listen(str(tmp_path / "nowhere" / "a"), b"")
    assert open_files() <= before  # threads of tests before this one may close theirs
    cache.close()


def open_files() -> set[tuple[str, int]]:
    """The files and sockets of this process, each by its name and its number in the system."""
    found: set[tuple[str, int]] = set()
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself
            found.add((str(number.readlink()), number.stat().st_ino))
    return found
