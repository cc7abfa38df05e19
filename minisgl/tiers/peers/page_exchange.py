"""Moves of pages between a rank and the same rank of another engine: host pages, or pages of
the device.

    sending    Move(to ENGINE, name) ─ waits for a peer that takes `name`, and lets it have them
    receiving  Move(from ENGINE, name, peers) ─ takes `name` from its peer

A move has ended once no thread reads or writes its pages any more, whatever went wrong. So the
sender's pages are those of the prefix for as long as any of its ranks sends them.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from minisgl.device.copy_lanes import Mark
from minisgl.distributed.addresses import Address
from minisgl.errors import without_words
from minisgl.kvcache.moves import Done, Move, Place
from minisgl.tiers.carriers.carrier import Carrier, CarrierError
from minisgl.tiers.carriers.connections import (
    SILENCE_S,
    PageServer,
    TransferError,
    connection,
    receive,
    send,
)
from minisgl.tiers.peers.choice import Choice
from minisgl.tiers.peers.page_parts import OwnPages, Take, receive_pages, send_pages

logger = logging.getLogger(__name__)

MAX_ENGINES = 64  # whose speeds are kept, the least recently used first to go
NAME_BYTES = 16


@dataclass(eq=False, repr=False)
class PageExchange:
    """The part of one rank, which listens at its address. Any thread may call it. Moves of pages
    that have no carrier end at once. Raises OSError if the address cannot be had."""

    _address: Address
    _token: bytes
    _rank: int  # among the ranks of its engine
    _page_bytes: int
    _views: Callable[[Sequence[int]], list[memoryview]]  # the memory of host pages; it may block
    _enter_thread: Callable[[], None]
    _host_carriers: Sequence[Carrier[memoryview]]
    _device_carriers: Sequence[Carrier[int]] = ()

    def __post_init__(self) -> None:
        self._engine = secrets.token_bytes(NAME_BYTES)
        self._choice_of = lru_cache(MAX_ENGINES)(lambda engine: Choice())
        self._peers: dict[bytes, socket.socket] = {}  # that have come, by what they take
        self._changed = threading.Condition()  # of the peers
        self._closed = False
        self._server = PageServer(self._address, self._token, self._answer)

    @property
    def address(self) -> Address:
        """Where peers find this rank."""
        return self._server.address

    def start(self, move: Move, after: Sequence[Mark], done: Done) -> None:
        """Begin when `after` are reached. `done` is called on any thread, whatever goes wrong, but
        not for moves that `close` has found under way."""
        if self._closed or (move.uses_device and not self._device_carriers):
            done(move.id, 0)
            return
        work = threading.Thread(
            target=self._run, args=(move, after, done), name="minisgl-peer", daemon=True
        )
        try:
            work.start()
        except RuntimeError as error:  # the system has no more threads
            logger.error("KV pages cannot be transferred: %s", without_words(error))
            done(move.id, 0)

    def close(self) -> None:
        """Begin no more moves. Those under way end by themselves, and touch pages of the device
        no more."""
        self._server.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        carriers: list[Carrier[Any]] = [*self._host_carriers, *self._device_carriers]
        for carrier in carriers:
            carrier.close()

    def _run(self, move: Move, after: Sequence[Mark], done: Done) -> None:
        """Carry out one side of a move."""
        sends = move.target is Place.ENGINE
        num_pages = 0
        try:
            self._enter_thread()
            for mark in after:
                mark.wait()
            for count in self._send(move) if sends else self._receive(move):
                num_pages = count
        except (TransferError, OSError, EOFError, msgspec.MsgspecError) as error:
            logger.debug("KV pages were not transferred: %r", error)
        except CarrierError as error:
            if not self._closed:
                logger.warning("%s", error)
        except Exception as error:
            if not self._closed:
                verb = "sent" if sends else "received"
                logger.error("KV pages cannot be %s: %s", verb, without_words(error))
        finally:
            if not self._closed:
                done(move.id, num_pages)

    def _answer(self, peer: socket.socket) -> None:
        """Hand a peer to the thread that sends what it takes. That may begin later."""
        name = receive(peer, Take).name
        with self._changed:
            self._peers[name] = peer
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._peers.get(name) is not peer, SILENCE_S)
            if self._peers.get(name) is peer:
                del self._peers[name]

    def _send(self, move: Move) -> Iterator[int]:
        """Wait for a peer, and let it have pages; yields how many have come there so far."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or move.name in self._peers, SILENCE_S)
            found = self._peers.pop(move.name, None)
            if found is None or self._closed:
                return
            peer = found.dup()  # the other thread closes its own
            self._changed.notify_all()
        with peer:
            yield from send_pages(peer, self._engine, self._own(move))

    def _receive(self, move: Move) -> Iterator[int]:
        """Fetch pages; yields how many have come so far."""
        address, own = move.peers[self._rank], self._own(move)
        with connection(address, self._token) as peer:
            send(peer, Take(move.name))
            yield from receive_pages(peer, address, own, self._choice_of)

    def _own(self, move: Move) -> OwnPages[Any]:
        if move.uses_device:
            return OwnPages(move.pages, self._page_bytes, self._device_carriers)
        views = self._views(move.pages)
        return OwnPages(views, self._page_bytes, self._host_carriers)
