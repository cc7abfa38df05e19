"""Addresses at which engines and their ranks find each other: Unix sockets on one host, or TCP."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minisgl.config import ResolvedConfig
from minisgl.distributed.cluster_token import OPTION, VARIABLE, read_token
from minisgl.errors import ConfigError

BACKLOG = 128
GROUP_BACKENDS = ("gloo", "nccl")


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
        """Whether it stands for all addresses of this machine, so that no other machine can use it.
        Raises OSError."""
        return not self.path and self._ip().is_unspecified

    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        host: str = self.resolve()[1][0]
        return ipaddress.ip_address(host.partition("%")[0])

    def listen(self) -> socket.socket:
        """Open the address, on its own interface only. Replaces a Unix socket that an ended process
        has left. Raises OSError."""
        family, address = self.resolve()
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self.path:
                Path(self.path).unlink(missing_ok=True)
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            if self.path:
                Path(self.path).chmod(0o600)  # before any process can connect
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener


@dataclass(frozen=True, slots=True)
class Listening:
    """Where other engines find ranks of this one."""

    ranks: tuple[str, ...]  # their addresses
    is_direct: bool = False  # others may map what is on the device of each of them

    @classmethod
    def of(cls, parts: Iterable[Listening]) -> Listening:
        """All ranks of `parts`, in this order."""
        parts = [*parts]
        ranks = [rank for part in parts for rank in part.ranks]
        return cls(tuple(ranks), all(part.is_direct for part in parts))


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


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where a group meets, and which part of it an engine is."""

    master_address: str
    master_port: int
    rank_offset: int  # of the engine's first rank
    world_size: int
    group_name: str
    backend: str
    packed: bool = False  # tensors come as the bytes of several
