"""The connection of one client, and how much of its answers may wait for it to read."""

from __future__ import annotations

import asyncio
import resource
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Bytes that wait in this process, and again as many in the kernel, before `send` waits for the
# reader. What the engine produces meanwhile is merged, at a few bytes a token.
MAX_UNSENT_BYTES = 16 << 10
WANTED_FILES = 1 << 16


class Connection(HttpToolsProtocol):
    """uvicorn's own, with a small buffer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def eof_received(self) -> None:
        # The transport closes when it has sent what waits, which nobody may ever read.
        if self.flow.write_paused:
            self.transport.abort()


def limit_unsent(listener: socket.socket) -> None:
    """Let the kernel keep little of what a reader does not take. Its connections inherit it."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def raise_file_limit() -> int:
    """Let this process open as many connections as the system allows it; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = WANTED_FILES if hard == unlimited else min(WANTED_FILES, hard)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return WANTED_FILES if soft == unlimited else soft
