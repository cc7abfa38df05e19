"""How two ranks exchange the pages of a move on a connection, whatever carries them.

    receiver                           sender
    Take(name) ──────────────────────▶
    ◀──────────────── Ready(carriers)
    Part(0, num_pages, carrier) ─────▶          prepares these pages
    ◀──────────────── Held(description)         and their bytes, where the peer cannot read them
    Part(first, num_pages, carrier) ─▶          those before `first` have been read
    ◀──────────────── Held(description)         and were what they should be all the time
    ...
    Part(first, 0, carrier) ─────────▶          it wants no more
    ◀──────────────── Held

The receiver chooses what carries each part. A sender that has waited too long gives its pages up:
they may become others while they are read. So a page counts only when the sender has answered once
more after it has been read.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic

from msgspec import Struct

from minisgl.tiers.carriers.carrier import Carrier, CarrierAwayError, CarrierError, Page
from minisgl.tiers.carriers.connections import TransferError, receive, send
from minisgl.tiers.peers.choice import Choice

logger = logging.getLogger(__name__)


class Take(Struct, array_like=True):
    """What the peer has come for."""

    name: bytes  # of the move, the same on both sides


class Ready(Struct, array_like=True):
    """The pages can be taken."""

    engine: bytes  # a name of the sender until it ends
    page_bytes: int
    carriers: dict[str, int]  # with the number of pages that each takes at once


class Part(Struct, array_like=True):
    """The pages before `first` have been read, and these are wanted next."""

    first: int
    num_pages: int
    carrier: str


class Held(Struct, array_like=True):
    """What was read so far was right, and the next part can be read."""

    description: bytes = b""  # for the carrier


@dataclass(frozen=True, slots=True)
class OwnPages(Generic[Page]):
    """The pages of a move on this side."""

    pages: Sequence[Page]
    page_bytes: int
    carriers: Sequence[Carrier[Page]]  # of these pages; the first ones are tried first


def send_pages(peer: socket.socket, engine: bytes, own: OwnPages[Page]) -> Iterator[int]:
    """Let a peer have pages; yields how many have come there so far."""
    ready = {carrier.name: carrier for carrier in own.carriers if carrier.is_ready}
    sizes = {name: carrier.part_size(own.page_bytes) for name, carrier in ready.items()}
    with ExitStack() as stack:
        slots = {name: stack.enter_context(carrier.lend()) for name, carrier in ready.items()}
        send(peer, Ready(engine, own.page_bytes, sizes))
        first = end = 0
        while True:
            for carrier in ready.values():
                carrier.wait(peer)
            part = receive(peer, Part)
            if not first <= part.first <= end or part.carrier not in ready:
                raise EOFError
            first, end = part.first, part.first + part.num_pages
            yield first
            if not first <= end <= min(len(own.pages), first + sizes[part.carrier]):
                raise EOFError
            readable = ready[part.carrier].put(slots[part.carrier], own.pages[first:end])
            send(peer, Held(readable.description))
            for view in readable.views:
                peer.sendall(view)
            if first == end:
                return


def receive_pages(
    peer: socket.socket, address: str, own: OwnPages[Page], choice_of: Callable[[bytes], Choice]
) -> Iterator[int]:
    """Fetch pages from the rank at `address`; yields how many have come so far.

    choice_of: what is known of the carriers of pages from an engine. Raises CarrierError if none
    can bring them, TransferError, or what a connection may raise.
    """
    ready = receive(peer, Ready)
    if ready.page_bytes != own.page_bytes:
        raise CarrierError(f"KV pages of another engine have {ready.page_bytes} bytes")
    choice = choice_of(ready.engine)
    usable = {each.name: each for each in own.carriers if ready.carriers.get(each.name, 0) > 0}
    if not usable:
        raise TransferError("the other engine has pages of another kind")
    name, first = "", 0
    while first < len(own.pages):
        name = choice.among([name for name, carrier in usable.items() if carrier.is_ready])
        size = min(ready.carriers[name], usable[name].part_size(own.page_bytes))
        pages = own.pages[first : first + size]
        began = time.perf_counter()
        send(peer, Part(first, len(pages), name))
        held = receive(peer, Held)
        yield first
        try:
            usable[name].fetch(peer, address, held.description, pages)
        except CarrierError as error:
            del usable[name]
            if not isinstance(error, CarrierAwayError):
                choice.failed(name)
            if not usable:
                raise
            logger.warning("%s", error)
            continue
        first += len(pages)
        choice.carried(name, len(pages) * own.page_bytes, time.perf_counter() - began)
    send(peer, Part(first, 0, name))
    receive(peer, Held)
    yield first
