"""Finds, opens and names the address of node 0."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from minisgl.config import ResolvedConfig
from minisgl.errors import ConfigError

BACKLOG = 16


def place(config: ResolvedConfig) -> str:
    """The address of node 0 as the user gave it, with the port."""
    host = f"[{config.master_addr}]" if ":" in config.master_addr else config.master_addr
    return f"{host}:{config.master_port}"


def find_main(config: ResolvedConfig) -> tuple[int, Any]:
    """The family and the socket address of node 0; IPv4 is preferred. Raises OSError if the name is
    not known."""
    found = socket.getaddrinfo(config.master_addr, config.master_port, type=socket.SOCK_STREAM)
    found.sort(key=lambda candidate: candidate[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    return family, address


def own_address(config: ResolvedConfig) -> tuple[int, Any]:
    """The family and the socket address of this machine, which is node 0. Raises ConfigError."""
    try:
        family, address = find_main(config)
    except OSError as error:
        reason = f"not an address ({error.strerror})"
        raise ConfigError("--master-addr", config.master_addr, reason) from error
    if ipaddress.ip_address(address[0].partition("%")[0]).is_unspecified:
        reason = "allowed: the address at which the other nodes find this one"
        raise ConfigError("--master-addr", config.master_addr, reason)
    return family, address


def listen(config: ResolvedConfig, family: int, address: Any) -> socket.socket:
    """Open the port of node 0, on the interface of its address alone. Raises ConfigError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            reason = "not an address of this machine, which is node 0"
            raise ConfigError("--master-addr", config.master_addr, reason) from error
        reason = f"{error.strerror} on {config.master_addr}; allowed: a free port"
        raise ConfigError("--master-port", config.master_port, reason) from error
    return listener
