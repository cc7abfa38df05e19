"""Frames, heartbeats and the end of a connection between two nodes."""

from __future__ import annotations

import itertools
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from minisgl.ranks.nodes import link as link_module
from minisgl.ranks.nodes.link import (
    Beat,
    Close,
    Frame,
    Join,
    LinkError,
    Message,
    NodeLink,
    Start,
)
from minisgl.ranks.processes.channel import Answered, Failed, Ready
from minisgl.ranks.processes.mask_ring import StepMasks


class Ends:
    """A link, and the bare socket at its other end, or another link there."""

    def __init__(self) -> None:
        near, self.far = connected()
        self.near = NodeLink(near, "Node 1", lambda: Beat(8.0, (1.5, 2.5)))
        self.links = [self.near]

    def other(self) -> NodeLink:
        self.links.append(NodeLink(self.far, "Node 0", lambda: Beat(8.0)))
        return self.links[-1]


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    for one in found.links:
        one.close()
    found.far.close()


def frames(link: NodeLink, number: int) -> list[Frame]:
    """The next frames that are no heartbeats."""
    found: list[Frame] = []
    while len(found) < number:
        found += [frame for frame in link.receive(0.1) if not isinstance(frame, Beat)]
    return found


def test_messages_plans_and_masks_arrive_as_they_were_and_in_order(ends: Ends) -> None:
    other = ends.other()
    messages: list[Message] = [Join(1, {"dtype": "float32"}), Start("10.0.0.1", 7), Ready()]
    messages += [Answered(3, b"\xff", "why"), Failed("X", "y")]
    for message in messages:
        ends.near.send(message)
    rows = np.arange(300 * 5000, dtype=np.uint32).reshape(300, 5000)

    def send() -> None:
        ends.near.send_plan(b"\0")
        ends.near.send_plan(b"a plan", StepMasks(2**40, rows))
        ends.near.send(Close())

    sender = threading.Thread(target=send)  # it waits until somebody reads
    sender.start()
    found = frames(other, 9)
    sender.join()
    assert found[:6] == [*messages, b"\0"]
    assert isinstance(found[6], StepMasks) and found[6].step == 2**40
    assert np.array_equal(found[6].rows, rows)
    assert found[7:] == [b"a plan", Close()]


def test_a_frame_may_come_in_pieces(ends: Ends) -> None:
    for byte in struct.pack("!IB", 4, 1) + b"plan":
        ends.far.sendall(bytes([byte]))
        found = ends.near.receive(1.0)
    assert found == [b"plan"]


def test_heartbeats_come_without_being_asked_for(ends: Ends) -> None:
    assert set(ends.other().receive(5.0)) == {Beat(8.0, (1.5, 2.5))}


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!IB", 1 << 30, 1),  # larger than any plan
        struct.pack("!IB", 1 << 24, 0),  # larger than any message
        struct.pack("!IB", 3, 9) + b"abc",  # of no kind
        struct.pack("!IB", 4, 0) + b"\xc1\xc1\xc1\xc1",  # no MessagePack
        struct.pack("!IB", 2, 0) + b"\x81\xa1",
        struct.pack("!IB", 13, 2) + b"\0" * 12 + b"x",  # masks of no whole words
        struct.pack("!IB", 2, 2) + b"ab",
        struct.pack("!IB", len(pickle.dumps(print)), 0) + pickle.dumps(print),
    ],
)
def test_nonsense_ends_the_connection(ends: Ends, sent: bytes) -> None:
    ends.far.sendall(sent)
    with pytest.raises(LinkError, match="Node 1 sends what is no message of minisgl"):
        for _ in range(20):
            ends.near.receive(0.1)


def test_the_end_of_the_other_process_is_seen_at_once(ends: Ends) -> None:
    ends.far.close()
    with pytest.raises(LinkError, match=r"Node 1 has closed the connection|Node 1 is lost"):
        for _ in range(20):
            ends.near.receive(5.0)


def test_silence_is_measured_by_what_comes_and_has_the_limit_that_was_promised(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(time.monotonic(), 0.5)  # half a second between two looks
    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    beat = msgspec.msgpack.encode(Beat(20.0))
    for _ in range(50):
        for _ in range(10):
            assert ends.near.receive(0) == []
        ends.far.sendall(struct.pack("!IB", len(beat), 0) + beat)
        assert ends.near.receive(10.0) == [Beat(20.0)]
    for _ in range(39):
        assert ends.near.receive(0) == []
    with pytest.raises(
        LinkError, match=r"Node 1 has given no sign of life for 2\d s: it, its mach"
    ):
        for _ in range(2):
            ends.near.receive(0)


def test_time_in_which_this_process_was_stopped_is_no_silence_of_the_other(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    clock = iter([now + 1000.0, now + 1000.5])
    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert ends.near.receive(0) == ends.near.receive(0) == []


def test_closing_frees_a_sender_whom_nobody_reads(ends: Ends) -> None:
    failed = threading.Event()

    def send() -> None:
        try:
            for _ in range(1000):
                ends.near.send_plan(bytes(1 << 20))
        except OSError:
            failed.set()

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(0.1)
    ends.near.send_last(Close())  # does not wait either
    ends.near.close()
    sender.join()
    assert failed.is_set()
    assert ends.near.fileno() < 0
