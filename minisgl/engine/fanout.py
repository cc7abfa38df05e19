"""Tells consumers of what a step has brought, without keeping the engine from its next step."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Protocol

# A turn of the loop runs all that is ready. Writing an event to a socket takes 10 to 20 µs, so this
# many keep the engine's own callback waiting for half a millisecond.
CONSUMERS_PER_TURN = 32


class Notified(Protocol):
    def notify(self) -> None: ...


class Fanout:
    """Notifies some consumers in each turn of the loop, in the order in which they came due.

    One that is due already keeps its place, and then finds everything that came meanwhile. So no
    consumer is told less often than any other, and they are told of several tokens at once only
    when the loop does not keep up with the steps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[Notified, None] = {}  # in order

    def add(self, consumer: Notified) -> None:
        if not self._due:
            self._loop.call_soon(self._notify_some)
        self._due[consumer] = None

    def _notify_some(self) -> None:
        for consumer in [*islice(self._due, CONSUMERS_PER_TURN)]:
            del self._due[consumer]
            consumer.notify()
        if self._due:
            self._loop.call_soon(self._notify_some)
