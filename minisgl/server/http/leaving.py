"""Ends the preparation of an answer when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

Owner = TypeVar("Owner")
Answer = TypeVar("Answer")
Handler = Callable[[Owner, Request], Coroutine[Any, Any, Answer]]


def while_waited_for(handler: Handler[Owner, Answer]) -> Handler[Owner, Answer]:
    """Cancel a handler when its client leaves: it may wait for a rendering, or for a grammar.

    It then raises ClientDisconnect. The response that it returns watches the client itself.
    """

    @wraps(handler)
    async def watched(owner: Owner, request: Request) -> Answer:
        has_arrived = asyncio.Event()  # the body; until then the handler receives

        async def receive() -> Message:
            message = await request.receive()
            if not message.get("more_body", False):
                has_arrived.set()
            return message

        async def left() -> Message:
            await has_arrived.wait()
            return await request.receive()

        async with while_client_waits(left):
            return await handler(owner, Request(request.scope, receive))

    return watched


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
