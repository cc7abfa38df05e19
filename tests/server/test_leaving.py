"""Handlers whose client leaves, in any turn of the loop."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from minisgl.server.http.leaving import while_client_waits


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("later", range(-4, 5))
async def test_a_client_that_leaves_as_the_handler_ends_never_cancels_what_follows(
    later: int,
) -> None:
    """later: turns of the loop between the end of the handler and the leaving."""
    left, ready = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def answer() -> str:
        async with while_client_waits(receive):
            await ready.wait()
        await turns(10)  # as an answer is sent
        return "sent"

    answering = asyncio.ensure_future(answer())
    await turns(5)
    first, second = (ready, left) if later > 0 else (left, ready)
    first.set()
    await turns(abs(later))
    second.set()
    try:
        assert await answering == "sent"
    except ClientDisconnect:
        assert later <= 0
    assert answering.cancelling() == 0


async def test_a_handler_that_the_server_cancels_is_not_one_whose_client_left() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def answer() -> None:
        async with while_client_waits(receive):
            await asyncio.Event().wait()

    answering = asyncio.ensure_future(answer())
    await turns(5)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
