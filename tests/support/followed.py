"""Streams of an engine that is audited after each step, once however many streams follow it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from minisgl.engine import AsyncEngine
from minisgl.engine.stream import OutputStream
from minisgl.request import Request

_audited: WeakKeyDictionary[AsyncEngine, tuple[int, int]] = WeakKeyDictionary()


async def followed(engine: AsyncEngine, stream: OutputStream) -> Request:
    """The request of the stream, once it has ended."""
    async for _ in stream:
        audit_once(engine)
    return stream.request


def audit_once(engine: AsyncEngine) -> None:
    """Audit the engine, unless that was done since its last step."""
    scheduler = engine._scheduler
    now = scheduler._step, scheduler.num_in_flight  # steps that began, and that are to end
    if _audited.get(engine) != now:
        _audited[engine] = now
        engine.audit()
