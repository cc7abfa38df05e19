"""The same cases for every carrier, through the one loop of senders and the one of receivers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_nixl import FakeAgents
from support.waiting import wait_until

from minisgl.device.lanes import Lanes
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.subprocesses import LENGTH
from minisgl.tiers.carriers import connections, device_pages, nixl_pages, socket_pages
from minisgl.tiers.carriers.carrier import Carrier, CarrierAwayError, CarrierError
from minisgl.tiers.carriers.connections import TransferError, fill, receive, send
from minisgl.tiers.carriers.device_pages import NUM_SLOTS, DevicePages
from minisgl.tiers.carriers.nixl_pages import NixlPages
from minisgl.tiers.carriers.socket_pages import SocketPages
from minisgl.tiers.peers.choice import Choice
from minisgl.tiers.peers.page_parts import (
    Held,
    OwnPages,
    Part,
    Ready,
    receive_pages,
    send_pages,
)

PAGE_BYTES, NUM_PAGES = 96, 12
KINDS = ("socket", "NIXL", "NIXL and socket", "device")
ENGINE = b"the sender"
LOST = (OSError, EOFError, msgspec.MsgspecError, TransferError, CarrierError)


class Side:
    """Pages of one rank with random bytes, and what carries them."""

    def __init__(self, kind: str, seed: int, part_pages: int, agents: FakeAgents) -> None:
        self.bytes = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
        self.write(seed)
        self._on_device = kind == "device"
        self.carriers: list[Carrier[Any]] = []
        with contextlib.ExitStack() as stack:
            for module in (device_pages, nixl_pages, socket_pages):
                stack.enter_context(patch.object(module, "PART_BYTES", part_pages * PAGE_BYTES))
            if self._on_device:
                planes = Planes.of([torch.from_numpy(self.bytes)])
                self.carriers.append(DevicePages(planes, Lanes(torch.device("cpu"))))
        if "NIXL" in kind:
            regions = [(self.bytes.ctypes.data, self.bytes.nbytes)]
            nixl = NixlPages(lambda: regions, True, lambda: None, agents.make)
            wait_until(lambda: nixl.is_ready)
            self.carriers.append(nixl)
        if "socket" in kind:
            self.carriers.append(SocketPages())

    def write(self, seed: int) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.shape)

    def use_for_others(self) -> None:
        """What may happen to pages and slots as soon as a move has ended."""
        self.write(1000)
        for carrier in self.carriers:
            for slot in range(NUM_SLOTS):
                carrier.put(slot, self.own([0]).pages)

    def own(self, pages: Sequence[int]) -> OwnPages[Any]:
        views = [self.bytes[page].data for page in pages]
        return OwnPages(pages if self._on_device else views, PAGE_BYTES, self.carriers)

    def close(self) -> None:
        for carrier in self.carriers:
            carrier.close()


class Sending(threading.Thread):
    """The sender's side of a move, and its end."""

    def __init__(self, own: OwnPages[Any]) -> None:
        super().__init__()
        self._peer, self.other = socket.socketpair()
        for end in (self._peer, self.other):
            connections._limit_waiting(end)
        self._own = own
        self.num_pages = 0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for count in send_pages(self._peer, ENGINE, self._own):
                self.num_pages = count
        except LOST as error:
            self.error = error
        finally:
            self._peer.close()

    def cut(self) -> None:
        """End it, as if it had waited too long."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self.join()


def fetch(sending: Sending, own: OwnPages[Any], choice: Choice | None = None) -> int:
    """Receive pages as long as they come; returns the number of those that count."""
    num_pages = 0
    with sending.other, contextlib.suppress(*LOST):
        for count in receive_pages(sending.other, "here", own, lambda _: choice or Choice()):
            num_pages = count
    sending.join()
    return num_pages


@pytest.fixture(params=KINDS)
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    """A sender and a receiver with parts of three pages."""
    with two_sides(request.param, 3) as sides:
        yield sides


@contextlib.contextmanager
def two_sides(kind: str, part_pages: int) -> Iterator[tuple[Side, Side]]:
    agents = FakeAgents()
    both = Side(kind, 1, part_pages, agents), Side(kind, 2, part_pages, agents)
    with contextlib.ExitStack() as stack:
        for module in (nixl_pages, socket_pages):
            stack.enter_context(patch.object(module, "PART_BYTES", part_pages * PAGE_BYTES))
        for side in both:
            stack.callback(side.close)
        yield both


def check(
    sides: tuple[Side, Side], num_pages: int, wanted: Sequence[int], may_differ: int = 0
) -> None:
    """The sender's first pages are the receiver's `wanted`; those behind may be anything."""
    sender, receiver = sides
    before = np.random.default_rng(2).integers(0, 256, receiver.bytes.shape)
    expected = before.astype(np.uint8)
    expected[wanted[:num_pages]] = sender.bytes[:num_pages]
    behind = wanted[num_pages : num_pages + may_differ]
    expected[behind] = receiver.bytes[behind]
    assert np.array_equal(receiver.bytes, expected)
    receiver.write(2)


def check_all_is_well(sides: tuple[Side, Side]) -> None:
    """More moves than there are slots come through."""
    sender, receiver = sides
    sender.write(1)
    receiver.write(2)
    for num_pages in (7, 1, 3):
        sending = Sending(sender.own(range(num_pages)))
        wanted = range(11, 11 - num_pages, -1)
        assert fetch(sending, receiver.own(wanted)) == sending.num_pages == num_pages
        assert sending.error is None
        check(sides, num_pages, wanted)


def test_pages_arrive_in_their_places(sides: tuple[Side, Side]) -> None:
    check_all_is_well(sides)


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(KINDS),
    num_pages=st.integers(1, 9),
    part_pages=st.integers(1, 4),
    last_part=st.integers(1, 5),
    is_read=st.booleans(),
)
def test_what_is_read_counts_after_the_second_word_of_its_sender_only(
    kind: str, num_pages: int, part_pages: int, last_part: int, is_read: bool
) -> None:
    """The sender ends before or after a part is read, and its pages become others."""
    with two_sides(kind, part_pages) as sides:
        sender, receiver = sides
        right, wanted = sender.bytes.copy(), range(2, 2 + num_pages)
        sending = Sending(sender.own(range(num_pages)))
        num_parts = 0

        def meddle(carrier: Carrier[Any], *arguments: Any) -> None:
            nonlocal num_parts
            num_parts += 1
            if num_parts == last_part and is_read:
                type(carrier).fetch(carrier, *arguments)
            if num_parts == last_part:
                sending.cut()
                sender.use_for_others()
            if num_parts != last_part or not is_read:
                type(carrier).fetch(carrier, *arguments)

        with contextlib.ExitStack() as stack:
            for carrier in receiver.carriers:
                fetching = patch.object(
                    carrier, "fetch", lambda *args, own=carrier: meddle(own, *args)
                )
                stack.enter_context(fetching)
            came = fetch(sending, receiver.own(wanted))
        num_confirmed = min(num_pages, (last_part - 1) * part_pages)
        assert came == sending.num_pages == num_confirmed
        sender.bytes[:] = right
        check(sides, came, wanted, may_differ=part_pages)
        check_all_is_well(sides)


@pytest.mark.parametrize(
    ("parts", "num_read"),
    [
        ([(1, 1)], 0),  # nothing was there to be read
        ([(0, -1)], 0),
        ([(0, 4)], 0),  # more than travel at once
        ([(0, 2), (3, 1)], 0),
        ([(0, 2), (-1, 1)], 0),
        ([(0, 3), (3, 3), (2, 1)], 3),
        ([(0, 3), (3, 3), (6, 2)], 6),  # there are seven
    ],
    ids=str,
)
def test_a_receiver_that_asks_for_nonsense_is_left(
    sides: tuple[Side, Side], parts: list[tuple[int, int]], num_read: int
) -> None:
    sender, _ = sides
    sending = Sending(sender.own(range(7)))
    with sending.other as peer:
        ready = receive(peer, Ready)
        assert set(ready.carriers.values()) == {3}
        name = next(iter(ready.carriers))
        for first, num_pages in parts:
            send(peer, Part(first, num_pages, name))
            if (first, num_pages) == parts[-1]:
                with pytest.raises(EOFError):
                    receive(peer, Held)
            else:
                receive(peer, Held)
                if name == "socket":
                    fill(peer, memoryview(bytearray(num_pages * PAGE_BYTES)))
        sending.join()
    assert sending.num_pages == num_read and isinstance(sending.error, EOFError)
    check_all_is_well(sides)


@pytest.mark.parametrize(
    "message",
    [
        msgspec.msgpack.encode(Part(0, 1, "pigeon")),
        b"\xc1\xc1",
        msgspec.msgpack.encode(["0", 1, "socket"]),
    ],
    ids=str,
)
def test_messages_that_are_none_end_a_move(sides: tuple[Side, Side], message: bytes) -> None:
    sender, receiver = sides
    sending = Sending(sender.own(range(7)))
    with sending.other as peer:
        receive(peer, Ready)
        peer.sendall(LENGTH.pack(len(message)) + message)
        sending.join()
    assert sending.num_pages == 0 and sending.error is not None
    own = receiver.own(range(7))
    ends = socket.socketpair()
    with ends[0], ends[1]:
        ends[0].sendall(LENGTH.pack(len(message)) + message)
        with pytest.raises(msgspec.MsgspecError):
            next(receive_pages(ends[1], "here", own, lambda _: Choice()))
    check_all_is_well(sides)


def test_a_peer_that_is_silent_is_given_up(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = sides
    with monkeypatch.context() as impatient:
        for module in (connections, nixl_pages):
            impatient.setattr(module, "SILENCE_S", 0.1)
        sending = Sending(sender.own(range(7)))
        sending.join()
        assert sending.num_pages == 0 and sending.error is not None
        assert fetch(sending, receiver.own(range(7))) == 0
        ends = socket.socketpair()
        with ends[0], ends[1]:
            connections._limit_waiting(ends[1])
            with pytest.raises(BlockingIOError):
                next(receive_pages(ends[1], "here", receiver.own(range(7)), lambda _: Choice()))
    check(sides, 0, [])
    check_all_is_well(sides)


@pytest.mark.parametrize("change", ["page size", "no room", "other carriers"])
def test_ranks_whose_pages_differ_exchange_none(sides: tuple[Side, Side], change: str) -> None:
    sender, receiver = sides
    own = receiver.own(range(7))
    with contextlib.ExitStack() as stack:
        if change == "page size":
            own = replace(own, page_bytes=PAGE_BYTES + 1)
        elif change == "other carriers":
            own = replace(own, carriers=[])
        else:
            for carrier in sender.carriers:
                stack.enter_context(patch.object(carrier, "part_size", lambda _: 0))
        sending = Sending(sender.own(range(7)))
        assert fetch(sending, own) == 0
    assert sending.num_pages == 0 and isinstance(sending.error, EOFError)
    check(sides, 0, [])
    check_all_is_well(sides)


@pytest.mark.parametrize("error", [CarrierError, CarrierAwayError])
def test_what_one_carrier_cannot_bring_another_one_does(
    sides: tuple[Side, Side], error: type[CarrierError], caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = sides
    first, choice = receiver.carriers[0], Choice()
    fetched: list[None] = []

    def fail_later(*arguments: Any) -> None:
        if fetched:
            raise error("it is of no use")
        fetched.append(None)
        type(first).fetch(first, *arguments)

    with patch.object(first, "fetch", fail_later):
        sending = Sending(sender.own(range(7)))
        came = fetch(sending, receiver.own(range(4, 11)), choice)
    has_other = len(receiver.carriers) > 1
    assert came == sending.num_pages == (7 if has_other else 3)
    assert caplog.messages == ["it is of no use"] * has_other
    assert choice._failures.total() == (error is CarrierError)
    check(sides, came, range(4, 11))
    check_all_is_well(sides)


def test_a_sender_whose_carrier_fails_confirms_nothing_more(sides: tuple[Side, Side]) -> None:
    sender, receiver = sides
    num_puts = 0

    def fail_later(carrier: Carrier[Any], *arguments: Any) -> Any:
        nonlocal num_puts
        num_puts += 1
        if num_puts == 3:
            raise CarrierError("the engine is being closed")
        return type(carrier).put(carrier, *arguments)

    with contextlib.ExitStack() as stack:
        for carrier in sender.carriers:
            stack.enter_context(patch.object(carrier, "put", partial(fail_later, carrier)))
        sending = Sending(sender.own(range(9)))
        assert fetch(sending, receiver.own(range(9))) == 3
    assert sending.num_pages == 6 and isinstance(sending.error, CarrierError)
    check(sides, 3, range(9), may_differ=3)
    check_all_is_well(sides)
