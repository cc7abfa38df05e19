"""What brings pages from a rank to the same rank of another engine.

    sender      lend ─▶ put(pages) ─▶ Readable(description)
    receiver                               └──▶ fetch(description, pages)

A page is the memory of a host page, or the number of a page on the device. The loops of both sides
are in peers/page_parts.py.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from minisgl.errors import MinisglError

PART_BYTES = 64 << 20

Page = TypeVar("Page")


class CarrierError(MinisglError):
    """Pages did not come, and nothing writes to them any more. The text is for the log."""


class CarrierAwayError(CarrierError):
    """Nothing has failed, but one of the two ranks cannot use the carrier at this moment."""


@dataclass(frozen=True, slots=True)
class Readable:
    """What a sender has prepared."""

    description: bytes = b""  # what the peer needs to read the pages
    views: Sequence[memoryview] = ()  # of pages that it cannot read: they are sent


class Carrier(ABC, Generic[Page]):
    """Any thread may call it."""

    name: ClassVar[str]

    @property
    def is_ready(self) -> bool:
        return True

    @abstractmethod
    def part_size(self, page_bytes: int) -> int:
        """Number of pages that travel at once."""

    def lend(self) -> AbstractContextManager[int]:
        """A slot for one sender. Blocks; raises CarrierError."""
        return nullcontext(0)

    @abstractmethod
    def put(self, slot: int, pages: Sequence[Page]) -> Readable:
        """Prepare pages, which may be none, in a slot of the caller's. Blocks.

        What was in the slot before has been there until now; otherwise it raises CarrierError.
        """

    def wait(self, peer: socket.socket) -> None:
        """Help a peer to read, if it needs that, until it sends a message. Raises EOFError."""
        return

    @abstractmethod
    def fetch(
        self, peer: socket.socket, address: str, description: bytes, pages: Sequence[Page]
    ) -> None:
        """Copy what the rank at `address` has prepared to `pages`, no more than `part_size`.

        Blocks. Raises CarrierError, or what a connection may raise.
        """

    def close(self) -> None:
        """Touch no pages any more."""
        return
