"""Notifies consumers of new output without delaying the next step."""

from __future__ import annotations

import asyncio
from itertools import islice

from minisgl.engine.stream import OutputStream

# Writing an SSE event to a socket takes 10 to 20 µs, so this many consumers delay the engine's own
# callback by at most half a millisecond.
CONSUMERS_PER_TURN = 32


class Fanout:
    """Notifies up to CONSUMERS_PER_TURN consumers per loop iteration, first in, first out.

    Adding a consumer that is already queued does not move it; once notified it receives everything
    that has arrived by then. So all consumers are notified equally often, and receive several
    tokens at once only when the loop cannot keep up with the steps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[OutputStream, None] = {}  # a queue without duplicates

    def add(self, stream: OutputStream) -> None:
        """Notify the consumer of a stream soon."""
        if not self._due:
            self._loop.call_soon(self._notify_some)
        self._due[stream] = None

    def _notify_some(self) -> None:
        for stream in [*islice(self._due, CONSUMERS_PER_TURN)]:
            del self._due[stream]
            stream.notify()
        if self._due:
            self._loop.call_soon(self._notify_some)
