"""Connections between engines that exchange KV pages: Unix sockets on one host, or TCP.

A message is msgpack with a length before it; pages are bytes, as they are in host memory. Over TCP
both ends first prove that they know the cluster token (runner/nodes/handshake.py); what follows is
neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from minisgl.config import ResolvedConfig
from minisgl.errors import ConfigError, MinisglError
from minisgl.runner.nodes.handshake import HandshakeError, prove_to_main, prove_to_node
from minisgl.runner.nodes.token import OPTION, VARIABLE, read_token
from minisgl.subprocesses import LENGTH

logger = logging.getLogger(__name__)

# After which a silent peer is given up.
SILENCE_S = 10.0
# Of pages in one system call, without the interpreter's lock.
PIECE_BYTES = 64 << 20
MAX_MESSAGE_BYTES = 1 << 20
BACKLOG = 128
MAX_PEERS = 128  # at a time; more are turned away
FULL_S = 0.1  # between two tries to accept a peer when the system is out of something

Message = TypeVar("Message", bound=Struct)


class TransferError(MinisglError):
    """The pages of a prefix did not come; it has to be computed."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine, or one of its ranks, is found."""

    path: str = ""  # of a Unix socket, which only this user may open; empty for TCP
    host: str = ""
    port: int = 0  # 0: any free one

    @classmethod
    def parse(cls, text: str) -> Address:
        """From a path, in which there is a slash, or host:port. Raises ValueError."""
        if "/" in text:
            return cls(path=text)
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ValueError("allowed: HOST:PORT, or the path of a Unix socket")
        return cls(host=host, port=int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"

    def of_rank(self, rank: int) -> Address:
        """Where a rank of the engine with this address listens."""
        return Address(path=f"{self.path}.{rank}") if self.path else replace(self, port=0)

    def resolve(self) -> tuple[int, Any]:
        """The family and the address of a socket; IPv4 is preferred. Raises OSError."""
        if self.path:
            return socket.AF_UNIX, self.path
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        found.sort(key=lambda candidate: candidate[0] != socket.AF_INET)
        family, _, _, _, address = found[0]
        return family, address

    def is_private(self) -> bool:
        """Whether only processes of this machine reach it. Raises OSError."""
        return bool(self.path) or self._ip().is_loopback

    def is_everywhere(self) -> bool:
        """Whether it stands for all addresses of this machine, so that nobody finds it by that.
        Raises OSError."""
        return not self.path and self._ip().is_unspecified

    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        host: str = self.resolve()[1][0]
        return ipaddress.ip_address(host.partition("%")[0])

    def listen(self) -> socket.socket:
        """Open the address, on its interface alone; a Unix socket that nobody uses any more makes
        way. Raises OSError."""
        family, address = self.resolve()
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self.path:
                Path(self.path).unlink(missing_ok=True)
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            if self.path:
                Path(self.path).chmod(0o600)  # before anybody can connect
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener


def check_address(text: str, config: ResolvedConfig) -> tuple[Address, bytes]:
    """The address of an engine, and the secret that its peers must know; empty if there is none.

    Blocks. Raises ConfigError, also for TCP beyond this machine without a secret.
    """
    try:
        address = Address.parse(text)
        if address.is_everywhere():
            raise ValueError("allowed: the address at which the other engines find this one")
        is_private = address.is_private()
    except OSError as error:
        raise ConfigError("address", text, f"not an address ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError("address", text, str(error)) from error
    token = b"" if address.path else read_token(config)
    if not (is_private or token):
        reason = (
            "beyond this machine engines that exchange KV pages need a shared secret: set "
            f"{VARIABLE} or {OPTION} for each, to the output of `openssl rand -hex 32`"
        )
        raise ConfigError("address", text, reason)
    return address, token


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
