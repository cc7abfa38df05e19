"""Lets other work on the event loop come between the parts of long work."""

from __future__ import annotations

import asyncio
import time

MAX_TURN_S = 0.005


class Turn:
    """A turn on the event loop, which ends after MAX_TURN_S."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    async def share(self) -> None:
        """Let the loop go on if it has been kept for long. Called between two parts of the work."""
        if time.monotonic() - self._began_s > MAX_TURN_S:
            await asyncio.sleep(0)
            self._began_s = time.monotonic()
