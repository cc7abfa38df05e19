"""Ends the preparation of an answer when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive


@contextlib.asynccontextmanager
async def while_waited_for(request: Request) -> AsyncIterator[Request]:
    """Cancel what runs inside when the client leaves: it may wait for a rendering, or a grammar.

    Yields the request, whose body is read inside; raises ClientDisconnect. A response that is made
    inside watches the client itself.
    """
    has_arrived = asyncio.Event()  # the body; until then it is read inside

    async def receive() -> Message:
        message = await request.receive()
        if not message.get("more_body", False):
            has_arrived.set()
        return message

    async def left() -> Message:
        await has_arrived.wait()
        return await request.receive()

    async with while_client_waits(left):
        yield Request(request.scope, receive)


@contextlib.asynccontextmanager
async def while_client_waits(receive: Receive) -> AsyncIterator[None]:
    """Cancel what runs inside when the client disconnects, and raise ClientDisconnect."""
    inside = asyncio.current_task()
    assert inside is not None

    async def cancel_when_left() -> None:
        await until_left(receive)
        inside.cancel()  # not from a callback, which could not be taken back below

    leaving = asyncio.ensure_future(cancel_when_left())
    try:
        yield
    except asyncio.CancelledError:
        if leaving.done() and inside.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        leaving.cancel()


async def until_left(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
