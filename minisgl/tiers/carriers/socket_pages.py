"""Host pages as bytes on the connection itself, for which the two ranks need nothing else."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from minisgl.tiers.carriers.carrier import PART_BYTES, Carrier, Readable
from minisgl.tiers.carriers.connections import fill


class SocketPages(Carrier[memoryview]):
    name = "socket"

    def part_size(self, page_bytes: int) -> int:
        return max(1, PART_BYTES // page_bytes)

    def put(self, slot: int, pages: Sequence[memoryview]) -> Readable:
        return Readable(views=pages)

    def fetch(
        self, peer: socket.socket, address: str, description: bytes, pages: Sequence[memoryview]
    ) -> None:
        for page in pages:
            fill(peer, page)
