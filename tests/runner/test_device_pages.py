"""Pages that go straight from device to device, and what may go wrong on the way."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from support.host_cache_cases import cache_of, holds, write
from support.slow_lanes import SlowLane
from support.waiting import LIMIT_S

from minisgl.distributed.peer_memory import PeerMemoryError
from minisgl.kvcache.copies import Copies, Load
from minisgl.kvcache.store import Transfer, Way
from minisgl.runner import device_pages, shared_buffers
from minisgl.runner.copy_lanes import copy_lane
from minisgl.runner.device_pages import MAX_MAPPED, NUM_SLOTS, DevicePages, Window
from minisgl.runner.host_cache import HostCache
from minisgl.runner.lanes import Lanes
from minisgl.runner.page_exchange import Take
from minisgl.runner.page_parts import Part
from minisgl.runner.page_wire import connection, fill, receive, send
from minisgl.runner.shared_buffers import FileSharing

NAME = b"name of the transfer"
PART_PAGES = 4


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
    take, sizes, ends = receiver.device.take, list[int](), list[tuple[int, int]]()
    server, peers = sender.exchange._server, list[socket.socket]()
    answer = server._answer

    def note_peer(peer: socket.socket) -> None:
        peers.append(peer)
        answer(peer)

    def take_late(address: str, window: Window, pages: Sequence[int]) -> None:
        sizes.append(len(pages))
        if len(sizes) == 2:
            peers[0].shutdown(socket.SHUT_RD)  # it waits for the receiver no longer
            ends.append(sender.end())
            for slot in range(NUM_SLOTS):
                sender.device.put(slot, [0] * PART_PAGES)
        take(address, window, pages)

    monkeypatch.setattr(server, "_answer", note_peer)
    monkeypatch.setattr(receiver.device, "take", take_late)
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
            send(peer, Take(NAME, on_device=True))
            assert receive(peer, Window).num_pages == PART_PAGES
            for size in sizes:
                send(peer, Part(size))
                if 0 < size <= PART_PAGES:
                    fill(peer, memoryview(bytearray(1)))
                else:
                    assert peer.recv(1) == b""
        assert sender.end() == (id, 2 if len(sizes) > 1 else 0)
    for id in range(7, 7 + NUM_SLOTS):
        sender.send(id, [3], NAME)
        receiver.receive(id, sender.address, [4], NAME)
        assert sender.end() == receiver.end() == (id, 1)
    receiver.expect(1, [3], [4])


def test_ranks_that_mean_different_pages_transfer_none(
    ranks: tuple[DeviceRank, DeviceRank],
) -> None:
    sender, receiver = ranks
    for rank in ranks:
        rank.exchange._views = lambda _: [memoryview(bytearray(10))]
    sender.queue(Transfer(1, Way.SEND, (), (3,), NAME))
    receiver.receive(1, sender.address, [4], NAME)
    assert sender.end() == receiver.end() == (1, 0)
    sender.send(2, [3], NAME)
    receiver.queue(Transfer(2, Way.RECEIVE, (), (4,), NAME, (sender.address,)))
    assert sender.end() == receiver.end() == (2, 0)
    receiver.expect(2, [], [])


def test_memory_that_cannot_be_mapped_brings_no_pages_and_one_line(
    ranks: tuple[DeviceRank, DeviceRank],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    sender, receiver = ranks
    window = sender.device.window(0)
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
            msgspec.msgpack.encode(("cuda", b"", pid, 0, b"", 0)),
            msgspec.msgpack.encode((tag, pid, other.file, name)),  # as in another namespace
            msgspec.msgpack.encode((tag, pid, folder, name)),
            msgspec.msgpack.encode((tag, pid, shrinks, name)),  # which may become shorter
            msgspec.msgpack.encode((tag, 1 << 30, 0, name)),
        ]
        windows = [msgspec.structs.replace(window, handle=handle) for handle in handles]
        windows.append(msgspec.structs.replace(window, offset=1 << 30))
        windows.append(msgspec.structs.replace(window, page_bytes=1))
        windows.append(msgspec.structs.replace(window, num_pages=0))
        for id, wrong in enumerate(windows):
            caplog.clear()
            monkeypatch.setattr(sender.device, "window", lambda _, wrong=wrong: wrong)
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

    class Counting(shared_buffers._FileBuffer):
        def close(self) -> None:
            closed.append(self)
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_buffers, "_FileBuffer", Counting)
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
            window = sender.device.window(0)
            for address in range(MAX_MAPPED):  # of which each counts as another rank
                receiver.device.take(str(address), window, [6])
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
    receiver.device.take(sender.address, sender.device.window(0), [4])  # it stays mapped
    take = receiver.device.take

    def take_late(address: str, window: Window, pages: Sequence[int]) -> None:
        assert closed.wait()
        take(address, window, pages)

    def close() -> None:
        sender.close()
        closed.set()

    monkeypatch.setattr(receiver.device, "take", take_late)
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
    with pytest.raises(PeerMemoryError, match="closed"):
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
    caches = [HostCache(kv, 12, Lanes(CPU), SlowLane) for kv in memory]
    assert not any(cache.shares_device for cache in caches)
    addresses = [
        cache.listen(str(tmp_path / name), b"", 0) for cache, name in zip(caches, "ab", strict=True)
    ]
    assert all(cache.shares_device for cache in caches)
    launched = Gate()
    monkeypatch.setattr(Lanes, "mark", lambda _: launched)
    ends: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
    send = Transfer(1, Way.SEND, (), (), NAME, (), (1, 2))
    take = Transfer(2, Way.RECEIVE, (), (), NAME, (addresses[0],), (7, 5))
    assert send.num_pages == take.num_pages == 2
    caches[0].transfer([send], lambda *end: ends.put(("sent", *end)))
    caches[1].transfer([take], lambda *end: ends.put(("received", *end)))
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
    sender = HostCache(memory[0], 12, Lanes(CPU), type("Lane", (SlowLane,), {"gate": gate}))
    receiver = HostCache(memory[1], 12, Lanes(CPU))
    write(memory[0], 1, 5.0)
    sender.queue(Copies(offloads=((1, 3),)))()
    gate.clear()
    load = sender.queue(Copies(loads=(Load(1, (3,), (2,)),)))
    monkeypatch.setattr(sender, "_make_lane", copy_lane)
    address = sender.listen(str(tmp_path / "a"), b"", 0)
    receiver.listen(str(tmp_path / "b"), b"", 0)
    put = DevicePages.put

    def note_put(*part: Any) -> None:
        was_put.set()
        put(*part)

    monkeypatch.setattr(DevicePages, "put", note_put)
    load()
    ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    send = Transfer(1, Way.SEND, (), (), NAME, (), (2,))
    take = Transfer(2, Way.RECEIVE, (), (), NAME, (address,), (7,))
    for cache, transfer in ((sender, send), (receiver, take)):
        cache.transfer([transfer], lambda *end: ends.put(end))
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
    cache = HostCache(cache_of(CPU), 12, Lanes(CPU))
    cache.listen(str(tmp_path / "a"), b"", 0)
    assert not cache.shares_device
    (line,) = caplog.records
    assert "come through host memory" in line.message
    ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for way in (Way.SEND, Way.RECEIVE):
        cache.transfer(
            [Transfer(1, way, (), (), NAME, ("/nowhere/a",), (3,))], lambda *end: ends.put(end)
        )
        assert ends.get() == (1, 0)
    cache.close()


def test_engines_that_share_pages_by_tcp_allocate_nothing_for_the_straight_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FileSharing, "share", lambda *_: pytest.fail("it was allocated"))
    cache = HostCache(cache_of(CPU), 12, Lanes(CPU))
    cache.listen("127.0.0.1:0", b"", 0)
    assert not cache.shares_device
    cache.close()


def test_an_address_that_cannot_be_had_leaves_no_memory_behind(tmp_path: Path) -> None:
    before = open_files()
    cache = HostCache(cache_of(CPU), 12, Lanes(CPU))
    with pytest.raises(OSError):
        cache.listen(str(tmp_path / "nowhere" / "a"), b"", 0)
    assert open_files() <= before  # threads of tests before this one may close theirs
    cache.close()


def open_files() -> set[tuple[str, int]]:
    """The files and sockets of this process, each by its name and its number in the system."""
    found: set[tuple[str, int]] = set()
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself
            found.add((str(number.readlink()), number.stat().st_ino))
    return found
