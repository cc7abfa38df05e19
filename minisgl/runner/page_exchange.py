"""Transfers of pages between a rank and the same rank of another engine: host pages, or pages of
the device.

    sending    Transfer(SEND, name) ─ waits for a peer that takes `name`, and sends it the pages
    receiving  Transfer(RECEIVE, name, peers) ─ takes `name` from its peer

A transfer has ended once no thread reads or writes its pages any more, whatever went wrong. So the
sender's pages are those of the prefix for as long as any of its ranks sends them, and whoever has
received a page whole has the right one. A page of the device has come whole when the sender has
confirmed that (page_parts.py).
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct

from minisgl.distributed.peer_memory import PeerMemoryError
from minisgl.errors import without_words
from minisgl.kvcache.store import Done, Transfer, Way
from minisgl.runner.copy_lanes import Mark
from minisgl.runner.device_pages import DevicePages
from minisgl.runner.nixl_pages import NixlPages
from minisgl.runner.page_parts import (
    receive_all,
    receive_device_parts,
    receive_parts,
    send_all,
    send_device_parts,
    send_parts,
)
from minisgl.runner.page_wire import (
    SILENCE_S,
    Address,
    PageServer,
    TransferError,
    connection,
    receive,
    send,
)

logger = logging.getLogger(__name__)


class Take(Struct, array_like=True):
    """The first message of a rank that receives. The answer is the bytes of all pages, or what
    page_parts.py says."""

    name: bytes  # of the transfer
    reads: bool = False  # it can read host pages by NIXL
    on_device: bool = False  # it wants pages of the device


@dataclass(frozen=True, slots=True)
class _Offered:
    """Pages for which a peer is to come."""

    transfer: Transfer
    after: Sequence[Mark]
    done: Done
    expiry: threading.Timer


class PageExchange:
    """The part of one rank. Any thread may call it."""

    def __init__(
        self,
        address: Address,
        token: bytes,
        rank: int,
        views: Callable[[Sequence[int]], list[memoryview]],
        enter_thread: Callable[[], None],
        nixl: NixlPages | None = None,
        device: DevicePages | None = None,
    ) -> None:
        """Listen at `address`. rank: among the ranks of its engine. views: the memory of host
        pages; it may block. Raises OSError.

        Without `device`, transfers of its pages end at once.
        """
        self._token = token
        self._rank = rank
        self._views = views
        self._enter_thread = enter_thread
        self._nixl = nixl
        self._device = device
        self._offered: dict[bytes, _Offered] = {}  # by name
        self._changed = threading.Condition()  # for what is offered
        self._closed = False
        self._server = PageServer(address, token, self._answer)

    @property
    def address(self) -> Address:
        """Where peers find this rank."""
        return self._server.address

    @property
    def shares_device(self) -> bool:
        """Whether pages of the device can be transferred."""
        return self._device is not None

    def queue(self, transfer: Transfer, after: Sequence[Mark], done: Done) -> None:
        """Begin when `after` are reached. `done` is called on any thread, whatever goes wrong, but
        not after `close`."""
        if transfer.pages and self._device is None:
            done(transfer.id, 0)
            return
        try:
            if transfer.way is Way.SEND:
                self._offer(transfer, after, done)
            else:
                self._thread(self._receive, transfer, after, done)
        except RuntimeError as error:  # the system has no more threads
            logger.error("KV pages cannot be transferred: %s", without_words(error))
            done(transfer.id, 0)

    def close(self) -> None:
        """Begin no more transfers. Those under way end by themselves, and touch pages of the device
        no more."""
        self._server.close()
        with self._changed:
            self._closed = True
            for offered in self._offered.values():
                offered.expiry.cancel()
            self._offered.clear()
        if self._nixl is not None:
            self._nixl.close()
        if self._device is not None:
            self._device.close()

    def _thread(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name="minisgl-receiving", daemon=True).start()

    # -- sending -----------------------------------------------------------------------------------

    def _offer(self, transfer: Transfer, after: Sequence[Mark], done: Done) -> None:
        expiry = threading.Timer(SILENCE_S, self._expire, (transfer,))
        expiry.daemon = True
        with self._changed:
            expiry.start()
            self._offered[transfer.name] = _Offered(transfer, after, done, expiry)
            self._changed.notify_all()

    def _expire(self, transfer: Transfer) -> None:
        """End a transfer for which nobody has come."""
        with self._changed:
            offered = self._offered.pop(transfer.name, None)
        if offered is not None:
            offered.done(transfer.id, 0)

    def _answer(self, peer: socket.socket) -> None:
        """Send a peer what it takes. It may come before this rank has heard of that."""
        take = receive(peer, Take)
        with self._changed:
            if not self._changed.wait_for(lambda: take.name in self._offered, SILENCE_S):
                return
            offered = self._offered.pop(take.name)
        offered.expiry.cancel()
        num_pages = 0
        try:
            self._enter_thread()
            for mark in offered.after:
                mark.wait()
            for count in self._parts_to(peer, take, offered.transfer):
                num_pages += count
        except PeerMemoryError as error:
            self._failed_on_device(error)
        except RuntimeError as error:
            if not self._closed:
                logger.error("KV pages cannot be sent: %s", without_words(error))
        finally:
            self._end(offered.transfer, num_pages, offered.done)

    def _parts_to(self, peer: socket.socket, take: Take, transfer: Transfer) -> Iterator[int]:
        if take.on_device != bool(transfer.pages):
            raise EOFError
        if transfer.pages:
            assert self._device is not None
            return send_device_parts(peer, transfer.pages, self._device)
        views = self._views(transfer.host_pages)
        return send_parts(peer, views, self._nixl) if take.reads else send_all(peer, views)

    # -- receiving ---------------------------------------------------------------------------------

    def _receive(self, transfer: Transfer, after: Sequence[Mark], done: Done) -> None:
        num_pages = 0
        try:
            self._enter_thread()
            for mark in after:
                mark.wait()
            views = self._views(transfer.host_pages)
            address = transfer.peers[self._rank]
            with connection(address, self._token) as peer:
                for count in self._parts_from(peer, address, transfer, views):
                    num_pages += count
        except TransferError as error:
            logger.debug("KV pages did not come: %s", error)
        except PeerMemoryError as error:
            self._failed_on_device(error)
        except Exception as error:
            if not self._closed:
                logger.error("KV pages cannot be received: %s", without_words(error))
        finally:
            self._end(transfer, num_pages, done)

    def _parts_from(
        self, peer: socket.socket, address: str, transfer: Transfer, views: Sequence[memoryview]
    ) -> Iterator[int]:
        if transfer.pages:
            assert self._device is not None
            send(peer, Take(transfer.name, on_device=True))
            return receive_device_parts(peer, address, transfer.pages, self._device)
        nixl = self._nixl if self._nixl is not None and self._nixl.is_ready else None
        send(peer, Take(transfer.name, reads=nixl is not None))
        if nixl is None:
            return receive_all(peer, views)
        return receive_parts(peer, address, views, nixl)

    # -- both --------------------------------------------------------------------------------------

    def _failed_on_device(self, error: PeerMemoryError) -> None:
        if not self._closed:
            logger.warning("KV pages cannot go straight from device to device: %s", error)

    def _end(self, transfer: Transfer, num_pages: int, done: Done) -> None:
        if not self._closed:
            done(transfer.id, num_pages)
