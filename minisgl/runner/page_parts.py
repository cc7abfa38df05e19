"""Pages on a connection between two ranks: all at once, or in parts.

Host pages travel in parts where both ranks have NIXL.

    receiver                          sender
    Take(name, reads=True) ─────────▶
    ◀────────────── Readable(addresses)
    Part(num_pages, is_read=True) ──▶             the pages were read by NIXL
    ◀──────────────────────────── HELD            and were what they should be all the time
    Part(num_pages) ────────────────▶
    ◀──────────────────── their bytes             by socket

The receiver chooses what carries each part: NIXL over RDMA is faster than a socket, NIXL over TCP
is slower (on one machine by half), and what UCX has found cannot be asked. So both are measured.

Pages of the device always do, through memory of the sender that the receiver reads.

    Take(name, on_device=True) ─────▶
    ◀────────────────── Window(handle)
    Part(num_pages) ────────────────▶
    ◀──────────────────────────── HELD            the pages are in the window
    Part(num_pages) ────────────────▶             and have been read; it is free for the next
    ◀──────────────────────────── HELD
    Part(0) ────────────────────────▶
    ◀──────────────────────────── HELD            they were what they should be all the time

A sender that has waited too long gives the window to another transfer. So what was read from it
counts only when the sender has answered once more.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Iterator, Sequence

from msgspec import Struct

from minisgl.runner.device_pages import DevicePages, Window
from minisgl.runner.nixl_pages import Carrier, NixlError, NixlPages, Readable
from minisgl.runner.page_wire import SILENCE_S, fill, receive, send

logger = logging.getLogger(__name__)

PART_BYTES = 64 << 20
PART_PAGES = 256  # at most: describing pages to NIXL holds the interpreter's lock
MAX_PAGES = 1 << 16  # that may be read by NIXL: their addresses are one message
PROGRESS_S = 0.0005
HELD = b"\1"


class Part(Struct, array_like=True):
    """The next pages: they have been read, or are wanted."""

    num_pages: int
    is_read: bool = False


def send_all(peer: socket.socket, views: Sequence[memoryview]) -> Iterator[int]:
    """Send pages; yields 1 after each."""
    for view in views:
        peer.sendall(view)
        yield 1


def receive_all(peer: socket.socket, views: Sequence[memoryview]) -> Iterator[int]:
    """Receive pages; yields 1 after each."""
    for view in views:
        fill(peer, view)
        yield 1


def send_parts(
    peer: socket.socket, views: Sequence[memoryview], nixl: NixlPages | None
) -> Iterator[int]:
    """Send pages, or let the peer read them; yields how many it has, or has read."""
    readable = Readable()
    if nixl is not None and len(views) <= MAX_PAGES:
        readable = nixl.readable(views)
    send(peer, readable)
    at = 0
    while at < len(views):
        if nixl is not None and readable.agent:
            _await(peer, nixl)
        part = receive(peer, Part)
        wanted = views[at : at + part.num_pages]
        if part.num_pages < 1 or len(wanted) < part.num_pages:
            raise EOFError
        at += part.num_pages
        if part.is_read:
            peer.sendall(HELD)
            yield part.num_pages
        else:
            yield from send_all(peer, wanted)


def _await(peer: socket.socket, nixl: NixlPages) -> None:
    """Wait for a message of a peer that may read meanwhile."""
    deadline = time.monotonic() + SILENCE_S
    while not select.select([peer], [], [], PROGRESS_S)[0]:
        if time.monotonic() > deadline:
            raise EOFError
        nixl.progress()


def receive_parts(
    peer: socket.socket, address: str, views: Sequence[memoryview], nixl: NixlPages
) -> Iterator[int]:
    """Receive pages from the rank at `address`, or read them; yields how many have come."""
    readable = receive(peer, Readable)
    remote = nixl.remote(address, readable.agent) if readable.agent else None
    size = min(PART_PAGES, max(1, PART_BYTES // len(views[0])))
    for at in range(0, len(views), size):
        part = views[at : at + size]
        if remote is not None and remote.choose() is Carrier.NIXL:
            addresses = readable.addresses[at : at + size]
            try:
                nixl.read(remote, readable.metadata, addresses, part)
            except NixlError as error:
                logger.warning("KV pages travel by socket, NIXL cannot read them: %s", error)
                remote = None  # for the rest of them, too
            else:
                send(peer, Part(len(part), is_read=True))
                _await_held(peer)
                yield len(part)
                continue
        began = time.perf_counter()
        send(peer, Part(len(part)))
        yield from receive_all(peer, part)
        if remote is not None:
            seconds = time.perf_counter() - began
            remote.carried(Carrier.SOCKET, sum(map(len, part)), seconds)


def send_device_parts(
    peer: socket.socket, pages: Sequence[int], device: DevicePages
) -> Iterator[int]:
    """Let the peer read pages of the device; yields how many it has read."""
    with device.lend() as slot:
        send(peer, device.window(slot))
        start = end = 0  # of the part in the slot
        while True:
            part = receive(peer, Part)
            yield end - start
            start, end = end, end + part.num_pages
            if not (start <= end <= len(pages)):
                raise EOFError
            device.put(slot, pages[start:end])  # raises if the slot is no longer this one's
            peer.sendall(HELD)
            if start == end:
                return


def receive_device_parts(
    peer: socket.socket, address: str, pages: Sequence[int], device: DevicePages
) -> Iterator[int]:
    """Read pages of the rank at `address` into pages of the device; yields how many have come."""
    window = receive(peer, Window)
    size = device.part_size(window)
    num_read = 0  # of the part before
    for at in range(0, len(pages), size):
        part = pages[at : at + size]
        send(peer, Part(len(part)))
        _await_held(peer)
        yield num_read
        device.take(address, window, part)
        num_read = len(part)
    send(peer, Part(0))
    _await_held(peer)
    yield num_read


def _await_held(peer: socket.socket) -> None:
    fill(peer, memoryview(bytearray(HELD)))
