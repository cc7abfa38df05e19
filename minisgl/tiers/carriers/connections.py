"""Connections between engines that exchange KV pages.

A message is msgpack with a length before it; pages are bytes, as they are in host memory. Over TCP
both ends first prove that they know the cluster token (distributed/handshake.py); what follows is
neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from minisgl.distributed.addresses import Address
from minisgl.distributed.handshake import HandshakeError, prove_to_main, prove_to_node
from minisgl.errors import MinisglError
from minisgl.subprocesses import LENGTH

logger = logging.getLogger(__name__)

SILENCE_S = 10.0  # after which a silent peer is given up
PIECE_BYTES = 64 << 20  # read by one system call, without the interpreter's lock
MAX_MESSAGE_BYTES = 1 << 20
MAX_PEERS = 128  # at a time; more are turned away
FULL_S = 0.1  # retry interval when accept() fails for lack of file descriptors or memory

Message = TypeVar("Message", bound=Struct)


class TransferError(MinisglError):
    """The pages of a prefix did not come; it has to be computed."""


class PageServer:
    """Accepts peers, each of which is answered on a thread of its own."""

    def __init__(
        self, address: Address, token: bytes, answer: Callable[[socket.socket], None]
    ) -> None:
        """token: of the cluster, for TCP. answer: may raise what a connection may raise.

        Raises OSError if the address cannot be had.
        """
        self._token = token
        self._answer = answer
        self._listener = address.listen()
        self._closed = False
        self._num_free = threading.Semaphore(MAX_PEERS)
        if not address.path:
            address = replace(address, port=self._listener.getsockname()[1])
        self.address = address  # with the port that was chosen
        threading.Thread(target=self._accept, name="minisgl-pages", daemon=True).start()

    def close(self) -> None:
        """Accept no more peers."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        if self.address.path:
            Path(self.address.path).unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                time.sleep(FULL_S)
                continue
            if not self._num_free.acquire(blocking=False):
                peer.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
            except RuntimeError:  # the system has no more threads
                peer.close()
                self._num_free.release()

    def _serve(self, peer: socket.socket) -> None:
        # For a peer that has gone, or an engine that is being closed, there is nothing to do.
        try:
            with peer, contextlib.suppress(OSError, EOFError, msgspec.MsgspecError, RuntimeError):
                _limit_waiting(peer)
                if not self.address.path:
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    prove_to_node(peer, self._token)
                self._answer(peer)
        except HandshakeError as error:
            logger.warning("Refused a connection to %s: %s", self.address, error)
        finally:
            self._num_free.release()


@contextlib.contextmanager
def connection(address: str, token: bytes) -> Iterator[socket.socket]:
    """A connection to another engine. Whatever goes wrong with it, here or by the caller, is raised
    as TransferError."""
    try:
        where = Address.parse(address)
        if not (token or where.is_private()):
            raise TransferError("beyond this machine engines need a shared secret")
        family, target = where.resolve()
        with socket.socket(family, socket.SOCK_STREAM) as peer:
            _limit_waiting(peer)
            peer.connect(target)
            if not where.path:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                prove_to_main(peer, token)
            yield peer
    except EOFError:
        raise TransferError("the other engine has ended") from None
    except (BlockingIOError, TimeoutError):
        raise TransferError(f"the other engine is silent for {SILENCE_S:g} s") from None
    except HandshakeError as error:
        raise TransferError(f"the other engine cannot be asked: {error}") from error
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise TransferError(f"{type(error).__name__}: {error}") from error


def send(peer: socket.socket, message: Struct) -> None:
    encoded = msgspec.msgpack.encode(message)
    peer.sendall(LENGTH.pack(len(encoded)) + encoded)


def receive(peer: socket.socket, kind: type[Message]) -> Message:
    """Raises EOFError, OSError or MsgspecError."""
    head = bytearray(LENGTH.size)
    fill(peer, memoryview(head))
    (size,) = LENGTH.unpack(head)
    if size > MAX_MESSAGE_BYTES:
        raise EOFError
    encoded = bytearray(size)
    fill(peer, memoryview(encoded))
    return msgspec.msgpack.decode(encoded, type=kind)


def fill(peer: socket.socket, view: memoryview) -> None:
    """Fill `view` from the socket. Raises EOFError or OSError."""
    at = 0
    while at < len(view):
        count = peer.recv_into(view[at : at + PIECE_BYTES], flags=socket.MSG_WAITALL)
        if not count:
            raise EOFError
        at += count


def _limit_waiting(peer: socket.socket) -> None:
    """Let calls raise BlockingIOError after SILENCE_S without a byte.

    A timeout of Python's own would make the socket one that does not block, which takes a call for
    each buffer of the system.
    """
    seconds, rest = divmod(SILENCE_S, 1)
    limit = struct.pack("ll", int(seconds), int(rest * 1e6))
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, way, limit)
