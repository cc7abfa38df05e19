"""KV pages on their way from one engine to another, over a Unix socket.

Whoever wants the pages of a prefix connects, and names it by its key and the fingerprint of its own
model. The answer is a number of pages, and then their bytes, as they are in host memory. Everything
else is msgpack with a length before it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import msgspec
from msgspec import Struct

from minisgl.errors import MinisglError
from minisgl.subprocesses import LENGTH

# After which a silent peer is given up.
SILENCE_S = 10.0
# Of pages in one system call, without the interpreter's lock.
PIECE_BYTES = 64 << 20
MAX_MESSAGE_BYTES = 4096
BACKLOG = 128


class TransferError(MinisglError):
    """The pages of a prefix did not come; it has to be computed."""


class Want(Struct, array_like=True):
    fingerprint: bytes
    key: bytes
    first: int  # page


class Offer(Struct, array_like=True):
    num_pages: int = 0
    refusal: str = ""  # why there are none


# Opened for each transfer: the pages from `first` on, with their bytes. Raises TransferError.
Open = Callable[[Want], AbstractContextManager[tuple[int, Iterable[memoryview]]]]
Message = TypeVar("Message", Want, Offer)


class PageServer:
    """Sends pages, each to one peer on a thread of its own."""

    def __init__(self, path: str, open: Open) -> None:
        """path: of a socket that does not exist, in a folder that only this user may enter."""
        self._open = open
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        threading.Thread(target=self._accept, name="minisgl-pages", daemon=True).start()

    def close(self) -> None:
        """Accept no more peers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        # For a peer that has gone, or an engine that is being closed, there is nothing to do.
        with peer, contextlib.suppress(OSError, EOFError, msgspec.MsgspecError, RuntimeError):
            _limit_waiting(peer)
            want = _receive(peer, Want)
            try:
                with self._open(want) as (num_pages, views):
                    _send(peer, Offer(num_pages))
                    for view in views:
                        peer.sendall(view)
                    peer.recv(1)  # the end: the peer has all of them
            except TransferError as error:
                _send(peer, Offer(refusal=str(error)))


def receive_pages(path: str, want: Want, into: Callable[[int], Sequence[memoryview]]) -> int:
    """Receive pages of another engine; returns how many. Blocks. Raises TransferError.

    into: where so many pages go.
    """
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            _limit_waiting(peer)
            peer.connect(path)
            _send(peer, want)
            offer = _receive(peer, Offer)
            if not offer.num_pages:
                raise TransferError(offer.refusal)
            for view in into(offer.num_pages):
                _fill(peer, view)
            return offer.num_pages
    except EOFError:
        raise TransferError("the other engine has ended") from None
    except BlockingIOError:
        raise TransferError(f"the other engine is silent for {SILENCE_S:g} s") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise TransferError(f"{type(error).__name__}: {error}") from error


def _send(peer: socket.socket, message: Want | Offer) -> None:
    encoded = msgspec.msgpack.encode(message)
    peer.sendall(LENGTH.pack(len(encoded)) + encoded)


def _receive(peer: socket.socket, kind: type[Message]) -> Message:
    head = bytearray(LENGTH.size)
    _fill(peer, memoryview(head))
    (size,) = LENGTH.unpack(head)
    if size > MAX_MESSAGE_BYTES:
        raise EOFError
    encoded = bytearray(size)
    _fill(peer, memoryview(encoded))
    return msgspec.msgpack.decode(encoded, type=kind)


def _limit_waiting(peer: socket.socket) -> None:
    """Let calls raise BlockingIOError after SILENCE_S without a byte.

    A timeout of Python's own would make the socket one that does not block, which takes a call for
    each buffer of the system.
    """
    seconds, rest = divmod(SILENCE_S, 1)
    limit = struct.pack("ll", int(seconds), int(rest * 1e6))
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, way, limit)


def _fill(peer: socket.socket, view: memoryview) -> None:
    """Fill `view` from the socket; raises EOFError."""
    at = 0
    while at < len(view):
        count = peer.recv_into(view[at : at + PIECE_BYTES], flags=socket.MSG_WAITALL)
        if not count:
            raise EOFError
        at += count
