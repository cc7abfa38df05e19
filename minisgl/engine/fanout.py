"""Notifies consumers of new output, without keeping the engine from its next step."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Protocol

# An iteration of the loop runs all that is ready. Writing an event to a socket takes 10 to 20 µs:
# this many delay the engine's own callback by half a millisecond.
CONSUMERS_PER_TURN = 32


class Notified(Protocol):
    def notify(self) -> None: ...


class Fanout:
    """Notifies some consumers in each iteration of the loop, in the order in which they were added.

    A consumer that is already waiting keeps its place, and then finds everything that arrived in
    the meantime. So all consumers are notified equally often, and get several tokens at once only
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
