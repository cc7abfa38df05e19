"""Waits for conditions. They have no limit of their own, which a busy machine could reach: what
never comes is ended by the limit of the test, which shows where it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Of a test: for what would outlive one that fails, such as threads, and for browsers.
LIMIT_S = 300.0


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.002)


async def until(condition: Callable[[], object]) -> None:
    """Wait while the event loop goes on."""
    while not condition():  # noqa: ASYNC110  what other threads and processes do sets no event
        await asyncio.sleep(0.002)
