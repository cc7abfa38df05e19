"""Pages on a connection between two ranks: all at once, or in parts where both have NIXL.

    receiver                          sender
    Take(name, reads=True) ─────────▶
    ◀────────────── Readable(addresses)
    Part(num_pages, is_read=True) ──▶             the pages were read by NIXL
    ◀──────────────────────────── HELD            and were what they should be all the time
    Part(num_pages) ────────────────▶
    ◀──────────────────── their bytes             by socket

The receiver chooses what carries each part: NIXL over RDMA is faster than a socket, NIXL over TCP
is slower (on one machine by half), and what UCX has found cannot be asked. So both are measured.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Iterator, Sequence

from msgspec import Struct

from minisgl.runner.nixl_pages import Carrier, NixlError, NixlPages, Readable
from minisgl.runner.page_wire import SILENCE_S, fill, receive, send

logger = logging.getLogger(__name__)

PART_BYTES = 64 << 20
PART_PAGES = 256  # at most: describing pages to NIXL holds the interpreter's lock
MAX_PAGES = 1 << 16  # that may be read by NIXL: their addresses are one message
PROGRESS_S = 0.0005
HELD = b"\1"


class Part(Struct, array_like=True):
    """The next pages: they have been read, or their bytes are wanted."""

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
                fill(peer, memoryview(bytearray(HELD)))
                yield len(part)
                continue
        began = time.perf_counter()
        send(peer, Part(len(part)))
        yield from receive_all(peer, part)
        if remote is not None:
            seconds = time.perf_counter() - began
            remote.carried(Carrier.SOCKET, sum(map(len, part)), seconds)
