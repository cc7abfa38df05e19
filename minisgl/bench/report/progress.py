"""Shows the progress of a run in a live line, on terminals only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from minisgl.bench.beside import beside
from minisgl.bench.online.client import RunProgress

# Drawing takes a millisecond or two of the core that measures.
INTERVAL_S = 0.5


@asynccontextmanager
async def live(
    console: Console,
    what: str,
    total: int,
    unit: str,
    snapshot: Callable[[], RunProgress],
    interval_s: float = INTERVAL_S,
) -> AsyncIterator[None]:
    """Shows requests, speed and time while the context is open."""
    if not console.is_terminal:
        yield
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=False,  # it would draw from a thread at any time
    )
    with bar:
        task = bar.add_task(what, total=total, speed="")

        async def draw() -> None:
            before = snapshot().num_received
            while True:
                now = snapshot()
                rate = (now.num_received - before) / interval_s
                speed = f"{now.num_running} running, {rate:,.0f} {unit}/s"
                before = now.num_received
                bar.update(task, completed=now.num_ended, speed=speed)
                bar.refresh()
                await asyncio.sleep(interval_s)

        async with beside(draw()):
            yield
