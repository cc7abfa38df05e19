"""Ends the preparation of an answer when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
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

        handling = asyncio.current_task()
        assert handling is not None
        watching = asyncio.ensure_future(_cancel_when_left(handling, has_arrived, request))
        try:
            return await handler(owner, Request(request.scope, receive))
        except asyncio.CancelledError:
            if watching.done() and handling.uncancel() == 0:
                raise ClientDisconnect from None
            raise
        finally:
            watching.cancel()

    return watched


async def _cancel_when_left(
    handling: asyncio.Task[Any], has_arrived: asyncio.Event, request: Request
) -> None:
    await has_arrived.wait()
    await until_left(request.receive)
    handling.cancel()


async def until_left(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
