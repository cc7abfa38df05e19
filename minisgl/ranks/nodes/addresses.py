"""Names, finds and opens the address of node 0."""

from __future__ import annotations

import errno
import socket

from minisgl.config import ResolvedConfig
from minisgl.distributed.addresses import Address
from minisgl.errors import ConfigError


def main_address(config: ResolvedConfig) -> Address:
    """The address of node 0 as the user gave it."""
    return Address(host=config.master_addr, port=config.master_port)


def own_address(config: ResolvedConfig) -> Address:
    """The IP address of this machine, which is node 0, with the port. Raises ConfigError."""
    try:
        _, (host, *_) = main_address(config).resolve()
    except OSError as error:
        reason = f"not an address ({error.strerror})"
        raise ConfigError("--master-addr", config.master_addr, reason) from error
    address = Address(host=host, port=config.master_port)
    if address.is_everywhere():
        reason = "allowed: the address at which the other nodes find this one"
        raise ConfigError("--master-addr", config.master_addr, reason)
    return address


def listen(config: ResolvedConfig, address: Address) -> socket.socket:
    """Open `own_address`. Raises ConfigError."""
    try:
        return address.listen()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            reason = "not an address of this machine, which is node 0"
            raise ConfigError("--master-addr", config.master_addr, reason) from error
        reason = f"{error.strerror} on {config.master_addr}; allowed: a free port"
        raise ConfigError("--master-port", config.master_port, reason) from error
