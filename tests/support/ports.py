"""Ports for servers that must know theirs before they start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Reserve a port on loopback: until the end, the system gives it to nobody that asks for any.

    The socket that reserves it does not listen. So it is in no server's way that sets SO_REUSEADDR
    or SO_REUSEPORT, as all do here.
    """
    with socket.socket() as reserving:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            reserving.setsockopt(socket.SOL_SOCKET, option, 1)
        reserving.bind(("127.0.0.1", 0))
        yield reserving.getsockname()[1]
