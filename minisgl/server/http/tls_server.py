"""Accepts connections and shakes hands for TLS, counting each connection from the beginning.

A server of asyncio tells nobody of a connection before its handshake is complete, so that silent
clients could take all open files.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from minisgl.server.http.connection import HEAD_SECONDS, Connections, ServerConnection

PAUSE_SECONDS = 0.1  # when a connection cannot be accepted, such as for want of open files


class TLSServer:
    """A listening socket, with what uvicorn uses of asyncio's servers."""

    def __init__(
        self, listener: socket.socket, shake_hands: Callable[[socket.socket], Handshake]
    ) -> None:
        """shake_hands: begins with an accepted socket, and returns at once."""
        listener.setblocking(False)
        self._listener = listener
        self._shake_hands = shake_hands
        self._accepting = asyncio.ensure_future(self._accept())

    def close(self) -> None:
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait((self._accepting,))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self._shake_hands(accepted)


class Handshake:
    """A connection until TLS is established on it."""

    def __init__(
        self,
        context: ssl.SSLContext,
        connections: Connections,
        connect: Callable[[], ServerConnection],
        accepted: socket.socket,
    ) -> None:
        self._socket = accepted
        self._context = context
        self._connections = connections
        self._connect = connect
        self._has_begun = False
        self._task = asyncio.ensure_future(self._run())
        connections.add(self)

    def count_second(self) -> None:
        """Do nothing: the loop limits the time of a handshake."""

    def abort(self) -> None:
        self._task.cancel()
        if not self._has_begun:
            self._socket.close()  # otherwise its transport does

    def shutdown(self) -> None:
        """Give up; called by uvicorn when the server stops."""
        self.abort()

    def _connected(self) -> ServerConnection:
        connection = self._connect()
        connection.handshake = self
        return connection

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._has_begun = True
        try:
            await loop.connect_accepted_socket(
                self._connected,
                self._socket,
                ssl=self._context,
                ssl_handshake_timeout=HEAD_SECONDS,
            )
        except OSError:  # of the connection or of TLS; the transport is closed
            pass
        finally:
            self._connections.remove(self)
