"""The network interfaces of this machine."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
from pathlib import Path

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_SIOCGIFADDR = 0x8915  # of netdevice(7)
_IFREQ_BYTES = 256
_ADDRESS_AT = slice(20, 24)  # of an IPv4 address in the answer


def interface_of(address: str) -> str | None:
    """The name of the interface that has this IP address; None if it is not known."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    found = mapped or found
    if found.is_loopback:
        return LOOPBACK
    by_address = _ipv6_interfaces() if found.version == 6 else _ipv4_interfaces()
    return by_address.get(found.packed)


def _ipv4_interfaces() -> dict[bytes, str]:
    by_address: dict[bytes, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_IFREQ_BYTES}s", name.encode())
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            by_address[answer[_ADDRESS_AT]] = name
    return by_address


def _ipv6_interfaces() -> dict[bytes, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    return {bytes.fromhex(line.split()[0]): line.split()[-1] for line in lines}
