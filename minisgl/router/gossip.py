"""What routing processes tell each other: which prompt went to which replica.

Messages are datagrams, which are lost where a reader is busy: then a request may find less of its
prompt cached than it could.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from struct import Struct

from minisgl.router.fleet import Fleet

HEAD = Struct("!II")  # index and start of the replica, before the key
MAX_TOLD_BYTES = 64 << 10  # of a key
MAX_HEARD = 64  # messages at a time


class Gossip:
    """Tells the other processes what `fleet` has sent where, and tells `fleet` what they have."""

    def __init__(self, fleet: Fleet, paths: Sequence[str], index: int) -> None:
        """paths: of the sockets of all processes; index: which of them is this one's."""
        self._fleet = fleet
        self._others = [path for other, path in enumerate(paths) if other != index]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
            os.unlink(paths[index])
        self._socket.bind(paths[index])
        fleet.tell = self.tell
        asyncio.get_running_loop().add_reader(self._socket, self._hear)

    def tell(self, key: bytes, replica: int, start: int) -> None:
        message = HEAD.pack(replica, start) + key[:MAX_TOLD_BYTES]
        for path in self._others:
            with contextlib.suppress(OSError):
                self._socket.sendto(message, path)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _hear(self) -> None:
        for _ in range(MAX_HEARD):
            try:
                message = self._socket.recv(HEAD.size + MAX_TOLD_BYTES)
            except OSError:
                return
            replica, start = HEAD.unpack_from(message)
            self._fleet.hear(message[HEAD.size :], replica, start)
