"""Runs work of a benchmark beside what it measures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` while the context is open; what it raises comes at the end."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
