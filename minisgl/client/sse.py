"""Cuts the body of a streamed answer into server-sent events."""

from __future__ import annotations

from minisgl.client.errors import AnswerError

DATA = b"data:"
DONE = b"[DONE]"
EVENT_BYTES = 4 << 20  # the largest event
MEMORY_BYTES = 64  # that an event takes beside its bytes


class EventCutter:
    """Takes bytes in any pieces and returns complete events; `rest` is not an event."""

    def __init__(self, max_bytes: int) -> None:
        self._rest = bytearray()
        self._max_bytes = max_bytes  # of the whole
        self._room = max_bytes

    @property
    def rest(self) -> bytes:
        return bytes(self._rest)

    def cut(self, data: bytes) -> list[bytes]:
        """The events that end in `data`. Raises AnswerError if they become too large."""
        self._count(len(data))
        if b"\r" in data:
            # JSON has none of its own, so that all of them belong to the ends of lines.
            data = data.replace(b"\r", b"")
        if self._rest:
            seam = len(self._rest) - 1
            self._rest += data
            if len(self._rest) > EVENT_BYTES + len(data):
                raise AnswerError(f"sends an event of more than {EVENT_BYTES >> 20} MiB")
            if self._rest.find(b"\n\n", seam) < 0:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        *events, rest = data.split(b"\n\n")
        if rest:
            self._rest += rest
        self._count(MEMORY_BYTES * len(events))
        return events

    def _count(self, num_bytes: int) -> None:
        self._room -= num_bytes
        if self._room < 0:
            raise AnswerError(f"sends an answer of more than {self._max_bytes:,} bytes")


def data_of(event: bytes) -> bytes:
    """The data of an event; empty for a comment, which servers send as keep-alive."""
    if b"\n" not in event:
        return event[len(DATA) :].strip() if event.startswith(DATA) else b""
    lines = [line for line in event.split(b"\n") if line.startswith(DATA)]
    return b"\n".join(line[len(DATA) :].strip() for line in lines)
